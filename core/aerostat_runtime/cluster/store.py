"""Objects as files of one folder, for several processes at once: what etcd is to an API server.

    STATE/version                       layout of the folder
    STATE/objects/revision              number of the last write; a rename onto it is the signal that something changed
    STATE/objects/.lock                 flock of whoever writes
    STATE/objects/Kind/namespace/name.json

Each object is replaced by rename, so readers need no lock and see the old or the new one. It knows nothing of schemas,
owners or watches. All calls block; `folder` runs them in threads.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import orjson

from aerostat_core.errors import PermanentError, SettingError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource
from aerostat_runtime.cluster.port import Kind

LAYOUT: Final = "1"
REVISION_FILE: Final = "revision"
_LOCK_WAIT: Final[Seconds] = 10.0  # writers hold the lock for milliseconds
_LOCK_POLL: Final[Seconds] = 0.002
_NO_SPACE_RETRY: Final[Seconds] = 5.0


class ObjectStore:
    def __init__(self, state: Path) -> None:
        """Makes the folder where there is none. Raises SettingError for a state folder of another layout."""
        self.state = state
        self.root = state / "objects"
        with naming_remedies(state):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_layout()

    def list(self, kind: Kind) -> list[Resource]:
        """All objects of a kind, by namespace and name."""
        with naming_remedies(self.state):
            files = sorted((self.root / kind).glob("*/*.json"))
            found = (self._read(path) for path in files if not path.name.startswith("."))
            return [resource for resource in found if resource is not None]

    def get(self, kind: Kind, name: NamespacedName) -> Resource | None:
        with naming_remedies(self.state):
            return self._read(self._path(kind, name))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone among the writers of all processes. Needed around `write`, `remove` and the reads they depend on."""
        with naming_remedies(self.state):
            fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _lock(fd, self.root)
                yield
            finally:
                os.close(fd)

    def write(self, kind: Kind, name: NamespacedName, resource: Resource) -> Resource:
        """Stores it under the next resourceVersion, and returns what was stored."""
        path = self._path(kind, name)
        old = self._read(path)
        # A writer that died between object and revision left an object that is ahead of the revision.
        version = max(self._revision(), int(old["metadata"]["resourceVersion"]) if old else 0) + 1
        stored = {**resource, "metadata": {**resource["metadata"], "resourceVersion": str(version)}}
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, orjson.dumps(stored, option=orjson.OPT_INDENT_2))
        self._set_revision(version)
        return stored

    def remove(self, kind: Kind, name: NamespacedName) -> bool:
        """False: there was none."""
        try:
            self._path(kind, name).unlink()
        except FileNotFoundError:
            return False
        self._set_revision(self._revision() + 1)
        return True

    def _path(self, kind: Kind, name: NamespacedName) -> Path:
        for part in (name.namespace, name.name):
            if "/" in part or part.startswith(".") or not part:
                raise ValueError(f"{part!r} is no name of an object")
        return self.root / kind / name.namespace / f"{name.name}.json"

    def _read(self, path: Path) -> Resource | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            resource: Resource = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise PermanentError("BrokenState", f"{path} is no JSON ({error}): delete it, it is made anew") from error
        return resource

    def _revision(self) -> int:
        try:
            return int((self.root / REVISION_FILE).read_text())
        except FileNotFoundError:
            return 0

    def _set_revision(self, revision: int) -> None:
        replace_file(self.root / REVISION_FILE, str(revision).encode(), durable=False)

    def _check_layout(self) -> None:
        path = self.state / "version"
        try:
            layout = path.read_text().strip()
        except FileNotFoundError:
            return replace_file(path, LAYOUT.encode())
        if layout != LAYOUT:
            raise SettingError(
                f"{self.state} was written by another version of Aerostat (layout {layout!r}, this one reads {LAYOUT!r}): "
                "move the folder away; it is made anew from the manifests"
            )


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Whole or not at all. `durable`: a power cut cannot leave a torn file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _lock(fd: int, root: Path) -> None:
    deadline = time.monotonic() + _LOCK_WAIT
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TemporaryError(
                    "StateBusy", f"another process has held {root}/.lock for {_LOCK_WAIT:.0f} s: is one stopped?", retry_after=1.0
                ) from None
            time.sleep(_LOCK_POLL)


@contextmanager
def naming_remedies(folder: Path) -> Iterator[None]:
    """What the file system refuses, in words that say what to do."""
    try:
        yield
    except OSError as error:
        _raise_with_remedy(folder, error)


def _raise_with_remedy(folder: Path, error: OSError) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"no space left for the state folder {folder}: free some"
        raise TemporaryError("NoSpace", message, retry_after=_NO_SPACE_RETRY) from error
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
        where = error.filename or folder
        message = f"cannot write the state folder: {where}: {error.strerror}; make it a folder that this user may write, or choose another"
        raise PermanentError("StateUnwritable", message) from error
    raise error
