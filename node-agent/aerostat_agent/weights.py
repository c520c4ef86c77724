"""Models onto this machine's disk: runs the preparer through the keeper, one run per source, its progress into status.

The preparer (a process of the engine package) prints JSON lines into its log; the last one is the result or the error. What it
fetched and converted it caches itself, so a repeated run is short; nothing is remembered here across agents. A preparer that needs room
in the cache says how much and ends; it runs again once there is room. A source's token is read when a preparation starts and is in the
environment of its processes only.
"""

import asyncio
import json
import logging
import re
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from aerostat_agent.keeper_client import Exit, FencedError, Keeper, KeeperRefusalError
from aerostat_agent.logtail import last_lines, redact
from aerostat_agent.model_cache import NodeCache
from aerostat_agent.notes import PreparedModel, TokenProbe
from aerostat_agent.policy.tracks import Failure
from aerostat_core.clock import Clock
from aerostat_core.engine_launch import TOKEN_ENV
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Bytes, Epoch, NamespacedName, Seconds
from aerostat_core.quantities import format_size
from aerostat_runtime.cluster.port import Secrets

_log = logging.getLogger(__name__)

NOTE: Final = b'{"prepare": {}}'
RETRY_AFTER: Final[Seconds] = 30.0  # a source that failed may have been mended: a file put in place, a network back
_READ_PROGRESS_EVERY: Final[Seconds] = 0.5
TOKEN_KEY: Final = "token"  # in a Secret
_MAX_RUNS: Final = 8  # of one preparation: what it asks for is known piece by piece
_REASON: Final = re.compile("[A-Za-z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is prepared: a source's URI, for one number type. `secret`: with the token that is in there."""

    uri: str
    secret: NamespacedName | None
    dtype: str
    trust_remote_code: bool

    def __str__(self) -> str:
        return f"{self.uri} ({self.dtype})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Of one source, now: neither `model` nor `failure` while it runs."""

    progress: str = ""
    model: PreparedModel | None = None
    failure: Failure | None = None
    retry_at: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomAsked:
    """A preparer needs so many bytes more for a model of the cache; `failure` is what to say if it does not get them."""

    key: str
    need: Bytes
    failure: Failure


class Weights:
    """`changed` is called whenever what `of` answers may differ."""

    def __init__(
        self,
        keeper: Keeper,
        clock: Clock,
        *,
        command: tuple[str, ...],
        cache: NodeCache,
        log_dir: Path,
        new_epoch: Callable[[], Epoch],
        secrets: Secrets,
        changed: Callable[[], None],
    ) -> None:
        self._keeper = keeper
        self._clock = clock
        self._command = command
        self._cache = cache
        self._log_dir = log_dir
        self._new_epoch = new_epoch
        self._secrets = secrets
        self._changed = changed
        self._by_source: dict[Source, Preparation] = {}
        self._exits: dict[Epoch, asyncio.Future[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, source: Source) -> Preparation | None:
        """None: nobody asked for it, or its failure is old enough to try again."""
        known = self._by_source.get(source)
        if known is not None and known.failure is not None and self._clock.monotonic() >= known.retry_at:
            return None
        return known

    def prepare(self, source: Source) -> None:
        """Begin, unless it is under way or done."""
        if self.of(source) is not None:
            return
        self._by_source[source] = Preparation(progress="starting")
        task = asyncio.create_task(self._prepare(source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def under_way(self) -> frozenset[Source]:
        return frozenset(source for source, now in self._by_source.items() if now.model is None and now.failure is None)

    def forget(self, folder: Path) -> None:
        """What was prepared there is looked at anew before it is used again."""
        self._by_source = {s: now for s, now in self._by_source.items() if now.model is None or Path(now.model.path) != folder}

    def on_exit(self, exited: Exit) -> bool:
        """True: the process was a preparation."""
        if (waiting := self._exits.get(exited.epoch)) is None:
            return False
        waiting.set_result(exited.exit_code)
        return True

    async def close(self) -> None:
        """Stop following; the next agent ends what still runs and begins anew."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _prepare(self, source: Source) -> None:
        outcome: PreparedModel | Failure
        token = await self._token(source)
        try:
            outcome = token if isinstance(token, Failure) else await self._run_with_room(source, token)
        except KeeperRefusalError as error:
            outcome = Failure(reason="PrepareNotStarted", message=str(error))
        except (FencedError, TemporaryError):
            return  # the keeper is lost, or another agent's: this agent ends, which is no fault of the source
        except Exception as error:  # the task's edge: a model that nobody prepares any more must not look as if somebody did
            _log.exception("preparing %s", source)
            outcome = Failure(reason="PrepareFailed", message=redact(f"the agent could not follow the preparer: {error!r}"))
        if isinstance(outcome, Failure):
            _log.warning("preparing %s failed: %s: %s", source, outcome.reason, outcome.message)
            self._by_source[source] = Preparation(failure=outcome, retry_at=self._clock.monotonic() + RETRY_AFTER)
        else:
            _log.info("prepared %s: %d bytes of weights in %s", source, outcome.weights_bytes, outcome.path)
            self._by_source[source] = Preparation(model=outcome)
        self._changed()

    async def _token(self, source: Source) -> str | Failure | None:
        """None: the source names no Secret."""
        if source.secret is None:
            return None
        try:
            held = await self._secrets.secret(source.secret)
        except (PermanentError, TemporaryError) as error:
            return Failure(reason=error.reason, message=f'{error.message} (its key "{TOKEN_KEY}" is the token for {source.uri})')
        token = held.get(TOKEN_KEY, b"").decode(errors="replace").strip()
        if not token:
            where = f'Secret "{source.secret.name}" in namespace "{source.secret.namespace}"'
            return Failure(reason="SecretKeyMissing", message=f'{where} has no key "{TOKEN_KEY}": put the token for {source.uri} there')
        return token

    async def _run_with_room(self, source: Source, token: str | None) -> PreparedModel | Failure:
        has_limit = self._cache.limit is not None
        granted: Bytes = 0
        with self._cache.preparation() as ask:
            for _ in range(_MAX_RUNS):
                outcome = await self._run(source, token, granted if has_limit else None)
                if not isinstance(outcome, RoomAsked):
                    return outcome
                try:
                    await ask(outcome.key, outcome.need)
                except PermanentError as error:
                    return Failure(reason=error.reason, message=error.message)
                granted, failure = outcome.need, outcome.failure
        return failure

    async def _run(self, source: Source, token: str | None, granted: Bytes | None) -> PreparedModel | RoomAsked | Failure:
        epoch = self._new_epoch()
        log = self._log_dir / f"prepare-{epoch}.log"
        secrets = (token,) if token else ()
        exit_code = self._exits[epoch] = asyncio.get_running_loop().create_future()
        argv = [*self._command, "--uri", source.uri, "--cache", str(self._cache.root), "--dtype", source.dtype]
        argv += ["--trust-remote-code"] if source.trust_remote_code else []
        argv += ["--room", str(granted)] if granted is not None else []
        try:
            await self._keeper.start(epoch=epoch, argv=argv, env={TOKEN_ENV: token} if token else {}, log_path=log, note=NOTE)
            while not exit_code.done():
                await asyncio.wait([exit_code], timeout=_READ_PROGRESS_EVERY)
                self._report(source, log, secrets)
            await self._keeper.forget(epoch)
            return read_outcome(log, exit_code.result(), secrets=secrets)
        finally:
            del self._exits[epoch]
            log.unlink(missing_ok=True)

    def _report(self, source: Source, log: Path, secrets: Collection[str]) -> None:
        progress = redact(read_progress(log), secrets)
        if progress and progress != self._by_source[source].progress:
            self._by_source[source] = Preparation(progress=progress)
            self._changed()


def read_progress(log: Path) -> str:
    """What the preparer said last that it does; empty before it did."""
    return next((text for line in reversed(list(_json_lines(log))) if (text := _progress_text(line.get("progress")))), "")


def read_outcome(log: Path, exit_code: int, *, secrets: Collection[str] = ()) -> PreparedModel | RoomAsked | Failure:
    """What the preparer's last line says; without one, how it ended. No `secrets` are in a failure's message."""
    match _outcome(log, exit_code, secrets):
        case Failure() as failure:
            return replace(failure, message=redact(failure.message, secrets))
        case RoomAsked(failure=failure) as asked:
            return replace(asked, failure=replace(failure, message=redact(failure.message, secrets)))
        case outcome:
            return outcome


def _outcome(log: Path, exit_code: int, secrets: Collection[str]) -> PreparedModel | RoomAsked | Failure:
    for line in reversed(list(_json_lines(log))):
        if (refusal := _refusal(line.get("error"))) is not None:
            return refusal
        if exit_code == 0 and "model" in line:
            try:
                return _prepared(line["model"])
            except (KeyError, TypeError) as error:
                return Failure(reason="PreparerMismatch", message=f"agent and preparer are of different versions: {error!r} in {line}")
    how = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    words = last_lines(log, secrets=secrets)  # it cuts lines, so afterwards half a secret would pass
    return Failure(reason="PrepareFailed", message=f"the preparer ended with {how}; the last lines of its log:\n{words}")


def _refusal(said: Any) -> RoomAsked | Failure | None:
    """None: not what a preparer says, but a line of a library, or of a model's own code."""
    match said:
        case {"reason": str(reason), "message": str(message)} if _REASON.fullmatch(reason):
            failure = Failure(reason=reason, message=message)
            match said:
                case {"entry": str(key), "needs_bytes": int(need)} if need > 0:
                    return RoomAsked(key=key, need=need, failure=failure)
            return failure
    return None


def _progress_text(said: Any) -> str:
    """`download 12Mi of 90Mi`, or the step with its own words; empty for anything else."""
    match said:
        case {"step": str(step), "done_bytes": int(done), "total_bytes": int(total)} if total:
            return f"{step} {format_size(done)} of {format_size(total)}"
        case {"step": str(step), **more}:
            return f"{step} {more.get('message', '')}".strip()
    return ""


def _prepared(model: Mapping[str, Any]) -> PreparedModel:
    return PreparedModel(
        path=model["path"],
        dtype=model["dtype"],
        weights_bytes=model["weights_bytes"],
        kv_bytes_per_token=model["kv_bytes_per_token"],
        context_tokens=model["max_context_tokens"],
        probe=TokenProbe(prompt_ids=tuple(model["probe"]["prompt_ids"]), expected_ids=tuple(model["probe"]["expected_ids"])),
    )


def _json_lines(log: Path) -> Iterator[dict[str, Any]]:
    """Lines that are JSON objects; a library's own chatter between them is none."""
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if line.startswith("{"):
            with suppress(ValueError):  # half a line, so far
                parsed = json.loads(line)
                if isinstance(parsed, dict):
                    yield parsed
