"""Which folders are served on this machine, by whom, and where: the run folder and `run.json`.

The lock in the state folder is the only truth about who serves: the kernel drops it however its holder ends. A run
folder (Unix sockets, `run.json`) whose state folder nobody holds is a leftover of a killed run; the next start removes it.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import orjson

from aerostat_core.errors import PermanentError, SettingError
from aerostat_core.ids import Seconds

STATE_FOLDER: Final = ".aerostat"
# Engines keep their sockets in RUN/e/EPOCH, and want a path of at most 90 bytes there.
_MAX_RUNS_PATH: Final = 90 - len("/0123456789ab/e/0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddresses:
    http: str  # host:port each
    grpc: str
    admin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One running `aerostat up`, as it describes itself in `run.json`."""

    pid: int
    manifests: str
    state: str
    started_at: Seconds  # wall clock
    routers: tuple[RouterAddresses, ...]

    def write(self, folder: Path) -> None:
        part = folder / "run.json.part"
        with _naming_remedies(folder):
            part.write_bytes(orjson.dumps(asdict(self)))
            part.replace(folder / "run.json")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """None where no run has described itself (yet)."""
        try:
            fields = orjson.loads((folder / "run.json").read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return cls(**fields | {"routers": tuple(RouterAddresses(**r) for r in fields["routers"])})


def holder_of(state: Path) -> int | None:
    """Pid of the process that serves this folder (`StateLock`)."""
    try:
        descriptor = os.open(state / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(descriptor, 32) or 0)
    else:
        return None
    finally:
        os.close(descriptor)


def runs_folder() -> Path:
    """This user's run folders. Short, since the path of a Unix socket has at most 107 bytes; nobody else may look in."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    folder = (base if base.is_absolute() and base.is_dir() else Path(tempfile.gettempdir())) / f"aerostat-{os.getuid()}"
    if len(str(folder)) > _MAX_RUNS_PATH:
        raise SettingError(f"{folder} is too long a path for Unix sockets. Set XDG_RUNTIME_DIR to a shorter folder.")
    with _naming_remedies(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SettingError(f"{folder} must be a folder of yours that nobody else can open. Remove it, or set XDG_RUNTIME_DIR.")
    return folder


def run_folder(state: Path) -> Path:
    """Where the run of this state folder has its sockets; the same one each time."""
    return runs_folder() / hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:12]


@contextmanager
def fresh_run_folder(state: Path) -> Iterator[Path]:
    """An empty private folder for sockets, gone afterwards. The caller holds the lock of `state`.

    What is logged in it is kept in the state folder, for whoever asks later why something failed.
    """
    remove_stale_run_folders(own=state)
    folder = run_folder(state)
    try:
        with _naming_remedies(folder):
            folder.mkdir(mode=0o700)
            (folder / "logs").symlink_to(state / "logs")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _naming_remedies(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise SettingError(f"{folder} is in the way of the run's sockets: remove it, or set XDG_RUNTIME_DIR") from error
    except OSError as error:
        message = f"cannot keep the run's sockets in {folder}: {error.strerror}. Free it, or set XDG_RUNTIME_DIR to another folder"
        raise SettingError(message) from error


def remove_stale_run_folders(*, own: Path) -> None:
    """Remove what killed runs left, and what an earlier run of `own` left."""
    for folder in runs_folder().iterdir():
        run = Run.read(folder)
        if folder == run_folder(own) or (run is not None and holder_of(Path(run.state)) is None):
            shutil.rmtree(folder, ignore_errors=True)


def running() -> list[Run]:
    """All runs of this user, the newest first."""
    found = [run for folder in runs_folder().iterdir() if (run := Run.read(folder)) is not None]
    return sorted((r for r in found if holder_of(Path(r.state)) == r.pid), key=lambda r: r.started_at, reverse=True)


def find_run(manifests: Path | None) -> Run:
    """The run of that folder; without one, of the current folder, else the newest. Raises PermanentError."""
    runs = running()
    wanted = str((manifests or Path.cwd()).resolve())
    for run in runs:
        if run.manifests == wanted:
            return run
    if manifests is not None:
        others = "".join(f" Running: {r.manifests}." for r in runs)
        raise PermanentError("NotRunning", f"no `aerostat up {manifests}` is running.{others}")
    if not runs:
        raise PermanentError("NotRunning", "no `aerostat up` is running. Start one: aerostat up DIR")
    return runs[0]
