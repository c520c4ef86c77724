"""The folder in which a node keeps models: its layout, one lock per model across processes, results that appear whole or not at all.

Preparers (processes of the engine) fill it and the agent evicts, at the same time and each without asking the other: what keeps them
apart are locks of the kernel, which end with the process that holds them, however it ends. Which model has to go is not decided here.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aerostat_core.errors import TemporaryError
from aerostat_core.ids import Bytes, Seconds

LOCK_TIMEOUT: Final[Seconds] = 3600.0
_RETRY: Final[Seconds] = 0.2
_FOLDERS: Final = ("downloads", "models", "probes", "locks", "sources", "public", "evicted")
_PARTIAL: Final = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is on the disk of one model. `last_used`: wall clock."""

    key: str
    is_whole: bool
    n_bytes: Bytes
    last_used: Seconds


class ModelCache:
    """A model has a key, by its source or by the SHA-256 of the file that it is made of. Raises OSError for a disk that is full."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------ where things are

    def download(self, key: str) -> Path:
        """What was fetched so far; deleted once the model is made of it."""
        return self.root / "downloads" / key

    def model(self, key: str) -> Path:
        """Where a whole one lies. An engine that serves it holds a shared lock on this folder (`in_use`)."""
        return self.root / "models" / key

    def probe(self, fingerprint: str, dtype: str, *, trust_remote_code: bool) -> Path:
        """Two for a model: making their own tells those who do not trust its code whether it loads without."""
        return self.root / "probes" / f"{fingerprint}-{dtype}{'-trusted' * trust_remote_code}.json"

    def public_marker(self, key: str) -> Path:
        """There for what was fetched without a token: anybody may have it."""
        return self.root / "public" / key

    def holds(self, path: Path) -> bool:
        """Whether it is in here, where each model belongs to those who may fetch it."""
        real = path.resolve()
        return any(real.is_relative_to((self.root / folder).resolve()) for folder in ("downloads", "models", "evicted"))

    def key_at(self, path: Path) -> str | None:
        """Of the model at a path that a preparer gave; None for one that is not in here."""
        return path.name if path.parent == self.root / "models" else None

    # ------------------------------------------------------------ which model a source means

    def remember(self, uri: str, key: str, *, with_code: bool = False, stamp: str = "") -> None:
        """`stamp`: what the source looked like when its key was found, where that can tell that it is still the same."""
        write_whole(self._source(uri, with_code), f"{key}\n{stamp}\n")

    def key_of(self, uri: str, *, with_code: bool = False, stamp: str = "") -> str | None:
        """What the source led to last; with a stamp, only if it was the same then. It may be evicted since."""
        try:
            key, stamped, *_ = self._source(uri, with_code).read_text().split("\n")
        except (FileNotFoundError, ValueError):
            return None
        return key if stamp in ("", stamped) else None

    def _source(self, uri: str, with_code: bool) -> Path:
        return self.root / "sources" / hashlib.sha256(f"{uri} {with_code}".encode()).hexdigest()[:32]

    # ------------------------------------------------------------ filling it

    @contextmanager
    def locked(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock `key`. `waiting` is called once when somebody else has it. Raises TemporaryError after an hour."""
        deadline = time.monotonic() + LOCK_TIMEOUT
        with self._lock_file(key).open("w") as file:
            told = False
            while not _try_lock(file.fileno()):
                if time.monotonic() > deadline:
                    raise TemporaryError("CacheBusy", f"another process holds {file.name}", retry_after=10.0)
                if not told:
                    waiting()
                    told = True
                time.sleep(_RETRY)
            yield

    @contextmanager
    def building(self, target: Path) -> Iterator[Path]:
        """An empty folder that becomes `target` when the block ends well and vanishes when it does not. Hold the lock."""
        partial = target.with_name(target.name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    # ------------------------------------------------------------ emptying it

    def kept(self) -> list[Kept]:
        """Every model that takes room, by key. A file that several share counts for the first."""
        seen: set[tuple[int, int]] = set()
        models = {path.name.removesuffix(_PARTIAL) for path in (self.root / "models").iterdir()}
        keys = models | {path.name for path in (self.root / "downloads").iterdir()}
        return [
            Kept(
                key=key,
                is_whole=self.model(key).is_dir(),
                n_bytes=_bytes_of(self._places(key), seen),
                last_used=_newest(self._places(key)),
            )
            for key in sorted(keys)
        ]

    def touch(self, key: str) -> None:
        """It is used now. Hold the lock."""
        with suppress(FileNotFoundError):
            os.utime(self.model(key))

    def evict(self, kept: Kept) -> bool:
        """Delete all of one model, unless a process makes it, has it open, or used it since: False.

        Renamed first, so that no half of it ever looks whole.
        """
        with ExitStack() as held:
            lock = held.enter_context(self._lock_file(kept.key).open("w"))
            if not _try_lock(lock.fileno()):
                return False
            with suppress(FileNotFoundError):
                if not _try_lock(held.enter_context(_folder(self.model(kept.key)))):
                    return False
            if _newest(self._places(kept.key)) > kept.last_used:
                return False
            trash = self._take_away(kept.key)
        _delete(trash)
        return True

    def discard(self, key: str) -> None:
        """As `evict`, for who holds the lock and knows that it is worth nothing; an engine that has it open keeps what it opened."""
        _delete(self._take_away(key))

    def sweep(self) -> None:
        """Delete what processes left that ended in the middle, but for downloads, which go on where they stopped."""
        _delete((self.root / "evicted").iterdir())
        for partial in (self.root / "models").glob(f"*{_PARTIAL}"):
            with self._lock_file(partial.name.removesuffix(_PARTIAL)).open("w") as lock:
                if _try_lock(lock.fileno()):
                    shutil.rmtree(partial, ignore_errors=True)

    def _take_away(self, key: str) -> list[Path]:
        """By renaming alone, which a disk that is full allows too."""
        self.public_marker(key).unlink(missing_ok=True)
        trash = []
        for number, place in enumerate(self._places(key)):
            gone = self.root / "evicted" / f"{key}.{os.getpid()}.{time.monotonic_ns()}.{number}"
            with suppress(FileNotFoundError):
                place.rename(gone)
                trash.append(gone)
        return trash

    def _places(self, key: str) -> tuple[Path, ...]:
        return self.model(key), self.model(key + _PARTIAL), self.download(key)

    def _lock_file(self, key: str) -> Path:
        return self.root / "locks" / key


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Whoever serves a model's folder holds this lock: no cache evicts it meanwhile, whichever agent asks. Raises OSError."""
    with _folder(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content at once."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL}")
    try:
        partial.write_text(text)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _bytes_of(places: tuple[Path, ...], seen: set[tuple[int, int]]) -> Bytes:
    total = 0
    for place in places:
        for folder, _, names in os.walk(place):
            for name in names:
                with suppress(FileNotFoundError):  # another process works here
                    stat = os.lstat(os.path.join(folder, name))
                    if (stat.st_dev, stat.st_ino) not in seen:
                        seen.add((stat.st_dev, stat.st_ino))
                        total += max(stat.st_size, stat.st_blocks * 512)
    return total


def _newest(places: tuple[Path, ...]) -> Seconds:
    times = [0.0]
    for place in places:
        with suppress(FileNotFoundError):
            times.append(place.stat().st_mtime)
    return max(times)
