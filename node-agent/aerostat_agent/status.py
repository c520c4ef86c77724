"""Instance.status: what is said of each model, on change and at most once a second; figures with the slow heartbeat.

Events are noted once per transition that a person would want to know of, not once per retry.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from aerostat_agent.node import LiveEngine, Node, Transition
from aerostat_agent.policy.engines import Verdict, fingerprint
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.defaults import STATUS_FIGURES_EVERY, STATUS_STATE_AT_MOST_EVERY
from aerostat_core.errors import AerostatError
from aerostat_core.ids import ModelName, NamespacedName, Seconds
from aerostat_core.resources import Resource, instance_status_resource
from aerostat_core.specs import Condition, EngineState, InstanceModel, InstanceModelStatus, InstanceSpec, InstanceStatus
from aerostat_runtime.cluster.port import Cluster, Kind, Note

_log = logging.getLogger(__name__)

Told = tuple[str, bool]  # a reason, and whether it was the last word
# What a person should look at, where there is something to say of it.
_WARN_WITH_WORDS: Final = frozenset({EngineState.STARTING, EngineState.ABSENT, EngineState.OPEN})
_QUIET_REASONS: Final = frozenset({"NotResident", "PreparingWeights", "EngineStarting", "EngineEnded", "Adopted"})


@dataclass(slots=True)
class _Written:
    status: InstanceStatus
    figures_at: Seconds


class StatusWriter:
    """The only writer of the status of this node's instances."""

    def __init__(self, node: Node, cluster: Cluster, agent_address: str) -> None:
        self._node = node
        self._cluster = cluster
        self._agent_address = agent_address
        self._written: dict[NamespacedName, _Written] = {}
        self._noted: dict[EngineKey, Told] = {}

    async def run(self) -> None:
        """Until cancelled."""
        changed = self._node.watch()
        while True:
            changed.clear()
            while self._node.withdrawn:
                self._written.pop(self._node.withdrawn.pop(), None)
            for spec in tuple(self._node.specs.values()):
                try:
                    await self._write_if_due(spec)
                except AerostatError as error:
                    _log.warning("the status of Instance %s is not written, tried again: %s", spec.name, error)
            while self._node.transitions:
                await self._note(self._node.transitions.popleft())
            await asyncio.sleep(STATUS_STATE_AT_MOST_EVERY)
            with suppress(TimeoutError):
                async with asyncio.timeout(STATUS_FIGURES_EVERY / 10):
                    await changed.wait()

    async def _write_if_due(self, spec: InstanceSpec) -> None:
        if spec.name in self._node.deleted:
            return
        now = self._node.clock.monotonic()
        before = self._written.get(spec.name)
        wall = datetime.fromtimestamp(self._node.clock.wall(), UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        is_figures_due = before is None or now - before.figures_at >= STATUS_FIGURES_EVERY
        status = instance_status(self._node, spec, self._agent_address, wall, before.status if before is not None else None)
        if before is not None and not is_figures_due and _words(status) == _words(before.status):
            return
        if await self._cluster.patch_status(Kind.INSTANCE, spec.name, instance_status_resource(status, _devices(spec))):
            figures_at = before.figures_at if before is not None and not is_figures_due else now
            self._written[spec.name] = _Written(status, figures_at)

    async def _note(self, transition: Transition) -> None:
        note = note_of(transition, self._noted)
        if note is not None:
            self._noted[transition.key] = _told(transition.after)
            await self._cluster.note(note)


def _told(verdict: Verdict) -> Told:
    return verdict.reason, verdict.state is EngineState.FAILED


def note_of(transition: Transition, noted: Mapping[EngineKey, Told]) -> Note | None:
    """None for what a person need not know, or was told already. `noted`: what was told last of each model."""
    key, after = transition.key, transition.after
    last = noted.get(key)
    if _told(after) == last or (after.reason in _QUIET_REASONS and (last is not None or after.reason != "EngineStarting")):
        return None
    is_warning = after.state is EngineState.FAILED or (after.state in _WARN_WITH_WORDS and bool(after.message))
    message = f"model {key.model}: {after.message or after.state.value}"
    return Note(kind=Kind.INSTANCE, name=key.instance, reason=after.reason, message=message, warning=is_warning)


def instance_status(node: Node, spec: InstanceSpec, agent_address: str, wall: str, before: InstanceStatus | None) -> InstanceStatus:
    """`wall` is RFC 3339. Models that the spec has no more are there while their engines are."""
    models = {m.name: m for m in spec.models}
    keys = sorted({EngineKey(spec.name, name) for name in models} | {key for key in node.tracks if key.instance == spec.name})
    statuses = tuple(_model_status(node, spec, key, models.get(key.model)) for key in keys)
    ready = _ready(spec, {s.name: s for s in statuses})
    old = next((c for c in before.conditions if c.type == ready.type), None) if before is not None else None
    ready = replace(ready, last_transition_time=old.last_transition_time if old is not None and old.status == ready.status else wall)
    return InstanceStatus(
        name=spec.name,
        agent_epoch=node.agent_epoch,
        heartbeat=wall,
        agent_address=agent_address,
        models=statuses,
        device_bytes=node.capacity(spec.name),
        conditions=(ready,),
    )


def _model_status(node: Node, spec: InstanceSpec, key: EngineKey, model: InstanceModel | None) -> InstanceModelStatus:
    verdict = node.verdicts.get(key, Verdict(state=EngineState.ABSENT, reason="NotPlanned"))
    engine, figures, track = node.engines.get(key), node.figures_of(key), node.tracks.get(key)
    now = node.clock.monotonic()
    hello = engine.hello if engine is not None else None
    return InstanceModelStatus(
        name=key.model,
        generation=_generation(spec, model, engine),
        state=verdict.state,
        reason=verdict.reason,
        message=verdict.message,
        progress=verdict.message if verdict.reason == "PreparingWeights" else "",
        weights_bytes=engine.note.footprint.weights if engine is not None else None,
        kv_bytes_per_token=hello.kv_bytes_per_token if hello is not None else None,
        tokens_per_second=figures.tokens.per_second(now),
        requests_per_second=figures.requests.per_second(now),
        ttft_p95=figures.calls.ttft_p95(now),
        attainment=figures.calls.attainment(model.slo, now) if model is not None else None,
        restarts=track.attempts.n_failures if track is not None else 0,
    )


def _generation(spec: InstanceSpec, model: InstanceModel | None, engine: LiveEngine | None) -> int:
    """Of the model as it runs: an engine of an earlier declaration says so until it is replaced. 0 where nothing says which."""
    declared = model.generation if model is not None else 0
    if engine is None or (model is not None and engine.note.fingerprint == fingerprint(spec, model)):
        return declared
    return engine.note.generation if engine.note.generation != declared else 0


def _ready(spec: InstanceSpec, statuses: dict[ModelName, InstanceModelStatus]) -> Condition:
    resident = [m for m in spec.models if m.resident]
    as_declared = {m.name for m in resident if statuses[m.name].generation == m.generation and statuses[m.name].state is EngineState.OPEN}
    waiting = next((statuses[m.name] for m in resident if m.name not in as_declared), None)
    if waiting is not None:
        message = f"model {waiting.name}: {waiting.message or waiting.state.value}"
        return Condition(type="Ready", status="False", reason=waiting.reason, message=message)
    if spec.draining:
        return Condition(type="Ready", status="False", reason="Draining", message="the operator drains this instance")
    return Condition(type="Ready", status="True", reason="AllOpen", message=f"{len(resident)} resident models are open")


def _words(status: InstanceStatus) -> object:
    """What is written on change: all but figures and the heartbeat."""
    models = tuple((m.name, m.generation, m.state, m.reason, m.message, m.restarts) for m in status.models)
    return status.agent_epoch, status.agent_address, models, status.conditions


def _devices(spec: InstanceSpec) -> tuple[Resource, ...]:
    return tuple({"uuid": f"{spec.device_kind.value.lower()}-{i}", "bytes": spec.device_bytes, "health": "Healthy"} for i in spec.devices)
