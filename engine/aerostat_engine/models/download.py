"""One large file over HTTP: it goes on where it stopped, a killed process or not, and has its name once its hash is right.

Errors show no URL, since those of storage are signed.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from aerostat_core.errors import TemporaryError
from aerostat_core.ids import Bytes, Seconds
from aerostat_engine.models.manifest import Progress

_TRIES: Final = 5  # in a row without one more byte
_TIMEOUT: Final = httpx.Timeout(30.0, read=60.0)
_RETRY: Final[Seconds] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """`headers` and `auth` may hold secrets; a redirect to another host leaves `Authorization` behind."""

    url: str = field(repr=False)
    sha256: str | None
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    auth: httpx.Auth | tuple[str, str] | None = field(default=None, repr=False)
    proxy: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | bool = True


def part_of(target: Path) -> Path:
    """Where what came so far of a file lies."""
    return target.with_name(f"{target.name}.part")


def size_of(remote: Remote) -> Bytes:
    """0: the host does not say. Raises httpx.HTTPStatusError and httpx.TransportError."""
    with _client(remote) as client:
        answer = client.head(remote.url, headers={"Accept-Encoding": "identity", **remote.headers}, auth=_auth(remote))
    if answer.status_code == httpx.codes.METHOD_NOT_ALLOWED:
        return 0
    answer.raise_for_status()
    return int(answer.headers.get("Content-Length", 0))


def download(remote: Remote, target: Path, progress: Progress) -> None:
    """Raises httpx.HTTPStatusError for an answer that is no file, httpx.TransportError without any, TemporaryError for
    another hash than the promised one, and OSError; a disk that is full keeps nothing of it. Without a hash it begins anew."""
    part = part_of(target)
    tries = 0
    with _client(remote) as client:
        while True:
            before = part.stat().st_size if part.exists() and remote.sha256 is not None else 0
            try:
                _go_on(client, remote, part, before, progress)
                break
            except OSError:
                part.unlink(missing_ok=True)
                raise
            except httpx.TransportError:
                tries = 1 if part.exists() and part.stat().st_size > before else tries + 1
                if tries >= _TRIES:
                    raise
    if remote.sha256 is not None and (came := _sha256(part)) != remote.sha256:
        part.unlink()
        message = f"{target.name} came with SHA-256 {came}, {remote.sha256} was promised: deleted, to be fetched again"
        raise TemporaryError("ChecksumMismatch", message, retry_after=_RETRY)
    part.rename(target)


def _go_on(client: httpx.Client, remote: Remote, part: Path, start: Bytes, progress: Progress) -> None:
    """Until the end of the file. A host that answers no ranges sends it from its beginning."""
    headers = {"Accept-Encoding": "identity", **remote.headers} | ({"Range": f"bytes={start}-"} if start else {})
    with client.stream("GET", remote.url, headers=headers, auth=_auth(remote)) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return  # there is no more of it; its hash tells whether that is right
        if answer.is_error:
            answer.read()
            answer.raise_for_status()
        start, total = _extent(answer, start)
        with part.open("r+b" if start else "wb") as file:
            file.truncate(start)
            file.seek(start)
            progress(start, total)
            for piece in answer.iter_raw():  # as they come: what is gathered is lost with the connection
                file.write(piece)
                progress(file.tell(), total)
            if file.tell() < total:
                raise httpx.RemoteProtocolError(f"the connection ended after {file.tell()} of {total} bytes")


def _client(remote: Remote) -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=_TIMEOUT, verify=remote.tls, proxy=remote.proxy)


def _auth(remote: Remote) -> Any:
    return remote.auth if remote.auth is not None else httpx.USE_CLIENT_DEFAULT


def _extent(answer: httpx.Response, asked: Bytes) -> tuple[Bytes, Bytes]:
    """Where the answer begins, and the size of the whole file (0: not said)."""
    ranged = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
    length = int(answer.headers.get("Content-Length", 0))
    if answer.status_code == httpx.codes.PARTIAL_CONTENT and ranged is not None and int(ranged[1]) == asked:
        return asked, int(ranged[2]) if ranged[2] != "*" else asked + length
    return 0, length


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
