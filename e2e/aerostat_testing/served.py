"""A whole Aerostat that serves on this machine, for the tests that all ways of running it must pass.

One process is the parent of all others: of `aerostat up`, or of what a kubelet would run. Whatever a test did, nothing of it
runs afterwards.
"""

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import grpc
import psutil

from aerostat.v1 import telemetry_pb2, telemetry_pb2_grpc
from aerostat_core.ids import Seconds
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.command_lines import command_line
from aerostat_testing.waiting import wait_for

READY_LIMIT: Final[Seconds] = 180.0
COMMAND_LIMIT: Final[Seconds] = 30.0
STOP_LIMIT: Final[Seconds] = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """host:port of each of its listeners."""

    http: str
    grpc: str
    admin: str


class Served(ABC):
    """Context manager. Objects are declared file by file, as users keep them."""

    node: ClassVar[str]
    output: Path  # what the parent says

    def __init__(self) -> None:
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

    # ------------------------------------------------------------ what differs

    @abstractmethod
    def start(self, *, n_routers: int = 1) -> None:
        """Start it on free ports. Returns when its routers listen."""

    @abstractmethod
    def write(self, name: str, *objects: dict[str, Any]) -> None:
        """Declare what that file has from now on; what it had before and has no more is deleted."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file with its objects."""

    @abstractmethod
    def refusal(self, name: str, text: str) -> str:
        """What the user reads who writes this into a file and is refused. The file is then as it was before."""

    @abstractmethod
    def objects(self, kind: Kind) -> dict[str, dict[str, Any]]:
        """By name."""

    @abstractmethod
    def table(self, what: str) -> list[list[str]]:
        """The cells of what is shown to who asks to `get` that kind."""

    @property
    @abstractmethod
    def routers(self) -> list[Router]: ...

    @abstractmethod
    def logs(self, n_bytes: int = 3000) -> str:
        """The ends of all logs, for the message of a failed test."""

    # ------------------------------------------------------------ processes

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() it first"
        return self._process.pid

    def send(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def wait(self, limit: Seconds = STOP_LIMIT) -> int:
        """The parent's exit code, once it has ended by itself or by a signal of the test."""
        assert self._process is not None, "start() it first"
        return self._process.wait(limit)

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def child(self, module: str) -> psutil.Process:
        """The running process that was started as `python -m MODULE`. Raises NotInTimeError where there is none."""
        return wait_for(lambda: next(iter(self.descendants(module)), None), f"a process of {module} runs")

    def descendants(self, word: str = "") -> list[psutil.Process]:
        """All processes below the parent whose command line has that word."""
        return [p for p in psutil.Process(self.pid).children(recursive=True) if word in " ".join(command_line(p))]

    def engines(self) -> list[psutil.Process]:
        return [p for p in self.descendants() if "aerostat_engine.launch" in command_line(p)]

    def remember_family(self) -> None:
        """Note who belongs to it now, to find out later who outlived it."""
        for process in (psutil.Process(self.pid), *self.descendants()):
            self._family[process.pid] = process

    def survivors(self) -> list[psutil.Process]:
        return [p for p in self._family.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    # ------------------------------------------------------------ states

    @property
    def url(self) -> str:
        return f"http://{self.routers[0].http}"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"COLUMNS": "200"}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """An `aerostat` command of the same user."""
        command = [sys.executable, "-m", "aerostat_cli", *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=self.environment, timeout=COMMAND_LIMIT)

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

        def wanted() -> str:
            shown = f"it is {self.condition(model, condition)}; was said:\n{self.said}\n{self.logs()}"
            return f"{condition} of {model} is {status}; {shown}"

        return wait_for(reached, wanted, limit=limit)

    def wait_gone(self, model: str, *, limit: Seconds) -> None:
        """Until nobody sees the model any more."""
        wait_for(lambda: model not in self.objects(Kind.MODEL), f"{model} is gone", limit=limit)

    def wait_idle(self, model: str, *, limit: Seconds) -> None:
        """Until the agent that has the model says that nothing of it runs or waits."""
        address = next(iter(self.objects(Kind.INSTANCE).values()))["status"]["agentAddress"]
        with grpc.insecure_channel(address) as channel:
            request = telemetry_pb2.SubscribeRequest(router="test")
            for message in telemetry_pb2_grpc.TelemetryStub(channel).Subscribe(request, timeout=limit):
                for state in (m for instance in message.instances for m in instance.models if m.model == model):
                    if state.running == state.waiting == 0:
                        return


def ends_of(logs: list[Path], n_bytes: int) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_bytes()[-n_bytes:].decode(errors='replace')}" for path in sorted(logs))
