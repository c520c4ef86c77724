"""What engines report, settled into the node's state: hello and token probe, turns, boundaries, profiles, lost prefixes.

A model is Open when all ranks of its engine have said hello and the token probe has passed; nothing else makes it so.
"""

import asyncio
import logging

from aerostat_agent.engine_events import Boundary, EngineEvent, Finished, Hello, Identity, ProfilePoint, SessionsMissing, Unhealthy
from aerostat_agent.node import LiveEngine, Node
from aerostat_agent.policy.engines import SETTLE
from aerostat_agent.policy.figures import CallTimes
from aerostat_agent.policy.tracks import EngineKey, Failure, Phase
from aerostat_agent.probe import Prober

_log = logging.getLogger(__name__)


class EngineReports:
    """An `EngineListener`. Owns the probes; `close` ends those that run."""

    def __init__(self, node: Node, prober: Prober) -> None:
        self._node = node
        self._prober = prober
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_hello(self, who: Identity, hello: Hello) -> str:
        engine = self._node.engines.get(who.key)
        if engine is None or engine.epoch != who.epoch:
            return f"no engine of {who.key} with epoch {who.epoch} runs here by this agent's will"
        if not 0 <= who.rank < hello.tensor_parallel:
            return f"rank {who.rank} is none of {hello.tensor_parallel}"
        _log.info("%s, rank %d: hello, %s", who.key, who.rank, hello.versions)
        engine.hellos[who.rank] = hello
        engine.linked.add(who.rank)
        if who.rank == 0:
            self._node.sessions.present(who.key, hello.sessions, self._node.clock.wall())
        if engine.has_all_ranks:
            engine.link_lost_at = None
            if self._node.tracks[who.key].phase is Phase.STARTING and engine.probing is None:
                self._begin_probe(who.key, engine)
        self._node.touch()
        return ""

    def on_link_lost(self, who: Identity) -> None:
        if (engine := self._engine(who)) is not None:
            _log.warning("%s, rank %d: link lost", who.key, who.rank)
            engine.linked.discard(who.rank)
            engine.link_lost_at = self._node.clock.monotonic()

    def on_event(self, who: Identity, event: EngineEvent) -> None:
        engine = self._engine(who)
        if engine is None:
            return  # its process is gone; what it still says is about nothing
        match event:
            case Finished():
                self._on_finished(who.key, event)
            case Boundary():
                engine.boundary = event
                self._on_boundary(who.key, event)
            case ProfilePoint(is_prefill=is_prefill, n=n, seconds=seconds) if n >= 1 and seconds >= 0:
                figures = self._node.figures_of(who.key)
                observe = figures.profile.observe_prefill if is_prefill else figures.profile.observe_decode
                figures.profile = observe(n, seconds)
            case ProfilePoint():
                _log.warning("%s reports a profile point of nothing: %s", who.key, event)
            case SessionsMissing(sessions=sessions):
                self._node.sessions.missing(who.key, sessions)
            case Unhealthy(why=why):
                _log.error("%s is unhealthy: %s", who.key, why)
                self._fault(who.key, Failure(reason="EngineUnhealthy", message=why))
        self._node.touch()

    def _engine(self, who: Identity) -> LiveEngine | None:
        engine = self._node.engines.get(who.key)
        return engine if engine is not None and engine.epoch == who.epoch else None

    def _on_finished(self, key: EngineKey, turn: Finished) -> None:
        now, figures = self._node.clock.monotonic(), self._node.figures_of(key)
        figures.requests.add(1, now)
        figures.tokens.add(turn.n_prompt_tokens - turn.n_cached_tokens + turn.n_output_tokens, now)
        if turn.first_token_seconds is not None and self._node.tracks[key].may_serve:  # before that it is the token probe
            times = CallTimes.of(first_token=turn.first_token_seconds, total=turn.seconds, n_output_tokens=turn.n_output_tokens)
            figures.calls.add(times, now)
        if turn.session:  # without one nobody can return to it
            self._node.sessions.finished(key, turn, self._node.clock.wall())

    def _on_boundary(self, key: EngineKey, boundary: Boundary) -> None:
        track = self._node.tracks[key]
        has_settled = self._node.clock.monotonic() - track.since >= SETTLE  # only then does an empty engine stay empty
        if track.phase is Phase.DRAINING and has_settled and not boundary.running and not boundary.waiting:
            self._node.tracks[key] = track.seen_idle()

    def _fault(self, key: EngineKey, failure: Failure) -> None:
        self._node.tracks[key] = self._node.tracks[key].faulted(failure)
        self._node.touch()

    def _begin_probe(self, key: EngineKey, engine: LiveEngine) -> None:
        engine.probing = asyncio.create_task(self._probe(key, engine))
        self._tasks.add(engine.probing)
        engine.probing.add_done_callback(self._tasks.discard)

    async def _probe(self, key: EngineKey, engine: LiveEngine) -> None:
        failure = await self._prober.probe(engine.note)
        now = self._node.clock.monotonic()
        if failure is not None:
            _log.error("%s: %s: %s", key, failure.reason, failure.message)
            self._fault(key, failure)
            return
        track = self._node.tracks[key]
        if not track.may_serve:  # an adopted engine was started by somebody else: how long that took is not known
            self._node.figures_of(key).opened(now - engine.started_at)
        self._node.tracks[key] = track.opened(now)
        _log.info("%s is open", key)
        self._node.touch()
