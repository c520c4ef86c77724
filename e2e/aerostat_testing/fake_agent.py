"""A node agent for tests of a router: the real Telemetry service over gRPC, saying what the test tells it to.

It keeps leases and wakes as an agent does (compare-and-delete, first proposal wins) and records what routers asked.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from aerostat.v1 import telemetry_pb2 as pb
from aerostat.v1 import telemetry_pb2_grpc
from aerostat_runtime.grpc_tls import server_credentials
from aerostat_runtime.tls import TlsFolder

HEARTBEAT = 0.1
MIN_INTERVAL = 0.02
_Context = grpc.aio.ServicerContext[Any, Any]


def model_state(model: str, *, port: int = 0, epoch: int = 1, state: "pb.EngineState.ValueType" = pb.OPEN, **figures: Any) -> pb.ModelState:
    host = "127.0.0.1" if port else ""
    defaults: dict[str, Any] = {"max_running": 8, "call_key": "call-key", "kv_capacity_tokens": 100_000, "kv_free_tokens": 100_000}
    return pb.ModelState(model=model, state=state, engine_epoch=epoch, host=host, port=port, **(defaults | figures))


def instance_state(name: str, *models: pb.ModelState, draining: bool = False) -> pb.InstanceState:
    return pb.InstanceState(
        namespace="default", name=name, pool="cpu", node="node-a", sharing="Concurrent", models=models, draining=draining
    )


class FakeAgent(telemetry_pb2_grpc.TelemetryServicer):
    """`say` publishes; `is_silent` stops even the heartbeats. State lives as long as `epoch` does not change."""

    def __init__(self) -> None:
        self.epoch = 1
        self.version = 0
        self.is_silent = False
        self.port = 0
        self.instances: dict[str, pb.InstanceState] = {}
        self.sessions: dict[tuple[str, str], pb.SessionState] = {}
        self.leases: dict[str, pb.Lease] = {}
        self.installed: list[pb.LeaseInstalled] = []
        self.consumed: list[tuple[pb.LeaseConsumed, bool]] = []
        self.n_lease_updates = 0
        self.wakes: list[pb.WakeRequest] = []
        self.wake_reply = pb.WakeReply(open_in_seconds=1)
        self.refuse_leases = ""
        self.demand: dict[str, pb.ReportDemandRequest] = {}
        self.n_subscriptions = 0
        self._changed: set[tuple[str, str]] = set()
        self._subscribers: set[asyncio.Queue[pb.TelemetryMessage]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # What a test says.

    def put(self, instance: pb.InstanceState) -> None:
        self.instances[instance.name] = instance
        self.say(instances=[instance])

    def remove(self, name: str) -> None:
        del self.instances[name]
        self.say(removed_instances=[f"default/{name}"])

    def put_session(self, session: pb.SessionState) -> None:
        self.sessions[session.session, session.instance] = session
        self.say(sessions=[session])

    def say(self, **what: Any) -> None:
        """One delta to all subscribers. A silent agent still hears and answers; what it would have said is lost."""
        if self.is_silent:
            return
        self.version += 1
        self._send(self._message(**what))

    def skip_a_version(self) -> None:
        self.version += 1

    def restart(self) -> None:
        """A new agent in the same place: a higher epoch, no leases, all streams ended."""
        self.epoch += 1
        self.version = 0
        self.leases.clear()
        for key, session in self.sessions.items():
            bare = pb.SessionState()
            bare.CopyFrom(session)
            bare.ClearField("lease")
            self.sessions[key] = bare
        self._send(None)

    # The service.

    async def Subscribe(self, request: pb.SubscribeRequest, context: _Context) -> AsyncIterator[pb.TelemetryMessage]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.n_subscriptions += 1
        self._subscribers.add(queue)
        try:
            yield self._message(full=True, instances=self.instances.values(), sessions=self.sessions.values())
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._subscribers.discard(queue)

    async def Wake(self, request: pb.WakeRequest, context: _Context) -> pb.WakeReply:
        self.wakes.append(request)
        reply = pb.WakeReply(instance=request.instance)
        reply.MergeFrom(self.wake_reply)
        return reply

    async def UpdateLeases(self, request: pb.UpdateLeasesRequest, context: _Context) -> pb.UpdateLeasesReply:
        self.n_lease_updates += 1
        for spent in request.consumed:
            lease = self.leases.get(spent.session)
            is_there = lease is not None and lease.id == spent.lease_id
            if is_there:
                del self.leases[spent.session]
                for session in [s for s in self.sessions.values() if s.session == spent.session]:
                    self._lease_changed(session)
            self.consumed.append((spent, is_there))
        for install in request.installed:
            self.installed.append(install)
            if not self.refuse_leases:
                expires_at = time.time() + install.ttl_seconds
                lease = pb.Lease(id=install.lease_id, expires_at=expires_at, units=1, engine_epoch=install.engine_epoch)
                self.leases[install.session] = lease
                unreported = pb.SessionState(
                    session=install.session, namespace=install.namespace, instance=install.instance, model=install.model
                )
                self._lease_changed(self.sessions.get((install.session, install.instance), unreported))
        refused = [pb.LeaseRefusal(lease_id=i.lease_id, reason=self.refuse_leases) for i in request.installed if self.refuse_leases]
        return pb.UpdateLeasesReply(refused=refused)

    async def ReportDemand(self, request: pb.ReportDemandRequest, context: _Context) -> pb.ReportDemandReply:
        self.demand[request.router] = request
        return pb.ReportDemandReply()

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            if not self.is_silent:
                self.say()

    # Inside.

    def _lease_changed(self, known: pb.SessionState) -> None:
        """Published with what else changes within an agent's shortest interval."""
        session = pb.SessionState()
        session.CopyFrom(known)
        session.ClearField("lease")
        if known.session in self.leases:
            session.lease.CopyFrom(self.leases[known.session])
        self.sessions[known.session, known.instance] = session
        if not self._changed:
            asyncio.get_running_loop().call_later(MIN_INTERVAL, self._say_changed)
        self._changed.add((known.session, known.instance))

    def _say_changed(self) -> None:
        changed = [self.sessions[key] for key in sorted(self._changed)]
        self._changed.clear()
        self.say(sessions=changed)

    def _message(self, *, full: bool = False, **what: Any) -> pb.TelemetryMessage:
        return pb.TelemetryMessage(agent_epoch=self.epoch, version=self.version, sent_at=time.time(), full=full, **what)

    def _send(self, message: pb.TelemetryMessage | None) -> None:
        for queue in list(self._subscribers):
            queue.put_nowait(message)  # type: ignore[arg-type]  # None ends the stream


@asynccontextmanager
async def fake_agent(tls: TlsFolder | None = None) -> AsyncIterator[FakeAgent]:
    agent = FakeAgent()
    server = grpc.aio.server()
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(agent, server)
    any_port = "127.0.0.1:0"
    agent.port = server.add_insecure_port(any_port) if tls is None else server.add_secure_port(any_port, server_credentials(tls))
    await server.start()
    beating = asyncio.create_task(agent.beat())
    try:
        yield agent
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await server.stop(None)
