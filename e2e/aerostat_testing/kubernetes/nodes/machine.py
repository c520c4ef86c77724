"""A machine seen from the host: its first process, how to make it, to run commands in it, and to cut its power."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.logs import last_lines
from aerostat_testing.kubernetes.nodes.init import STAY, Boot
from aerostat_testing.kubernetes.nodes.processes import Process
from aerostat_testing.leaks import OUTLIVES_TESTS
from aerostat_testing.waiting import wait_for

START_LIMIT: Final[Seconds] = 30.0
END_LIMIT: Final[Seconds] = 30.0
_PROCESS_FILE: Final = "first-process"


class Machine:
    """One that is made by `start`, or found again by its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def first(self) -> Process | None:
        """Its first process; None while it is off."""
        try:
            found = Process.parse((self.folder / _PROCESS_FILE).read_text())
        except FileNotFoundError:
            return None
        return found if found and found.is_alive else None

    @property
    def is_ours(self) -> bool:
        """Whether this process started it."""
        return self._launcher is not None

    def start(self, command: list[str], depth: int) -> None:
        """`depth`: how many processes lie between that command and the first one. It waits for `boot` then."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._launcher = subprocess.Popen(
                command, env=os.environ | {OUTLIVES_TESTS: "1"}, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        launcher = Process.of(self._launcher.pid)
        first = wait_for(lambda: self._descendant(launcher, depth), f"{self.name} exists", limit=START_LIMIT)
        (self.folder / _PROCESS_FILE).write_text(str(first))

    def _descendant(self, process: Process, depth: int) -> Process | None:
        found: Process | None = process
        for _ in range(depth):
            found = found and found.child()
        assert process.is_alive, f"{self.name} did not start; {self._log} ends:\n{last_lines(self._log)}"
        return found

    def boot(self, boot: Boot) -> None:
        self._tell(boot.line())

    def let_stay(self) -> None:
        """From now on it outlives this process."""
        self._tell(STAY)
        self._input.close()

    def command(self, argv: Sequence[str], *, namespaces: Sequence[str] = ("net",)) -> list[str]:
        """That command in those of its namespaces, and in the host's otherwise."""
        first = self.first
        assert first is not None, f"{self.name} is off"
        return ["nsenter", f"--target={first.pid}", *(f"--{kind}" for kind in namespaces), "--", *argv]

    def cut_power(self) -> None:
        """The kernel ends all that runs in it at once."""
        if (first := self.first) is not None:
            first.kill()
            assert first.has_ended(END_LIMIT), f"{self.name} has not ended after {END_LIMIT:g} s"
        self.reap()

    def reap(self) -> None:
        """What this process started of it, once it has ended; it ends then too if it was not let stay."""
        if self._launcher is not None:
            self._input.close()
            self._launcher.wait(END_LIMIT)
            self._launcher = None
        (self.folder / _PROCESS_FILE).unlink(missing_ok=True)

    @property
    def _log(self) -> Path:
        return self.folder / "machine.log"

    @property
    def _input(self) -> IO[bytes]:
        assert self._launcher is not None, f"{self.name} was started by somebody else"
        assert self._launcher.stdin is not None
        return self._launcher.stdin

    def _tell(self, line: bytes) -> None:
        self._input.write(line)
        self._input.flush()
