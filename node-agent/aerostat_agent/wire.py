"""Between the agent's values and protobuf. Frames and messages of the agent's sockets are read and made here."""

from aerostat.v1 import agent_pb2 as pb
from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent.engine_events import (
    Boundary,
    EngineEvent,
    Finished,
    Handle,
    Hello,
    Identity,
    ProfilePoint,
    SessionsMissing,
    Unhealthy,
)
from aerostat_agent.policy.demand import Demand
from aerostat_agent.policy.leases import Lease
from aerostat_agent.policy.settlements import WakeAsked
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Epoch, InstanceName, LeaseId, ModelName, NamespacedName, Seconds, SessionKey
from aerostat_core.specs import EngineState


def identity(message: pb.EngineIdentity) -> Identity:
    """Raises ValueError for an instance that is no `namespace/name`."""
    key = EngineKey(NamespacedName.parse(message.instance), ModelName(message.model))
    return Identity(key=key, epoch=Epoch(message.engine_epoch), rank=message.rank)


def handle(message: pb.PrefixHandle) -> Handle:
    return Handle(epoch=Epoch(message.engine_epoch), prefix_hash=message.prefix_hash, n_tokens=message.n_tokens)


def handle_message(value: Handle) -> pb.PrefixHandle:
    return pb.PrefixHandle(engine_epoch=value.epoch, prefix_hash=value.prefix_hash, n_tokens=value.n_tokens)


def hello(message: pb.Hello) -> Hello:
    return Hello(
        pid=message.pid,
        tensor_parallel=message.tensor_parallel,
        versions=f"plugin {message.plugin_version}, SGLang {message.sglang_version}, attention {message.attention_backend}",
        page_size_tokens=message.page_size_tokens,
        kv_capacity_tokens=message.kv_capacity_tokens,
        kv_bytes_per_token=message.kv_bytes_per_token,
        weights_bytes=message.weights_bytes,
        max_context_tokens=message.max_context_tokens,
        max_running=message.max_running,
        sessions=tuple((SessionKey(s.session), handle(s.handle)) for s in message.sessions),
    )


def engine_event(frame: pb.EngineFrame) -> EngineEvent | None:
    """None for a body that this agent does not know: a newer engine says more."""
    match frame.WhichOneof("body"):
        case "finished":
            f = frame.finished
            return Finished(
                session=SessionKey(f.session),
                handle=handle(f.handle) if f.HasField("handle") else None,
                n_prompt_tokens=f.n_prompt_tokens,
                n_output_tokens=f.n_output_tokens,
                n_cached_tokens=f.n_cached_tokens,
                first_token_seconds=f.first_token_seconds if f.HasField("first_token_seconds") else None,
                seconds=f.seconds,
            )
        case "boundary":
            b = frame.boundary
            return Boundary(
                running=b.running,
                waiting=b.waiting,
                waiting_tokens=b.waiting_tokens,
                kv_used_tokens=b.kv_used_tokens,
                kv_evictable_tokens=b.kv_evictable_tokens,
            )
        case "profile":
            p = frame.profile
            return ProfilePoint(is_prefill=p.phase == pb.ProfilePoint.PREFILL, n=p.n_new_tokens, seconds=p.seconds)
        case "tiers":
            return SessionsMissing(sessions=tuple(map(SessionKey, frame.tiers.missing)))
        case "unhealthy":
            return Unhealthy(why=frame.unhealthy.why)
        case _:
            return None


_STATES = {
    EngineState.ABSENT: tpb.ABSENT,
    EngineState.STARTING: tpb.STARTING,
    EngineState.PARKED: tpb.PARKED,
    EngineState.CLOSED: tpb.CLOSED,
    EngineState.OPEN: tpb.OPEN,
    EngineState.DRAINING: tpb.DRAINING,
    EngineState.FAILED: tpb.FAILED,
}


def engine_state(value: EngineState) -> tpb.EngineState.ValueType:
    return _STATES[value]


def lease(message: tpb.LeaseInstalled, wall: Seconds) -> Lease:
    """Stamped: it expires by this agent's clock, whose time is `wall`."""
    return Lease(
        id=LeaseId(message.lease_id),
        engine=EngineKey(NamespacedName(message.namespace, message.instance), ModelName(message.model)),
        session=SessionKey(message.session),
        epoch=Epoch(message.engine_epoch),
        expires_at=wall + message.ttl_seconds,
    )


def wake_asked(message: tpb.WakeRequest) -> WakeAsked:
    return WakeAsked(
        model=NamespacedName(message.namespace, message.model),
        proposed=InstanceName(message.instance),
        is_settled=message.settled,
        ruled_out=frozenset(map(InstanceName, message.ruled_out)),
    )


def demand(message: tpb.ModelDemand) -> Demand:
    model = NamespacedName(message.namespace, message.model)
    return Demand(model=model, arrivals=message.arrivals, held=message.held, spilled=message.spilled)


def demand_message(value: Demand) -> tpb.ModelDemand:
    return tpb.ModelDemand(
        namespace=value.model.namespace, model=value.model.name, arrivals=value.arrivals, held=value.held, spilled=value.spilled
    )
