"""Processes by identity: an id that the kernel gave to another process meanwhile is not taken for the first one."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import psutil

from aerostat_core.ids import Seconds

_POLL: Final[Seconds] = 0.02
_START_FIELD: Final = 19  # of /proc/PID/stat, counted after the command's name


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: int  # clock ticks since the machine booted

    @classmethod
    def of(cls, pid: int) -> Self:
        """Raises ProcessLookupError."""
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, started)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        pid, dash, started = text.strip().partition("-")
        return cls(int(pid), int(started)) if dash and pid.isdecimal() and started.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"

    @property
    def is_alive(self) -> bool:
        """A zombie is not: it has let go of everything."""
        return _started(self.pid) == self.started

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Nothing where it has ended."""
        try:
            if self.is_alive:
                os.kill(self.pid, signum)
        except ProcessLookupError:
            pass

    def has_ended(self, limit: Seconds) -> bool:
        deadline = time.monotonic() + limit
        while self.is_alive:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        return True

    def child(self) -> "Process | None":
        """The only one, or None while there is none."""
        try:
            children = psutil.Process(self.pid).children()
            return Process.of(children[0].pid) if children else None
        except (psutil.NoSuchProcess, ProcessLookupError):
            return None


def _started(pid: int) -> int | None:
    """None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[_START_FIELD])
