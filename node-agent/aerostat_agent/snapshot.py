"""The node's state as telemetry messages: whole states of instances and sessions, made anew each time and compared by the publisher."""

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent import wire
from aerostat_agent.node import Node
from aerostat_agent.policy.engines import Verdict
from aerostat_agent.policy.memory import memory_price
from aerostat_agent.policy.sessions import Row, SessionRecord
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.specs import EngineState, InstanceSpec

_LISTENS = frozenset({EngineState.OPEN, EngineState.DRAINING})
_NOT_PLANNED = Verdict(state=EngineState.ABSENT, reason="NotPlanned", message="the agent has not looked at it yet")


def instance_states(node: Node) -> dict[NamespacedName, tpb.InstanceState]:
    return {name: _instance_state(node, spec) for name, spec in sorted(node.specs.items())}


def _instance_state(node: Node, spec: InstanceSpec) -> tpb.InstanceState:
    capacity, used = node.capacity(spec.name), node.used(spec.name)
    price = memory_price(spec.memory_price, used, capacity)
    allowed = {EngineKey(spec.name, model.name) for model in spec.models}
    keys = sorted(allowed | {key for key in node.tracks if key.instance == spec.name})
    return tpb.InstanceState(
        namespace=spec.name.namespace,
        name=spec.name.name,
        pool=spec.pool,
        node=spec.node,
        sharing=spec.sharing.value,
        device_bytes=capacity,
        device_free_bytes=max(capacity - used, 0),
        host_pool_bytes=spec.host_pool_bytes,
        models=[_model_state(node, key, price) for key in keys],
        draining=spec.draining,
    )


def _model_state(node: Node, key: EngineKey, price: float) -> tpb.ModelState:
    verdict = node.verdicts.get(key, _NOT_PLANNED)
    figures = node.figures_of(key)
    is_open = verdict.state is EngineState.OPEN
    state = tpb.ModelState(
        model=key.model,
        state=wire.engine_state(verdict.state),
        prefill=[tpb.PrefillPoint(n_tokens=n, seconds=s) for n, s in sorted(figures.profile.prefill.items())],
        decode=[tpb.DecodePoint(batch=n, seconds=s) for n, s in sorted(figures.profile.decode.items())],
        open_seconds=0.0 if is_open else figures.open_seconds,
        memory_price=price,
        waking=verdict.state is EngineState.STARTING,
        open_in_seconds=open_in_seconds(node, key),
        reason=verdict.reason,
        message=verdict.message,
    )
    if (engine := node.engines.get(key)) is not None:
        state.engine_epoch = engine.epoch
        state.weights_bytes = engine.note.footprint.weights
        if verdict.state in _LISTENS:
            state.host, state.port, state.call_key = engine.note.host, engine.note.port, engine.note.call_key
    if engine is not None and (hello := engine.hello) is not None:
        boundary = engine.boundary
        state.running, state.waiting, state.waiting_tokens = boundary.running, boundary.waiting, boundary.waiting_tokens
        state.queue_seconds = figures.queue_seconds(running=boundary.running, waiting_tokens=boundary.waiting_tokens)
        state.max_running = hello.max_running
        state.kv_capacity_tokens = hello.kv_capacity_tokens
        state.kv_free_tokens = max(hello.kv_capacity_tokens - boundary.kv_used_tokens, 0)
        state.kv_bytes_per_token = hello.kv_bytes_per_token
        state.max_context_tokens = hello.max_context_tokens
    return state


def open_in_seconds(node: Node, key: EngineKey) -> Seconds:
    """What is left until it is open, as far as starts before tell; 0 where nothing is under way. Whole seconds: an estimate."""
    verdict = node.verdicts.get(key, _NOT_PLANNED)
    if verdict.state is not EngineState.STARTING:
        return 0.0
    engine = node.engines.get(key)
    passed = node.clock.monotonic() - engine.started_at if engine is not None else 0.0
    return float(max(round(node.figures_of(key).open_seconds - passed), 1))


def session_states(node: Node) -> list[tpb.SessionState]:
    return [session_state(node, row, record) for row, record in node.sessions.rows()]


def session_state(node: Node, row: Row, record: SessionRecord) -> tpb.SessionState:
    """A handle of another epoch than the engine's is none. What the engine has still to report is told as that, not as missing."""
    engine = node.engines.get(row.engine)
    handle = record.handle
    is_here = handle is not None and engine is not None and handle.epoch == engine.epoch
    state = tpb.SessionState(
        session=row.session,
        namespace=row.engine.instance.namespace,
        instance=row.engine.instance.name,
        model=row.engine.model,
        tier=tpb.DEVICE if is_here else tpb.MISSING if record.is_reported else tpb.TIER_UNSPECIFIED,
        turns=record.n_turns,
        last_finished_at=record.last_finished_at,
    )
    if is_here and handle is not None:
        state.handle.CopyFrom(wire.handle_message(handle))
    if (lease := node.leases.of(row.engine, row.session, node.clock.wall())) is not None:
        state.lease.CopyFrom(tpb.Lease(id=lease.id, expires_at=lease.expires_at, units=lease.units, engine_epoch=lease.epoch))
    return state
