"""The cache outside the tree that programs and images are built into: by one process at a time, which says how far it is."""

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from aerostat_core.ids import Seconds

CACHE_VARIABLE: Final = "AEROSTAT_KUBERNETES_CACHE"
BUILD_LIMIT: Final[Seconds] = 3600.0
_SAY_EVERY: Final[Seconds] = 15.0
_SHOWN_OF_A_FAILURE: Final = 4000  # characters

Say = Callable[[str], None]


class BuildError(Exception):
    """The message has what the compiler said, or what is missing on this machine."""


def default_cache() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aerostat"


def say_on_stderr(text: str) -> None:
    sys.stderr.write(f"kubernetes for tests: {text}\n")
    sys.stderr.flush()


@contextmanager
def alone(folder: Path, label: str, say: Say) -> Iterator[None]:
    """The kernel releases the lock of a process that died. Raises BuildError."""
    began = told = time.monotonic()
    with (folder / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now - began > BUILD_LIMIT:
                    raise BuildError(f"another process has been building {label} for {BUILD_LIMIT:.0f} s: is it stopped?") from None
                if now - told >= _SAY_EVERY:
                    told = now
                    say(f"{label}: another process builds it ({now - began:.0f} s)")
                time.sleep(0.1)
        yield


def run_patiently(
    command: list[str],
    label: str,
    *,
    progress: Callable[[str], str],
    say: Say,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What it said. `progress` makes of what it said so far what to tell meanwhile. Raises BuildError with the end of it."""
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while True:
                try:
                    process.wait(_SAY_EVERY)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - began
                    if seconds > BUILD_LIMIT:
                        raise BuildError(f"{label}: not built after {BUILD_LIMIT:.0f} s") from None
                    say(f"{label}: {progress(_read(output.fileno()))} ({seconds:.0f} s)")
        except BaseException:
            process.kill()
            raise
        said = _read(output.fileno())
        if process.returncode:
            raise BuildError(f"{label}: the build failed:\n{said[-_SHOWN_OF_A_FAILURE:]}")
        return said


def _read(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
