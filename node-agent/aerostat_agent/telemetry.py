"""The Telemetry gRPC service: routers subscribe, wake models, tell of leases, report demand. Only translation here."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import grpc

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat.v1 import telemetry_pb2_grpc as rpc
from aerostat_agent import wire
from aerostat_agent.node import Node
from aerostat_agent.publisher import Publisher
from aerostat_agent.wakes import wake
from aerostat_core import peers
from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError
from aerostat_core.ids import LeaseId, Seconds, SessionKey
from aerostat_runtime.grpc_tls import OnlyFrom, server_credentials
from aerostat_runtime.tls import TlsFolder

MAX_MESSAGE_BYTES: Final = 32 << 20
STOP_GRACE: Final[Seconds] = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]


class TelemetryService(rpc.TelemetryServicer):
    def __init__(self, node: Node, publisher: Publisher) -> None:
        self._node = node
        self._publisher = publisher

    async def Subscribe(self, request: tpb.SubscribeRequest, context: _Context) -> AsyncIterator[tpb.TelemetryMessage]:
        async for message in self._publisher.subscribe():
            yield message

    async def Wake(self, request: tpb.WakeRequest, context: _Context) -> tpb.WakeReply:
        answer = wake(self._node, wire.wake_asked(request))
        return tpb.WakeReply(instance=answer.instance, open_in_seconds=answer.open_in, refused=answer.refused, message=answer.message)

    async def UpdateLeases(self, request: tpb.UpdateLeasesRequest, context: _Context) -> tpb.UpdateLeasesReply:
        if not all(i.lease_id and i.session and math.isfinite(i.ttl_seconds) for i in request.installed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a lease needs an id, a session and a finite ttl")
        for spent in request.consumed:
            self._node.consume_lease(LeaseId(spent.lease_id), SessionKey(spent.session))
        wall = self._node.clock.wall()
        answers = [(i.lease_id, self._node.install_lease(wire.lease(i, wall))) for i in request.installed]
        refused = [tpb.LeaseRefusal(lease_id=lease_id, reason=answer.reason) for lease_id, answer in answers if answer.lease is None]
        return tpb.UpdateLeasesReply(refused=refused)

    async def ReportDemand(self, request: tpb.ReportDemandRequest, context: _Context) -> tpb.ReportDemandReply:
        if not request.router or not 0 < request.window_seconds < math.inf:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a report needs the router's name and a window of more than 0 seconds")
        demand = tuple(map(wire.demand, request.demand))
        if not self._node.demand.report(request.router, demand, window=request.window_seconds, now=self._node.clock.monotonic()):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many routers report here")
        self._node.touch()
        return tpb.ReportDemandReply()


async def serve(service: TelemetryService, listen: Address, tls: TlsFolder | None) -> tuple[grpc.aio.Server, Address]:
    """Started; the address has the real port. With TLS it answers routers only. Raises SettingError when it cannot listen there."""
    options = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options, interceptors=() if tls is None else (OnlyFrom(peers.ROUTER),))
    rpc.add_TelemetryServicer_to_server(service, server)
    try:
        where = str(listen)
        port = server.add_insecure_port(where) if tls is None else server.add_secure_port(where, server_credentials(tls))
    except RuntimeError as error:
        raise SettingError(f"cannot listen on {listen}: {error}; set {listen.flag} to a free address") from error
    await server.start()
    return server, replace(listen, port=port)
