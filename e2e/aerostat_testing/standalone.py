"""A real `aerostat up` for tests: the program as users start it, over a folder of manifests of the test's own."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import orjson
import yaml

from aerostat_core.ids import Seconds
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.served import Router, Served, ends_of
from aerostat_testing.waiting import wait_for

START_LIMIT: Final[Seconds] = 30.0
_READ_LIMIT: Final[Seconds] = 20.0  # for what is written to a file to be told


class Standalone(Served):
    """`manifests` is the folder, which a test may edit by hand as well."""

    node = "local"

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.manifests = root / "manifests"
        self.manifests.mkdir()
        self.runtime = Path(tempfile.mkdtemp(prefix="ae-"))  # short, since the paths of Unix sockets are
        self.output = root / "output.txt"
        self.model_cache = root / "models"

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self.runtime)

    def start(self, *flags: str, n_routers: int = 1) -> None:
        command = [sys.executable, "-m", "aerostat_cli", "up", str(self.manifests), "--port", "0", "--grpc-port", "0", "--admin-port", "0"]
        command += ["--routers", str(n_routers), "--model-cache", str(self.model_cache), *flags]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment)
        wait_for(self._is_listening, lambda: f"aerostat up listens; it said:\n{self.said}", limit=START_LIMIT)

    def write(self, name: str, *objects: dict[str, Any]) -> None:
        """At once, as an editor that renames does."""
        path = self.manifests / name
        part = path.with_suffix(".part")
        part.write_text(yaml.safe_dump_all(objects))
        part.replace(path)

    def remove(self, name: str) -> None:
        (self.manifests / name).unlink()

    def refusal(self, name: str, text: str) -> str:
        path = self.manifests / name
        whole, n_said = path.read_text(), len(self.said)
        path.write_text(text)
        told = wait_for(lambda: self._told(f"rejected {name}:", n_said), "the user reads what is wrong", limit=_READ_LIMIT)
        shown = self.command("get", "models", "--dir", str(self.manifests)).stderr
        assert f"rejected {name}" in shown
        n_said = len(self.said)
        path.write_text(whole)
        wait_for(lambda: self._told("all manifests are in force", n_said), "the user reads that all is well", limit=_READ_LIMIT)
        return told

    def objects(self, kind: Kind) -> dict[str, dict[str, Any]]:
        """Read from the state folder."""
        folder = self.manifests / ".aerostat" / "objects" / kind
        return {path.stem: orjson.loads(path.read_bytes()) for path in folder.glob("*/*.json") if not path.name.startswith(".")}

    def table(self, what: str) -> list[list[str]]:
        done = self.command("get", what, "--dir", str(self.manifests))
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    def wait_gone(self, model: str, *, limit: Seconds) -> None:
        super().wait_gone(model, limit=limit)
        wait_for(lambda: f"{model}: deleted" in self.said, "the user reads that it is gone", limit=limit)

    @property
    def routers(self) -> list[Router]:
        return [Router(**r) for r in self._run_file()["routers"]]

    def logs(self, n_bytes: int = 3000) -> str:
        return ends_of(list((self.manifests / ".aerostat" / "logs").rglob("*.log")), n_bytes)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"XDG_RUNTIME_DIR": str(self.runtime)}

    def _told(self, what: str, since: int) -> str | None:
        """The line of it among what was said since then."""
        return next((line for line in self.said[since:].splitlines() if what in line), None)

    def _run_file(self) -> dict[str, Any]:
        """Of the process that runs now; a killed one leaves its own."""
        runs = (orjson.loads(path.read_bytes()) for path in self.runtime.glob("aerostat-*/*/run.json"))
        return next((dict(run) for run in runs if run["pid"] == self.pid), {})

    def _is_listening(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"aerostat up ended with exit code {code}:\n{self.said}"
        return bool(self._run_file())
