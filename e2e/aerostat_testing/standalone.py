"""A real `aerostat up` for tests: the program as users start it, over a folder of manifests of the test's own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import grpc
import orjson
import psutil
import yaml

from aerostat.v1 import telemetry_pb2, telemetry_pb2_grpc
from aerostat_core.ids import Seconds
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.waiting import NotInTimeError, wait_for

START_LIMIT: Final[Seconds] = 30.0
READY_LIMIT: Final[Seconds] = 180.0
COMMAND_LIMIT: Final[Seconds] = 30.0
STOP_LIMIT: Final[Seconds] = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """host:port of each of its listeners."""

    http: str
    grpc: str
    admin: str


class Standalone:
    """Context manager: whatever the test did, nothing of it runs afterwards."""

    def __init__(self, root: Path) -> None:
        self.manifests = root / "manifests"
        self.manifests.mkdir()
        self.runtime = Path(tempfile.mkdtemp(prefix="ae-"))  # short, since the paths of Unix sockets are
        self.output = root / "output.txt"
        self.model_cache = root / "models"
        self._process: subprocess.Popen[bytes] | None = None
        self._family: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.remember_family()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_LIMIT)
        for process in self.survivors():
            process.kill()
        shutil.rmtree(self.runtime)

    # ------------------------------------------------------------ manifests

    def write(self, name: str, *objects: dict[str, Any]) -> Path:
        """Write one manifest file at once, as an editor that renames does."""
        path = self.manifests / name
        part = path.with_suffix(".part")
        part.write_text(yaml.safe_dump_all(objects))
        part.replace(path)
        return path

    # ------------------------------------------------------------ the process

    def start(self, *flags: str, n_routers: int = 1) -> None:
        """Start it on free ports. Returns when its routers listen."""
        command = [sys.executable, "-m", "aerostat_cli", "up", str(self.manifests), "--port", "0", "--grpc-port", "0", "--admin-port", "0"]
        command += ["--routers", str(n_routers), "--model-cache", str(self.model_cache), *flags]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment)
        wait_for(self._is_listening, f"aerostat up listens; it said:\n{self.said}", limit=START_LIMIT)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"XDG_RUNTIME_DIR": str(self.runtime), "COLUMNS": "200"}

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() it first"
        return self._process.pid

    def wait(self, limit: Seconds = STOP_LIMIT) -> int:
        """Its exit code, once it has ended by itself or by a signal of the test."""
        assert self._process is not None, "start() it first"
        return self._process.wait(limit)

    def send(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def child(self, module: str) -> psutil.Process:
        """The running process that was started as `python -m MODULE`. Raises NotInTimeError where there is none."""
        return wait_for(lambda: next(iter(self.descendants(module)), None), f"a process of {module} runs")

    def descendants(self, word: str = "") -> list[psutil.Process]:
        """All processes below it whose command line has that word."""
        return [p for p in psutil.Process(self.pid).children(recursive=True) if word in " ".join(_command_line(p))]

    def remember_family(self) -> None:
        """Note who belongs to it now, to find out later who outlived it."""
        for process in (psutil.Process(self.pid), *self.descendants()):
            self._family[process.pid] = process

    def survivors(self) -> list[psutil.Process]:
        return [p for p in self._family.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    # ------------------------------------------------------------ objects, as `aerostat get` shows them

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `aerostat` command of the same user."""
        command = [sys.executable, "-m", "aerostat_cli", *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=self.environment, timeout=COMMAND_LIMIT)

    def get(self, what: str, *arguments: str) -> str:
        """What `aerostat get` prints."""
        done = self.command("get", what, *arguments, "--dir", str(self.manifests))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, kind: Kind) -> dict[str, dict[str, Any]]:
        """By name, read from the state folder."""
        folder = self.manifests / ".aerostat" / "objects" / kind
        return {path.stem: orjson.loads(path.read_bytes()) for path in folder.glob("*/*.json") if not path.name.startswith(".")}

    def condition(self, model: str, condition: str = "Ready") -> dict[str, Any]:
        """Empty where there is none (yet)."""
        status = self.objects(Kind.MODEL).get(model, {}).get("status", {})
        return next((c for c in status.get("conditions", ()) if c["type"] == condition), {})

    def wait_ready(self, *models: str, limit: Seconds = READY_LIMIT) -> None:
        for model in models:
            self.wait_condition(model, "True", limit=limit)

    def wait_condition(self, model: str, status: str, *, condition: str = "Ready", limit: Seconds = READY_LIMIT) -> dict[str, Any]:
        """The condition, once it has that status for the model's present generation."""

        def reached() -> dict[str, Any] | None:
            found = self.condition(model, condition)
            stored = self.objects(Kind.MODEL).get(model)
            is_current = stored is not None and found.get("observedGeneration") == stored["metadata"]["generation"]
            return found if is_current and found["status"] == status else None

        try:
            return wait_for(reached, f"{condition} of {model} is {status}", limit=limit)
        except NotInTimeError as error:
            shown = f"it is {self.condition(model, condition)}; aerostat up said:\n{self.said}\n{self.logs()}"
            raise NotInTimeError(f"{error}; {shown}") from error

    def wait_idle(self, model: str, *, limit: Seconds) -> None:
        """Until the agent that has the model says that nothing of it runs or waits."""
        address = next(iter(self.objects(Kind.INSTANCE).values()))["status"]["agentAddress"]
        with grpc.insecure_channel(address) as channel:
            request = telemetry_pb2.SubscribeRequest(router="test")
            for message in telemetry_pb2_grpc.TelemetryStub(channel).Subscribe(request, timeout=limit):
                for state in (m for instance in message.instances for m in instance.models if m.model == model):
                    if state.running == state.waiting == 0:
                        return

    def logs(self, n_bytes: int = 3000) -> str:
        """The ends of all logs, for the message of a failed test."""
        files = sorted((self.manifests / ".aerostat" / "logs").rglob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_bytes()[-n_bytes:].decode(errors='replace')}" for path in files)

    # ------------------------------------------------------------ addresses

    @property
    def routers(self) -> list[Router]:
        return [Router(**r) for r in self._run_file()["routers"]]

    @property
    def url(self) -> str:
        return f"http://{self.routers[0].http}"

    def _run_file(self) -> dict[str, Any]:
        """Of the process that runs now; a killed one leaves its own."""
        runs = (orjson.loads(path.read_bytes()) for path in self.runtime.glob("aerostat-*/*/run.json"))
        return next((dict(run) for run in runs if run["pid"] == self.pid), {})

    def _is_listening(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"aerostat up ended with exit code {code}:\n{self.said}"
        return bool(self._run_file())


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
