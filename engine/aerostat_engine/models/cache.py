"""The folder in which models are kept: one lock per model across processes, and results that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aerostat_core.errors import TemporaryError
from aerostat_core.ids import Seconds

LOCK_TIMEOUT: Seconds = 3600.0
_RETRY: Seconds = 0.2


class ModelCache:
    """Kernel locks end with the process that holds them, however it ends: what it left half done is deleted by the next holder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for folder in ("downloads", "models", "probes", "locks", "sources", "public"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def download(self, key: str) -> Path:
        return self._root / "downloads" / key

    def model(self, key: str) -> Path:
        """Where a whole one lies: by the SHA-256 of the file that it was made of, or by repository and commit."""
        return self._root / "models" / key

    def probe(self, fingerprint: str, dtype: str, *, trust_remote_code: bool) -> Path:
        """Two for a model: making their own tells those who do not trust its code whether it loads without."""
        return self._root / "probes" / f"{fingerprint}-{dtype}{'-trusted' * trust_remote_code}.json"

    def source(self, key: str) -> Path:
        """Remembers which model a fetched source led to, so that it is fetched once."""
        return self._root / "sources" / key

    def public_marker(self, key: str) -> Path:
        """There for what was fetched without a token: anybody may have it."""
        return self._root / "public" / key

    def holds(self, path: Path) -> bool:
        """Whether it is in here, where each model belongs to those who may fetch it."""
        real = path.resolve()
        return any(real.is_relative_to((self._root / folder).resolve()) for folder in ("downloads", "models"))

    @contextmanager
    def locked(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock `key`. `waiting` is called once when somebody else has it. Raises TemporaryError after an hour."""
        deadline = time.monotonic() + LOCK_TIMEOUT
        with (self._root / "locks" / key).open("w") as file:
            told = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TemporaryError("CacheBusy", f"another process holds {file.name}", retry_after=10.0) from None
                    if not told:
                        waiting()
                        told = True
                    time.sleep(_RETRY)
            yield

    @contextmanager
    def building(self, target: Path) -> Iterator[Path]:
        """An empty folder that becomes `target` when the block ends well and vanishes when it does not. Hold the lock."""
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content at once."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
