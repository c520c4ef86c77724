"""The keeper's record of every process that it started, until an agent has accounted for it.

A process counts as running until nobody of its session lives: only then is all of its memory back. When the first
process of a session ends, the rest is killed.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from resource import RLIMIT_DATA, setrlimit
from typing import Final

from aerostat_agent.keeper.logs import bound_log, open_log
from aerostat_agent.keeper.sessions import living, signal_session
from aerostat_core.errors import PermanentError
from aerostat_core.ids import Bytes, Epoch, Seconds
from aerostat_runtime.process import die_with_parent

MAX_RECORDS: Final = 1024  # ended ones that nobody has forgotten included


@dataclass(slots=True, kw_only=True)
class Process:
    """`pid` is also the id of its session. `exit_code` is negative for a signal; set once the first process has ended."""

    epoch: Epoch
    pid: int
    note: bytes
    log_path: Path
    started_at: Seconds  # wall clock
    exit_code: int | None = None
    is_gone: bool = False


class ProcessTable:
    """Mutated by `start`, `reap` and `forget`; used from one thread, the one whose end the processes share."""

    def __init__(self) -> None:
        self._by_epoch: dict[Epoch, Process] = {}
        self._handles: dict[int, subprocess.Popen[bytes]] = {}  # by pid, until reaped

    def __iter__(self) -> Iterator[Process]:
        return iter(self._by_epoch.values())

    @property
    def running(self) -> tuple[Process, ...]:
        return tuple(p for p in self if not p.is_gone)

    @property
    def has_lingering(self) -> bool:
        """Some session has lost its first process, and others of it still live."""
        return any(p.exit_code is not None for p in self.running)

    def start(
        self,
        *,
        epoch: Epoch,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        note: bytes,
        memory_limit_bytes: Bytes,
        now: Seconds,
    ) -> Process:
        """Start it in a session of its own. Raises PermanentError that says what is wrong with the request."""
        if epoch in self._by_epoch:
            raise PermanentError("EpochTaken", f"epoch {epoch} belongs to another process: start with a higher one")
        if len(self._by_epoch) >= MAX_RECORDS:
            raise PermanentError("TooManyRecords", f"{MAX_RECORDS} processes are on record: forget those that have ended")
        if not argv:
            raise PermanentError("EmptyCommand", "argv is empty: name a program to start")
        try:
            bound_log(log_path)
            handle = _spawn(argv, env, log_path, memory_limit_bytes)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise PermanentError("StartFailed", f"cannot start {argv[0]}: {error}") from error
        process = Process(epoch=epoch, pid=handle.pid, note=note, log_path=log_path, started_at=now)
        self._by_epoch[epoch] = process
        self._handles[handle.pid] = handle
        return process

    def signal(self, epoch: Epoch, signum: int) -> None:
        """To every process of the session; one that is gone already is no error. Raises PermanentError."""
        process = self._known(epoch)
        if signum not in {s.value for s in signal.Signals}:
            raise PermanentError("BadSignal", f"{signum} is no signal number")
        if not process.is_gone:
            signal_session(process.pid, signum)

    def forget(self, epoch: Epoch) -> None:
        """Drop the record of a process that is gone; an unknown epoch is no error. Raises PermanentError."""
        process = self._by_epoch.get(epoch)
        if process is not None and not process.is_gone:
            raise PermanentError("StillRunning", f"process {process.pid} (epoch {epoch}) still runs: end it first")
        self._by_epoch.pop(epoch, None)

    @property
    def has_children(self) -> bool:
        """Some process of ours lives, or has not been reaped: its own, and orphans that it adopted."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def reap(self) -> tuple[Process, ...]:
        """Collect ended children, orphans included, and end what a dead first process left. Returns who is gone since."""
        for pid, exit_code in _ended_children():
            handle = self._handles.pop(pid, None)
            if handle is None:
                continue
            handle.returncode = exit_code  # or Popen would wait for a pid that is ours no more
            next(p for p in self.running if p.pid == pid).exit_code = exit_code
        gone = []
        for process in self.running:
            if process.exit_code is not None and not signal_session(process.pid, signal.SIGKILL):
                process.is_gone = True
                gone.append(process)
        return tuple(gone)

    def signal_all(self, signum: int) -> int:
        """To every session, and to children that left theirs; returns how many processes got it."""
        sessions = {p.pid for p in self.running}
        n = sum(signal_session(session, signum) for session in sessions)
        me = os.getpid()
        for pid, parent, session in living():
            if parent == me and session not in sessions:
                os.kill(pid, signum)  # a child of ours: its pid is ours until it is reaped
                n += 1
        return n

    def bound_logs(self) -> None:
        """Raises OSError."""
        for process in self.running:
            bound_log(process.log_path)

    def _known(self, epoch: Epoch) -> Process:
        if (process := self._by_epoch.get(epoch)) is None:
            raise PermanentError("UnknownEpoch", f"no process has epoch {epoch}: list them")
        return process


def _spawn(argv: Sequence[str], env: Mapping[str, str], log_path: Path, memory_limit_bytes: Bytes) -> subprocess.Popen[bytes]:
    log = open_log(log_path)
    try:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=True,
            start_new_session=True,
            preexec_fn=partial(_become_child, os.getpid(), memory_limit_bytes),  # noqa: PLW1509 -- safe: the keeper has one thread
        )
    finally:
        os.close(log)


def _become_child(keeper_pid: int, memory_limit_bytes: Bytes) -> None:
    """Between fork and exec: no engine outlives its keeper, not even one that was killed."""
    die_with_parent(keeper_pid, signal.SIGKILL)
    if memory_limit_bytes:
        setrlimit(RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))  # not AS: engines reserve far more than they use


def _ended_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)
