"""Keeps engines as the operator wants them: plan (pure), execute (keeper, prober), settle (tracks).

One loop decides; what engines and the keeper say changes tracks and wakes the loop. Before an engine ends in peace it is
published as draining, and routers get two heartbeats to act on it.
"""

import asyncio
import logging
import math
import shutil
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from aerostat_agent.adoption import sort_out
from aerostat_agent.exits import describe_exit
from aerostat_agent.keeper_client import Exit, Keeper, KeeperRefusalError, KeptProcess
from aerostat_agent.launching import describe, footprint, launch, run_dir, source_of
from aerostat_agent.node import LiveEngine, Node
from aerostat_agent.notes import EngineNote
from aerostat_agent.policy.engines import Action, Drain, End, Kill, Prepare, Prepared, Start, Wanted, plan, wanted_engines
from aerostat_agent.policy.tracks import EngineKey, Failure, Phase, Track
from aerostat_agent.settings import Settings
from aerostat_agent.weights import Weights
from aerostat_core.errors import PermanentError
from aerostat_core.ids import Bytes, Epoch, NamespacedName, Seconds

_log = logging.getLogger(__name__)

TICK: Final[Seconds] = 0.2  # deadlines and drains are looked at so often
COALESCE: Final[Seconds] = 0.01  # what engines report comes in bursts
LINK_LOST_LIMIT: Final[Seconds] = 60.0  # an engine that cannot find its agent for so long is not trusted any more
ADOPT_LIMIT: Final[Seconds] = 120.0  # for an adopted engine to say hello and pass its probe


class BoundaryAsker(Protocol):
    """The way to an engine, as far as the supervisor needs it."""

    async def ask_boundary(self, key: EngineKey) -> None:
        """The engine reports a Boundary soon; without a link nothing comes."""
        ...


class Supervisor:
    """The only writer of tracks. `run` decides; `adopt` comes before it."""

    def __init__(
        self,
        settings: Settings,
        node: Node,
        keeper: Keeper,
        *,
        weights: Weights,
        links: BoundaryAsker,
        new_epoch: Callable[[], Epoch],
    ) -> None:
        self._settings = settings
        self._node = node
        self._keeper = keeper
        self._weights = weights
        self._links = links
        self._new_epoch = new_epoch
        self._asked_at = -math.inf  # draining engines, for their boundary

    async def adopt(self, processes: Iterable[KeptProcess]) -> None:
        """Take over what an agent before this one left. Raises TemporaryError when the keeper is lost."""
        found = sort_out(processes)
        for process, note in found.engines:
            self._adopt_engine(process, note)
        for process in found.strays:
            _log.info("process %d (epoch %d) is not to be adopted: killed", process.pid, process.epoch)
            await self._keeper.signal(process.epoch, signal.SIGKILL)
        for process, ended in found.ended:
            if ended is not None and ended.key not in self._node.tracks:
                assert process.exit_code is not None, "it is among the ended"
                self._adopt_engine(process, ended)
                self._account(self._node.tracks[ended.key], ended, process.log_path, process.exit_code)
            await self._keeper.forget(process.epoch)
            self._clean_up(process.epoch)

    async def run(self) -> None:
        """Until cancelled. Raises TemporaryError when the keeper is lost."""
        changed = self._node.watch()
        while True:
            changed.clear()
            if not await self.step():
                await _wait(changed, TICK)
                await asyncio.sleep(COALESCE)

    async def follow_exits(self, exits: asyncio.Queue[Exit]) -> None:
        """Until cancelled."""
        while True:
            await self.on_exit(await exits.get())

    async def step(self) -> bool:
        """Plan and execute once. True: something was done, so the plan may be another one now."""
        now = self._node.clock.monotonic()
        self._doubt_lost_links(now)
        wanted = self._wanted()
        decided = plan(now, wanted, self._node.tracks, self._prepared(wanted), self._capacities())
        self._node.judge(decided.verdicts)
        by_key = {w.key: w for w in wanted}
        for action in decided.actions:
            await self._execute(action, by_key.get(action.key), now)
        self._drop_idle(by_key.keys())
        if now - self._asked_at >= TICK:
            self._asked_at = now
            for key in [key for key, track in self._node.tracks.items() if track.phase is Phase.DRAINING]:
                await self._links.ask_boundary(key)
        return bool(decided.actions)

    # ------------------------------------------------------------ what the plan is made of

    def _wanted(self) -> tuple[Wanted, ...]:
        woken = self._node.woken
        every: list[Wanted] = []
        for spec in sorted(self._node.specs.values(), key=lambda s: s.name):
            every += wanted_engines(spec, frozenset(key.model for key in woken if key.instance == spec.name))
        return tuple(every)

    def _prepared(self, wanted: Iterable[Wanted]) -> dict[EngineKey, Prepared]:
        if (why := self._node.why_too_small()) is not None:
            failure = Failure(reason="NodeTooSmall", message=why, is_permanent=True)
            return {want.key: Prepared(failure=failure) for want in wanted}
        prepared = {}
        for want in wanted:
            preparation = self._weights.of(source_of(want.key.instance, want.model))
            if preparation is None:
                continue
            try:
                prepared[want.key] = Prepared(
                    footprint=footprint(self._node.specs[want.key.instance], want.model, preparation.model) if preparation.model else None,
                    failure=preparation.failure,
                    progress=preparation.progress,
                )
            except PermanentError as error:
                prepared[want.key] = Prepared(failure=Failure(reason=error.reason, message=error.message, is_permanent=True))
        return prepared

    def _capacities(self) -> dict[NamespacedName, Bytes]:
        return {name: self._node.capacity(name) for name in self._node.specs}

    def _drop_idle(self, wanted: Collection[EngineKey]) -> None:
        """What nobody wants and has no process is history; a deleted instance goes with its last engine."""
        tracks = self._node.tracks
        for key in [key for key, track in tracks.items() if not track.has_process and key not in wanted]:
            del tracks[key]
            self._node.figures.pop(key, None)
            self._node.touch()
        for name in [name for name in self._node.deleted if all(key.instance != name for key in tracks)]:
            self._node.deleted.discard(name)
            del self._node.specs[name]
            self._node.touch()

    # ------------------------------------------------------------ actions

    async def _execute(self, action: Action, want: Wanted | None, now: Seconds) -> None:
        key = action.key
        track = self._node.tracks.get(key, Track(key=key))
        match action:
            case Prepare():
                assert want is not None, "only wanted models are prepared"
                self._weights.prepare(source_of(want.key.instance, want.model))
            case Start():
                assert want is not None, "only wanted models are started"
                await self._start(want, track, now)
            case Drain():
                _log.info("%s drains", key)
                self._node.tracks[key] = track.draining(now)
                self._node.void_leases(key)
            case End(failure=failure):
                _log.info("%s ends: %s", key, "in peace" if failure is None else failure.reason)
                self._node.tracks[key] = track.ending(now, failure)
                await self._signal(track, signal.SIGTERM)
            case Kill():
                _log.warning("%s does not end: killed", key)
                self._node.tracks[key] = track.killed(now)
                await self._signal(track, signal.SIGKILL)
        self._node.touch()

    async def _start(self, want: Wanted, track: Track, now: Seconds) -> None:
        try:
            port = await self._keeper.free_port()
        except KeeperRefusalError as error:
            self._not_started(want, track, now, error)
            return
        preparation = self._weights.of(source_of(want.key.instance, want.model))
        if preparation is None or preparation.model is None:
            return  # it was evicted, or is looked at anew, since the start was planned: the next plan decides
        epoch = self._new_epoch()
        spec = self._node.specs[want.key.instance]
        what = launch(self._settings, self._keeper.site, port, spec, want, preparation.model, epoch)
        # Known before it runs: its hello or its exit may come before the keeper's answer is read.
        self._follow(epoch, what.note, what.log_path, now)
        self._node.tracks[want.key] = track.started(
            epoch=epoch, fingerprint=want.fingerprint, footprint=what.note.footprint, now=now, limit=self._settings.start_limit
        )
        try:
            pid = await self._keeper.start(epoch=epoch, argv=what.argv, env=what.env, log_path=what.log_path, note=what.note.to_bytes())
        except KeeperRefusalError as error:
            self._node.engine_ended(want.key)
            self._not_started(want, track, now, error)
        else:
            _log.info("started %s, process %d, epoch %d", describe(want.key, what.note.footprint), pid, epoch)

    def _not_started(self, want: Wanted, track: Track, now: Seconds, why: KeeperRefusalError) -> None:
        _log.error("%s did not start: %s", want.key, why.message)
        failure = Failure(reason=why.reason, message=why.message)
        self._node.tracks[want.key] = track.not_started(now, want.fingerprint, failure)

    async def _signal(self, track: Track, signum: signal.Signals) -> None:
        assert track.epoch is not None, "only a process gets a signal"
        try:
            await self._keeper.signal(track.epoch, signum)
        except KeeperRefusalError as error:
            _log.warning("%s got no %s: %s", track.key, signum.name, error.message)  # its exit is on the way

    # ------------------------------------------------------------ what became of processes

    def _adopt_engine(self, process: KeptProcess, note: EngineNote) -> None:
        _log.info("adopted %s, process %d, epoch %d", note.key, process.pid, process.epoch)
        now = self._node.clock.monotonic()
        self._follow(process.epoch, note, process.log_path, now)
        self._node.woken.add(note.key)  # it runs, so somebody wanted it; for a resident model this changes nothing
        self._node.tracks[note.key] = Track(key=note.key).adopted(
            epoch=process.epoch, fingerprint=note.fingerprint, footprint=note.footprint, now=now, limit=ADOPT_LIMIT
        )

    def _follow(self, epoch: Epoch, note: EngineNote, log_path: Path, now: Seconds) -> None:
        self._node.engines[note.key] = LiveEngine(epoch=epoch, note=note, log_path=log_path, started_at=now)

    async def on_exit(self, exited: Exit) -> None:
        """Raises TemporaryError when the keeper is lost."""
        if self._weights.on_exit(exited):
            return  # whoever waits for the preparation forgets its process
        engine = next((e for e in self._node.engines.values() if e.epoch == exited.epoch), None)
        if engine is not None:
            track = self._node.tracks[engine.note.key]
            self._account(track, engine.note, engine.log_path, exited.exit_code)
        await self._keeper.forget(exited.epoch)
        self._clean_up(exited.epoch)

    def _account(self, track: Track, note: EngineNote, log_path: Path, exit_code: int) -> None:
        failure = describe_exit(note, log_path, exit_code)
        now = self._node.clock.monotonic()
        after = track.exited(now, failure)
        if after.attempts.last is not None:
            self._node.figures_of(track.key).n_failed += 1
            if after.attempts.has_one_left:
                # Its files may be why. Not before: looking takes the source, which may be away, or have another revision by now.
                self._weights.forget(Path(note.prepared.path))
            _log.warning("%s failed: %s: %s", track.key, after.attempts.last.reason, after.attempts.last.message)
        self._node.tracks[track.key] = after
        self._node.engine_ended(track.key)

    def _clean_up(self, epoch: Epoch) -> None:
        shutil.rmtree(run_dir(self._settings, epoch), ignore_errors=True)

    def _doubt_lost_links(self, now: Seconds) -> None:
        for key, engine in self._node.engines.items():
            if engine.link_lost_at is not None and now - engine.link_lost_at >= LINK_LOST_LIMIT:
                failure = Failure(
                    reason="EngineLinkLost", message=f"the engine did not come back to its agent within {LINK_LOST_LIMIT:.0f} s"
                )
                self._node.tracks[key] = self._node.tracks[key].faulted(failure)


async def _wait(event: asyncio.Event, limit: Seconds) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit):
            await event.wait()
