"""The first process of a machine: it gets the machine ready, runs its programs, each again when it ends, and reaps orphans.

`python -m aerostat_testing.kubernetes.nodes.init` reads a `Boot` from its input, one line of JSON, and then waits for the
word `stay`. An input that ends before ends the machine, and the kernel ends whatever runs in it: so a machine is never
left half made, nor longer than who made it, unless that one said so.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.nodes import mounts

STAY: Final = b"stay\n"
_RESTART_AFTER: Final[Seconds] = 1.0
_POLL: Final[Seconds] = 0.05


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    argv: tuple[str, ...]
    needs: str = ""  # a path that must be there first


@dataclass(frozen=True, kw_only=True)
class Boot:
    hostname: str
    programs: tuple[Program, ...]
    path: str  # where programs look for others
    logs: str
    held: str  # a folder; a program whose name is in there does not run
    disk: str = ""  # the machine's own one; without, it sees the host's files
    shown: dict[str, str] = field(default_factory=dict)  # folders of the host, by where they are seen

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Boot":
        read = json.loads(line)
        programs = tuple(Program(**{**program, "argv": tuple(program["argv"])}) for program in read["programs"])
        return cls(**{**read, "programs": programs})


class _Supervised:
    def __init__(self, program: Program, boot: Boot) -> None:
        self._program, self._boot = program, boot
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0

    def look_after(self) -> None:
        """Start it where it is to run and does not, or the other way round."""
        if self._process is not None and self._is_held():
            self._process.kill()
        if self._process is None and self._is_due():
            environment = {"PATH": self._boot.path, "HOME": self._boot.logs}
            with Path(self._boot.logs, f"{self._program.name}.log").open("ab") as log:
                self._process = subprocess.Popen(self._program.argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _is_held(self) -> bool:
        return Path(self._boot.held, self._program.name).exists()

    def _is_due(self) -> bool:
        has_needed = not self._program.needs or Path(self._program.needs).exists()
        return has_needed and not self._is_held() and time.monotonic() >= self._not_before

    def notice(self, pid: int) -> None:
        if self._process is not None and self._process.pid == pid:
            self._process.returncode = 0  # it is reaped; else Popen complains
            self._process = None
            self._not_before = time.monotonic() + _RESTART_AFTER


def run(boot: Boot) -> None:
    """Until the input ends without a word."""
    socket.sethostname(boot.hostname)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    if boot.disk:
        mounts.separate(Path(boot.disk), shown={place: Path(path) for place, path in boot.shown.items()})
    programs = [_Supervised(program, boot) for program in boot.programs]
    watched = [sys.stdin.fileno()]
    while True:
        for program in programs:
            program.look_after()
        if select.select(watched, [], [], _POLL)[0]:
            if os.read(sys.stdin.fileno(), len(STAY)) != STAY:
                return
            watched = []
        while (pid := _reaped()) is not None:
            for program in programs:
                program.notice(pid)


def _reaped() -> int | None:
    try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return pid or None


def _boot_line() -> bytes:
    """Unbuffered, so that what follows the line stays in the input."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (read := os.read(sys.stdin.fileno(), 1)):
            return b""
        line += read
    return bytes(line)


if __name__ == "__main__":
    if line := _boot_line():
        run(Boot.parse(line))
