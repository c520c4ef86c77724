"""The child processes of `aerostat up`: started, started again when they die, stopped in order, none left behind.

A child is a process session of its own, so that Ctrl-C in the terminal reaches the parent only, and it gets SIGTERM from
the kernel when the parent ends without a word (`--die-with-parent`). What a dead child leaves (engines of a keeper that
was killed) becomes a child of this process, which ends it.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from aerostat_core.errors import SettingError
from aerostat_core.ids import Seconds

RESTART_DELAYS: Final[tuple[Seconds, ...]] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # the last one for all further tries
BAD_SETTING: Final = 2  # exit code of all our programs for a setting that cannot work: another try changes nothing
LIVED_LONG: Final[Seconds] = 60.0  # a child that ran this long starts over with the first delay
KILL_GRACE: Final[Seconds] = 5.0  # for the kernel to end what got SIGKILL

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """`stop_grace`: how long it may take between SIGTERM and its end. `what_it_means` follows "died" in the user's line."""

    name: str
    argv: tuple[str, ...]
    log: Path
    stop_grace: Seconds
    what_it_means: str


class Child:
    """One supervised program. `run` ends after `stop`, and raises SettingError for a program that says so of itself."""

    def __init__(self, spec: ChildSpec, family: "Family") -> None:
        self.spec = spec
        self._family = family
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = asyncio.get_running_loop().time()
            async with self._family.births:
                self._process = await self._start()
            code = await self._process.wait()
            if self._stopping.is_set():
                return
            if code == BAD_SETTING:
                raise SettingError(f"it cannot work as it is set. {last_lines(self.spec.log, 1).strip()} (log: {self.spec.log})")
            lived = asyncio.get_running_loop().time() - began
            failures = 0 if lived >= LIVED_LONG else failures + 1
            delay = RESTART_DELAYS[min(max(failures - 1, 0), len(RESTART_DELAYS) - 1)]
            await self._family.end_orphans()
            self._family.say(self._death_notice(code, delay, failures))
            await self._wait_stopping(delay)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace. Returns when the process is gone."""
        self._stopping.set()
        if self._process is None or self.pid is None:
            return
        _signal(self._process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.stop_grace):
                await self._process.wait()
        except TimeoutError:
            self._family.say(f"{self.spec.name} did not end within {self.spec.stop_grace:g} s: killed")
            self.kill()
            async with asyncio.timeout(KILL_GRACE):
                await self._process.wait()

    def kill(self) -> None:
        self._stopping.set()
        if self._process is not None and self.pid is not None:
            _signal(self._process.pid, signal.SIGKILL)

    async def _start(self) -> asyncio.subprocess.Process:
        with self.spec.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self.spec.argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _death_notice(self, code: int, delay: Seconds, failures: int) -> str:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        notice = f"{self.spec.name} ended {how}; {self.spec.what_it_means}. Starting it again in {delay:g} s"
        if failures != 2:
            return notice
        return f"{notice}. Its last words ({self.spec.log}):\n{last_lines(self.spec.log)}"

    async def _wait_stopping(self, limit: Seconds) -> None:
        try:
            async with asyncio.timeout(limit):
                await self._stopping.wait()
        except TimeoutError:
            return


class Family:
    """All children of this process. `births` is held while one is born, so that no newborn is taken for an orphan."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.births = asyncio.Lock()
        self._children: list[Child] = []

    def add(self, spec: ChildSpec) -> Child:
        child = Child(spec, self)
        self._children.append(child)
        return child

    async def stop(self, *stages: Sequence[Child]) -> None:
        """Stop each stage's children together, one stage after the other, then whatever they left."""
        for stage in stages:
            await asyncio.gather(*(child.stop() for child in stage))
        await self.end_orphans()

    def kill(self) -> None:
        for child in self._children:
            child.kill()

    async def end_orphans(self) -> None:
        """SIGKILL for all processes below this one that are neither a child of the family nor below one."""
        async with self.births:
            known = {child.pid for child in self._children}
            strays = [p for p in psutil.Process().children() if p.pid not in known]
            remaining = [*strays, *(below for p in strays for below in _descendants(p))]
            for process in remaining:
                _signal(process.pid, signal.SIGKILL)
            await asyncio.to_thread(psutil.wait_procs, remaining, timeout=KILL_GRACE)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def last_lines(log: Path, n: int = 8) -> str:
    """The end of a log, indented for the terminal."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-n:])


def _signal(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return
