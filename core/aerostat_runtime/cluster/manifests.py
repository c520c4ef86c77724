"""A folder of manifests to objects of a FolderCluster, again and again: what `kubectl apply --prune` is to us.

Which file declared an object is kept on the object, so that files removed while nobody watched are noticed too. A file
with anything wrong in it takes nothing away: its last valid objects stay until it is mended or deleted.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson
import watchfiles

from aerostat_core.errors import SettingError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.manifest_files import Document, ManifestSyntaxError, parse_json, parse_yaml
from aerostat_runtime.cluster.port import InvalidResourceError, Kind, Violation
from aerostat_runtime.cluster.store import naming_remedies, replace_file

DECLARED_IN: Final = "aerostat.dev/manifest"  # annotation: the file's name
REJECTED_FILE: Final = "rejected.json"
KINDS: Final = (Kind.POOL, Kind.SLO, Kind.MODEL)  # what people declare
SETTLE: Final[Seconds] = 0.3  # files at rest for so long are read
RESCAN: Final[Seconds] = 10.0  # for what no event told
_MAX_FILE_BYTES: Final = 1 << 20
_SUFFIXES = (".yaml", ".yml", ".json")

Key = tuple[Kind, NamespacedName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What of the folder is not in force, and why. `subject` names the object where the file got that far."""

    file: str
    line: int
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one pass did. `changed` and `deleted` are `Kind namespace/name`."""

    changed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    documents: tuple[Document, ...]
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class _Declaration:
    file: str
    document: Document
    resource: Resource


class ManifestFolder:
    """Raises SettingError when there is no such folder."""

    def __init__(self, folder: Path, cluster: FolderCluster) -> None:
        if not folder.is_dir():
            raise SettingError(f"{folder} is no folder: give the folder that has your manifests (*.yaml)")
        self._folder = folder
        self._cluster = cluster
        self._in_force: dict[Key, tuple[Resource, str]] = {}  # as declared, with the generation that it became

    async def watch(self) -> AsyncIterator[SyncReport]:
        """A pass at once, then one after each change of the folder; passes that change nothing are left out."""
        last: SyncReport | None = None
        stop = asyncio.Event()
        events = watchfiles.awatch(
            self._folder,
            recursive=False,
            watch_filter=lambda _, path: _is_manifest(os.path.basename(path)),
            stop_event=stop,
            step=int(SETTLE * 1000),
            debounce=int(SETTLE * 10_000),
            rust_timeout=int(RESCAN * 1000),
            yield_on_timeout=True,
        )
        async with aclosing(events):
            event = asyncio.ensure_future(anext(events))
            try:
                await asyncio.sleep(0)  # its first step registers with the kernel, before the folder is read
                while True:
                    retry_after: Seconds | None = None
                    try:
                        report = await self.sync()
                    except TemporaryError as error:
                        report = SyncReport(
                            rejected=(Rejection(file=".", line=1, subject="", message=f"{error.message}; it is tried again"),)
                        )
                        retry_after = error.retry_after
                    if last is None or report != SyncReport(rejected=last.rejected):
                        yield report
                    last = report
                    await asyncio.wait({event}, timeout=retry_after)
                    if event.done():
                        event.result()
                        event = asyncio.ensure_future(anext(events))
            finally:
                stop.set()
                await asyncio.gather(event, return_exceptions=True)

    async def sync(self) -> SyncReport:
        """One pass. Raises TemporaryError when the state folder cannot take it now; what was done stays done."""
        files = await asyncio.to_thread(_read_folder, self._folder)
        stored = {(kind, name_of(r)): r for kind in KINDS for r in await self._cluster.list(kind)}
        owners = {key: r["metadata"].get("annotations", {}).get(DECLARED_IN) for key, r in stored.items()}
        declared, rejected = _declarations(files, owners)

        changed = []
        for key, declaration in declared.items():
            try:
                if await self._apply(key, declaration, stored.get(key)):
                    changed.append(_written(key))
            except InvalidResourceError as error:
                rejected.extend(_rejections(declaration, _written(key), error))

        deleted = []
        in_doubt = {rejection.file for rejection in rejected}
        for key, owner in owners.items():
            if owner is not None and owner not in in_doubt and key not in declared:
                await self._cluster.delete(*key)
                self._in_force.pop(key, None)
                deleted.append(_written(key))

        rejected.sort(key=lambda r: (r.file, r.line, r.message))
        await asyncio.to_thread(_write_rejections, self._cluster.state, rejected)
        return SyncReport(changed=tuple(changed), deleted=tuple(deleted), rejected=tuple(rejected))

    async def _apply(self, key: Key, declaration: _Declaration, stored: Resource | None) -> bool:
        """Whether it changed anything."""
        if stored is not None and self._in_force.get(key) == (declaration.resource, _version(stored)):
            return False
        result = await self._cluster.apply(declaration.resource)
        self._in_force[key] = (declaration.resource, _version(result))
        return stored is None or result["metadata"]["resourceVersion"] != stored["metadata"]["resourceVersion"]


def read_rejections(state: Path) -> tuple[Rejection, ...]:
    """What the running `aerostat up` of this state folder refused; nothing where none ran."""
    try:
        data = (state / REJECTED_FILE).read_bytes()
    except FileNotFoundError:
        return ()
    return tuple(Rejection(**entry) for entry in orjson.loads(data))


def _write_rejections(state: Path, rejected: Iterable[Rejection]) -> None:
    data = orjson.dumps([asdict(rejection) for rejection in rejected], option=orjson.OPT_INDENT_2)
    with naming_remedies(state):
        replace_file(state / REJECTED_FILE, data, durable=False)


def _is_manifest(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def _read_folder(folder: Path) -> list[_File]:
    """The manifests by name. Folders, symbolic links and hidden files are none."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise TemporaryError("NoManifests", f"cannot read {folder}: {error.strerror}; its objects stay", retry_after=1.0) from error
    return [_read_file(path) for path in entries if _is_manifest(path.name) and path.is_file() and not path.is_symlink()]


def _read_file(path: Path) -> _File:
    try:
        data = path.read_bytes()
        if len(data) > _MAX_FILE_BYTES:
            raise ManifestSyntaxError(1, f"larger than {_MAX_FILE_BYTES} bytes: split it")
        text = data.decode()
        documents = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        if not documents:
            raise ManifestSyntaxError(1, "has no object: delete the file if nothing shall be declared in it")
    except OSError as error:
        return _unread(path, 1, f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return _unread(path, data.count(b"\n", 0, error.start) + 1, "no UTF-8 text")
    except ManifestSyntaxError as error:
        return _unread(path, error.line, error.message)
    return _File(path.name, tuple(documents))


def _unread(path: Path, line: int, message: str) -> _File:
    return _File(path.name, (), (Rejection(file=path.name, line=line, subject="", message=message),))


def _declarations(files: list[_File], owners: Mapping[Key, str | None]) -> tuple[dict[Key, _Declaration], list[Rejection]]:
    """What the files declare, each object once, and what is wrong with them.

    An object that two files declare stays with the file that it came from, or else goes to the first by name.
    """
    rejected = [rejection for file in files for rejection in file.rejected]
    found: dict[Key, list[_Declaration]] = {}
    for file in files:
        for document in file.documents:
            try:
                key, resource = _identify(document.resource, file.name)
            except InvalidResourceError as error:
                path = error.violations[0].path
                rejected.append(Rejection(file=file.name, line=document.line_of(path), subject="", message=error.message))
            else:
                found.setdefault(key, []).append(_Declaration(file.name, document, resource))
    declared = {}
    for key, declarations in found.items():
        kept = next((d for d in declarations if d.file == owners.get(key)), declarations[0])
        declared[key] = kept
        for other in declarations:
            if other is not kept:
                message = f"{_written(key)} is declared already in {kept.file}:{kept.document.line}: keep one of them"
                rejected.append(Rejection(file=other.file, line=other.document.line, subject=_written(key), message=message))
    return declared, rejected


def _identify(value: object, file: str) -> tuple[Key, Resource]:
    """The object's key, and the object with its namespace and its file on it. Raises InvalidResourceError."""
    if not isinstance(value, dict):
        raise _refused("", "not an object: a manifest has apiVersion, kind, metadata and spec")
    kind = value.get("kind")
    if kind == Kind.INSTANCE:
        raise _refused("kind", "an Instance is made by the operator: declare Model, Pool and SLO only")
    if kind not in KINDS:
        raise _refused("kind", f"no kind {kind!r} to declare: there are Model, Pool and SLO")
    metadata = value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(name, str):
        raise _refused("metadata", "metadata.name is missing: it is what the object is called")
    namespace = metadata.get("namespace") or "default"
    annotations = metadata.get("annotations") or {}
    if not isinstance(namespace, str) or not isinstance(annotations, dict):
        raise _refused("metadata", "metadata.namespace must be text and metadata.annotations a map of text")
    placed = {**metadata, "namespace": namespace, "annotations": {**annotations, DECLARED_IN: file}}
    return (Kind(kind), NamespacedName(namespace, name)), {**value, "metadata": placed}


def _refused(path: str, message: str) -> InvalidResourceError:
    return InvalidResourceError(message, (Violation(path, message),))


def _rejections(declaration: _Declaration, subject: str, error: InvalidResourceError) -> Iterable[Rejection]:
    for violation in error.violations:
        line = declaration.document.line_of(violation.path)
        yield Rejection(file=declaration.file, line=line, subject=subject, message=str(violation))


def _written(key: Key) -> str:
    kind, name = key
    return f"{kind} {name}"


def _version(resource: Resource) -> str:
    """What changes when anybody but the status's writer changes the object."""
    metadata = resource["metadata"]
    return f"{metadata['uid']}/{metadata['generation']}"
