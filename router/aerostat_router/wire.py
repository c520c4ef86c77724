"""Telemetry protobuf to the router's values, and back. Nothing else in the router sees these messages."""

from collections.abc import Iterable
from functools import lru_cache

from aerostat.v1 import telemetry_pb2 as pb
from aerostat_core.ids import Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_core.latency import LatencyProfile
from aerostat_core.specs import EngineState
from aerostat_router.fleet import AgentUpdate
from aerostat_router.policy.demand import Demand
from aerostat_router.policy.views import EngineView, InstanceView, LeaseView, SessionView, Tier, Timing

_STATES = {
    pb.ABSENT: EngineState.ABSENT,
    pb.STARTING: EngineState.STARTING,
    pb.PARKED: EngineState.PARKED,
    pb.CLOSED: EngineState.CLOSED,
    pb.OPEN: EngineState.OPEN,
    pb.DRAINING: EngineState.DRAINING,
    pb.FAILED: EngineState.FAILED,
}
_name = lru_cache(maxsize=1024)(NamespacedName)  # thousands of sessions lie on a few instances
_TIERS = {pb.DEVICE: Tier.DEVICE, pb.HOST: Tier.HOST}

ProfileKey = tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]


class UpdateReader:
    """Reads one agent's messages. It keeps the timings that it made, since profiles change less often than states do."""

    def __init__(self) -> None:
        self._timings: dict[tuple[NamespacedName, NamespacedName], tuple[ProfileKey, Timing]] = {}

    def read(self, message: pb.TelemetryMessage, now: Seconds) -> AgentUpdate:
        """`now` is the router's own time: expiries are carried over as what was left of them when the agent spoke."""
        if message.full:
            self._timings.clear()
        return AgentUpdate(
            agent_epoch=message.agent_epoch,
            version=message.version,
            is_full=message.full,
            instances=tuple(self._instance(i) for i in message.instances),
            removed_instances=tuple(NamespacedName.parse(name) for name in message.removed_instances),
            sessions=tuple(_session(s, now - message.sent_at) for s in message.sessions),
            forgotten_sessions=tuple(SessionKey(key) for key in message.forgotten_sessions),
            demand=tuple(
                Demand(model=NamespacedName(d.namespace, d.model), arrivals=d.arrivals, held=d.held, spilled=d.spilled)
                for d in message.demand
            ),
        )

    def _instance(self, i: pb.InstanceState) -> InstanceView:
        name = NamespacedName(i.namespace, i.name)
        return InstanceView(
            name=name,
            pool=i.pool,
            node=i.node,
            sharing=i.sharing,
            is_draining=i.draining,
            engines=tuple(self._engine(name, m, is_draining=i.draining) for m in i.models),
        )

    def _engine(self, instance: NamespacedName, m: pb.ModelState, *, is_draining: bool) -> EngineView:
        model = instance.sibling(m.model)
        return EngineView(
            instance=instance,
            model=model,
            state=_STATES.get(m.state, EngineState.ABSENT),
            epoch=Epoch(m.engine_epoch),
            timing=self._timing(instance, model, m),
            host=m.host,
            port=m.port,
            call_key=m.call_key,
            is_draining=is_draining,
            is_waking=m.waking,
            running=m.running,
            waiting=m.waiting,
            max_running=m.max_running,
            queue_seconds=m.queue_seconds,
            open_seconds=m.open_seconds,
            open_in_seconds=m.open_in_seconds,
            kv_capacity_tokens=m.kv_capacity_tokens,
            kv_free_tokens=m.kv_free_tokens,
            kv_bytes_per_token=m.kv_bytes_per_token,
            weights_bytes=m.weights_bytes,
            memory_price=m.memory_price,
            max_context_tokens=m.max_context_tokens,
            reason=m.reason,
            message=m.message,
        )

    def _timing(self, instance: NamespacedName, model: NamespacedName, m: pb.ModelState) -> Timing:
        key = (tuple((p.n_tokens, p.seconds) for p in m.prefill), tuple((p.batch, p.seconds) for p in m.decode))
        known = self._timings.get((instance, model))
        if known is not None and known[0] == key:
            return known[1]
        timing = Timing.of(LatencyProfile(prefill=dict(key[0]), decode=dict(key[1])))
        self._timings[instance, model] = (key, timing)
        return timing


def _session(s: pb.SessionState, to_local: Seconds) -> SessionView:
    """Two of these are read per call, and each field of a message is looked up anew: hence positions, and no field twice."""
    namespace, told = s.namespace, s.lease if s.HasField("lease") else None
    key, instance, model = SessionKey(s.session), _name(namespace, s.instance), _name(namespace, s.model)
    epoch, n_tokens = 0, 0
    if s.HasField("handle"):
        handle = s.handle
        epoch, n_tokens = handle.engine_epoch, handle.n_tokens
    lease = None
    if told is not None:
        leased = Epoch(told.engine_epoch)
        epoch = epoch or leased
        lease = LeaseView(LeaseId(told.id), key, model, instance, leased, told.expires_at + to_local, max(1, told.units), is_published=True)
    tier = s.tier
    is_reported = tier != pb.TIER_UNSPECIFIED
    tier_here = _TIERS.get(tier, Tier.MISSING)
    return SessionView(
        key, model, instance, Epoch(epoch), tier_here, n_tokens, lease, is_reported, s.suspended, s.turns, s.last_finished_at
    )


def lease_updates(consumed: Iterable[LeaseView], installed: Iterable[tuple[LeaseView, Seconds]]) -> pb.UpdateLeasesRequest:
    """`installed` with the time that each has left."""
    return pb.UpdateLeasesRequest(
        consumed=[pb.LeaseConsumed(session=lease.session, lease_id=lease.id) for lease in consumed],
        installed=[
            pb.LeaseInstalled(
                namespace=lease.instance.namespace,
                instance=lease.instance.name,
                model=lease.model.name,
                session=lease.session,
                lease_id=lease.id,
                ttl_seconds=left,
                engine_epoch=lease.epoch,
            )
            for lease, left in installed
        ],
    )


def demand_request(router: str, window: Seconds, demand: Iterable[Demand]) -> pb.ReportDemandRequest:
    return pb.ReportDemandRequest(
        router=router,
        window_seconds=window,
        demand=[
            pb.ModelDemand(namespace=d.model.namespace, model=d.model.name, arrivals=d.arrivals, held=d.held, spilled=d.spilled)
            for d in demand
        ],
    )


def wake_request(
    router: str, model: NamespacedName, instance: str, *, is_settled: bool = False, ruled_out: Iterable[str] = ()
) -> pb.WakeRequest:
    return pb.WakeRequest(
        namespace=model.namespace,
        model=model.name,
        instance=instance,
        router=router,
        settled=is_settled,
        ruled_out=sorted(ruled_out),
    )
