"""Listening on a Unix socket whose last owner may have been killed. Shared by keeper and agent."""

import socket
from pathlib import Path
from typing import Final

from aerostat_core.errors import SettingError

_MAX_PATH_BYTES: Final = 107  # sockaddr_un, less its final zero


class Listener:
    """A listening socket and its file. `close` leaves the file alone when another process has replaced it."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.sock = sock
        self._path = path
        self._inode = path.stat().st_ino

    def close(self) -> None:
        self.sock.close()
        if self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()


def listen(path: Path, *, takes_over: bool = False) -> Listener:
    """Bind and listen. A stale socket is replaced; a live one too where the caller has the right to take over.

    Raises SettingError when the path is too long, taken or not writable.
    """
    if len(bytes(path)) > _MAX_PATH_BYTES:
        raise SettingError(f"a socket path takes at most {_MAX_PATH_BYTES} bytes, got {path}: choose a shorter run folder")
    if not takes_over and _answers(path):
        raise SettingError(f"another process listens on {path}: end it, or choose another run folder")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(64)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise SettingError(f"cannot listen on {path}: {error}; the run folder must exist and be writable") from error
    return Listener(sock, path)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            raise SettingError(f"{path} is in the way: {error}; remove it") from error
    return True
