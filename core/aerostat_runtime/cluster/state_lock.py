"""One `aerostat up` for a state folder. The kernel drops the lock with the process, however that ends."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from aerostat_core.errors import SettingError
from aerostat_runtime.cluster.store import naming_remedies


class StateLock:
    """Held from construction to `release`. Raises SettingError that names who holds it."""

    def __init__(self, state: Path) -> None:
        with naming_remedies(state):
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._fd, 32, 0).decode().strip() or "unknown"
                os.close(self._fd)
                raise SettingError(
                    f"`aerostat up` runs already in {state.parent} (pid {holder}): stop it (kill {holder}), or use another folder"
                ) from None
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
