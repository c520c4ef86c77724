"""Which engines to prepare, start, drain and end, from what the operator wants and what runs.

Level-triggered: the plan depends on the present alone, so a lost event costs a delay and nothing else.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from aerostat_agent.policy.memory import Footprint, refuse
from aerostat_agent.policy.tracks import EngineKey, Failure, Phase, Track
from aerostat_core.defaults import HEARTBEAT, RESTART_DELAYS
from aerostat_core.ids import Bytes, ModelName, NamespacedName, Seconds
from aerostat_core.specs import EngineState, InstanceModel, InstanceSpec

SETTLE: Final[Seconds] = 2 * HEARTBEAT  # from "draining" published to routers having acted on it
DRAIN_GRACE: Final[Seconds] = 120.0  # for running calls to finish
KILL_AFTER: Final[Seconds] = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model that its instance allows. `is_open`: it must run now (resident, or woken since)."""

    key: EngineKey
    model: InstanceModel
    fingerprint: str
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What preparing a source gave: a footprint per wanted key, or why there is none; neither: not done yet."""

    footprint: Footprint | None = None
    failure: Failure | None = None
    progress: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Prepare:
    key: EngineKey


@dataclass(frozen=True, slots=True, order=True)
class Start:
    key: EngineKey


@dataclass(frozen=True, slots=True, order=True)
class Drain:
    key: EngineKey


@dataclass(frozen=True, slots=True)
class End:
    """SIGTERM; for a failure, or in peace."""

    key: EngineKey
    failure: Failure | None


@dataclass(frozen=True, slots=True, order=True)
class Kill:
    key: EngineKey


Action = Prepare | Start | Drain | End | Kill


Promised = dict[NamespacedName, dict[EngineKey, Footprint]]
"""Of each instance: what engines hold, or what their successors will, whichever is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to tell people and routers about a model now."""

    state: EngineState
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    actions: tuple[Action, ...]
    verdicts: Mapping[EngineKey, Verdict]


def fingerprint(spec: InstanceSpec, model: InstanceModel) -> str:
    """Equal for two specs exactly when the same engine process serves both."""
    runs = (
        model.source_uri,
        model.secret,
        model.served_name,
        sorted(model.engine_args.items()),
        model.context_tokens,
        model.trust_remote_code,
        model.kv_floor_bytes,
        spec.device_kind,
        spec.devices,
    )
    return hashlib.blake2b(json.dumps(runs).encode(), digest_size=8).hexdigest()


def wanted_engines(spec: InstanceSpec, woken: frozenset[ModelName]) -> tuple[Wanted, ...]:
    """Resident models first, then woken ones, both in the spec's order; nothing on an instance that drains."""
    if spec.draining:
        return ()
    every = tuple(
        Wanted(
            key=EngineKey(spec.name, model.name),
            model=model,
            fingerprint=fingerprint(spec, model),
            is_open=model.resident or model.name in woken,
        )
        for model in spec.models
    )
    return tuple(sorted(every, key=lambda w: (not w.model.resident, not w.is_open)))


def plan(
    now: Seconds,
    wanted: Iterable[Wanted],
    tracks: Mapping[EngineKey, Track],
    prepared: Mapping[EngineKey, Prepared],
    capacities: Mapping[NamespacedName, Bytes],
) -> Plan:
    """One step. Starts are planned in the order of `wanted`, each beside what all others hold and were promised.

    What serves is judged last: it leaves only for a successor that fits beside every engine that is to come, whether that one's
    predecessor still drains, has ended, or failed and is to be tried again.
    """
    by_key = {w.key: w for w in wanted}
    promised: Promised = {name: {} for name in capacities}
    for track in tracks.values():
        if track.footprint is not None:
            promised.setdefault(track.key.instance, {})[track.key] = track.footprint
    running = [t for t in tracks.values() if t.has_process]
    verdicts: dict[EngineKey, Verdict] = {}
    leaving = _judge_running(now, by_key, [t for t in running if t.phase is not Phase.OPEN], prepared, promised, capacities, verdicts)
    idle = [(want, track) for want in by_key.values() if not (track := tracks.get(want.key, Track(key=want.key))).has_process]
    starting = _judge_idle(now, idle, prepared, promised, capacities, verdicts)
    serving = _judge_running(now, by_key, [t for t in running if t.phase is Phase.OPEN], prepared, promised, capacities, verdicts)
    return Plan(actions=(*leaving, *serving, *starting), verdicts=verdicts)


def _judge_running(
    now: Seconds,
    wanted: Mapping[EngineKey, Wanted],
    running: Iterable[Track],
    prepared: Mapping[EngineKey, Prepared],
    promised: Promised,
    capacities: Mapping[NamespacedName, Bytes],
    verdicts: dict[EngineKey, Verdict],
) -> list[Action]:
    """What an engine leaves is promised to its successor before the next one is judged: two may not leave for the same bytes."""
    actions: list[Action] = []
    for track in running:
        want, ready = wanted.get(track.key), prepared.get(track.key)
        others = promised[track.key.instance]
        if want is not None and (stays := _serves_on(want, track, ready, others, capacities[track.key.instance])):
            verdicts[track.key] = stays
            actions += [Prepare(track.key)] if ready is None else []
            continue
        actions += _end_or_keep(now, track, want)
        verdicts[track.key] = _running_verdict(track, want)
        if want is not None and want.is_open and ready is not None and ready.footprint is not None:
            others[track.key] = max(others[track.key], ready.footprint, key=lambda f: f.total)
    return actions


def _judge_idle(
    now: Seconds,
    idle: Iterable[tuple[Wanted, Track]],
    prepared: Mapping[EngineKey, Prepared],
    promised: Promised,
    capacities: Mapping[NamespacedName, Bytes],
    verdicts: dict[EngineKey, Verdict],
) -> list[Action]:
    """A start, or its next try, is promised its memory; what does not fit, or is tried no more, is promised nothing."""
    actions: list[Action] = []
    for want, track in idle:
        ready, others, capacity = prepared.get(want.key), promised[want.key.instance], capacities[want.key.instance]
        action, verdicts[want.key] = _start_or_wait(now, want, track, ready, others.values(), capacity)
        actions += [] if action is None else [action]
        footprint = None if ready is None or not want.is_open else ready.footprint
        if (
            footprint is not None
            and not track.attempts.of(want.fingerprint).is_exhausted
            and not refuse(footprint, others.values(), capacity)
        ):
            others[want.key] = footprint
    return actions


def _serves_on(
    want: Wanted, track: Track, prepared: Prepared | None, held: Mapping[EngineKey, Footprint], capacity: Bytes
) -> Verdict | None:
    """An open engine of an earlier declaration stays until one of the present one can start in its place: why, or None."""
    if track.phase is not Phase.OPEN or track.fault is not None or not want.is_open or want.fingerprint == track.fingerprint:
        return None
    if prepared is None:
        return Verdict(state=EngineState.OPEN, reason="PreparingWeights")
    if prepared.failure is not None:
        reason, why = prepared.failure.reason, prepared.failure.message
    elif prepared.footprint is None:
        return Verdict(state=EngineState.OPEN, reason="PreparingWeights", message=prepared.progress)
    elif (refusal := refuse(prepared.footprint, (f for key, f in held.items() if key != want.key), capacity)) is not None:
        reason, why = "InsufficientMemory", refusal.message
    else:
        return None
    return Verdict(state=EngineState.OPEN, reason=reason, message=f"{why}; what was declared before serves on")


def _end_or_keep(now: Seconds, track: Track, want: Wanted | None) -> list[Action]:
    is_wanted = want is not None and want.is_open and want.fingerprint == track.fingerprint
    match track.phase:
        case Phase.STARTING | Phase.OPEN if track.fault is not None:
            return [End(track.key, track.fault)]
        case Phase.STARTING if now >= track.deadline:
            return [End(track.key, Failure(reason="StartTimedOut", message=f"not ready after {track.deadline - track.since:.0f} s"))]
        case Phase.STARTING if track.may_serve and want is not None and want.is_open:
            return []  # adopted: whether it stays until its successor can start is judged once it is known to be well
        case Phase.STARTING | Phase.OPEN if not is_wanted:
            return [Drain(track.key) if track.may_serve else End(track.key, None)]
        case Phase.DRAINING:
            waited = now - track.since
            if (waited >= SETTLE and track.was_seen_idle) or waited >= DRAIN_GRACE:
                return [End(track.key, None)]
        case Phase.ENDING if now - track.since >= KILL_AFTER:
            return [Kill(track.key)]
    return []


def _running_verdict(track: Track, want: Wanted | None) -> Verdict:
    match track.phase:
        case Phase.STARTING:
            return Verdict(state=EngineState.STARTING, reason="Adopted" if track.may_serve else "EngineStarting")
        case Phase.OPEN:
            return Verdict(state=EngineState.OPEN, reason="Serving")
        case Phase.ENDING if track.ending_for is not None:
            return Verdict(state=EngineState.STARTING, reason=track.ending_for.reason, message=track.ending_for.message)
        case _ if want is None:
            return Verdict(state=EngineState.DRAINING, reason="NotWanted", message="the Instance's spec has it no more")
        case _ if want.fingerprint != track.fingerprint:
            return Verdict(
                state=EngineState.DRAINING, reason="SpecChanged", message="an engine for the new spec starts when this one ended"
            )
        case _:
            return Verdict(state=EngineState.DRAINING, reason="NotResident", message="the Instance's spec asks for it no more")


def _start_or_wait(
    now: Seconds, want: Wanted, track: Track, prepared: Prepared | None, held: Iterable[Footprint], capacity: Bytes
) -> tuple[Action | None, Verdict]:
    if not want.is_open:
        return None, Verdict(state=EngineState.ABSENT, reason="NotResident", message="opens when it is called")
    attempts = track.attempts.of(want.fingerprint)
    if attempts.last is not None and attempts.is_exhausted:
        return None, Verdict(state=EngineState.FAILED, reason=attempts.last.reason, message=attempts.last.message)
    if attempts.last is not None and now < attempts.retry_at:
        message = f"failure {attempts.n_failures} of {len(RESTART_DELAYS) + 1} in a row, it is started again: {attempts.last.message}"
        action = Prepare(want.key) if prepared is None else None  # in the pause
        return action, Verdict(state=EngineState.STARTING, reason=attempts.last.reason, message=message)
    if prepared is None:
        return Prepare(want.key), Verdict(state=EngineState.STARTING, reason="PreparingWeights")
    if prepared.failure is not None:
        return None, Verdict(state=EngineState.FAILED, reason=prepared.failure.reason, message=prepared.failure.message)
    if prepared.footprint is None:
        return None, Verdict(state=EngineState.STARTING, reason="PreparingWeights", message=prepared.progress)
    if (refusal := refuse(prepared.footprint, held, capacity)) is not None:
        return None, Verdict(state=EngineState.ABSENT, reason="InsufficientMemory", message=refusal.message)
    return Start(want.key), Verdict(state=EngineState.STARTING, reason="EngineStarting")
