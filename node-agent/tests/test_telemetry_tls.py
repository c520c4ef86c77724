"""Who may call a node agent by TLS, and what a renewed certificate changes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent import telemetry
from aerostat_agent.publisher import Publisher
from aerostat_core import peers
from aerostat_core.addresses import Address
from aerostat_runtime.grpc_tls import peer_channel
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.agent_fakes import AgentRig
from aerostat_testing.agent_processes import next_message, telemetry_of
from aerostat_testing.certificates import EXPIRED, Authority

pytestmark = pytest.mark.cpu

SERVICE: Final = tpb.DESCRIPTOR.services_by_name["Telemetry"]


@asynccontextmanager
async def serving(rig: AgentRig, tls: TlsFolder) -> AsyncGenerator[str, None]:
    publisher = Publisher(rig.node)
    server, address = await telemetry.serve(telemetry.TelemetryService(rig.node, publisher), Address("127.0.0.1", 0), tls)
    publishing = asyncio.create_task(publisher.run())
    try:
        yield str(address)
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await server.stop(None)


async def refusal_of(channel: grpc.aio.Channel, method: str = "Wake", *, streams: bool = False) -> tuple[grpc.StatusCode, str]:
    """Of a call with an empty request."""
    call: Any = (channel.unary_stream if streams else channel.unary_unary)(f"/{SERVICE.full_name}/{method}")
    under_way = call(b"", timeout=10)
    return await under_way.code(), await under_way.details() or ""


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def agent(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "agent", peers.AGENT)


@pytest.fixture
def router(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "router", peers.ROUTER)


async def test_a_router_may_call_and_subscribe(agent: Path, router: Path, tmp_path: Path) -> None:
    async with serving(AgentRig(tmp_path), TlsFolder(agent)) as address, telemetry_of(address, TlsFolder(router)) as told:
        assert (await told.Wake(tpb.WakeRequest(namespace="default", model="a", instance="i", router="r", settled=True))).refused
        stream = told.Subscribe(tpb.SubscribeRequest(router="r"))
        assert (await next_message(aiter(stream))).full
        stream.cancel()


@pytest.mark.parametrize("peer", [peers.ENGINES, peers.AGENT, "router.aerostat.internal.example"])
async def test_no_other_peer_may_call_any_method(authority: Authority, agent: Path, tmp_path: Path, peer: str) -> None:
    other = TlsFolder(authority.issue(tmp_path / "other", peer))
    async with serving(AgentRig(tmp_path), TlsFolder(agent)) as address, peer_channel(address, other.material, peers.AGENT) as channel:
        for method in SERVICE.methods:
            code, details = await refusal_of(channel, method.name, streams=method.server_streaming)
            assert code is grpc.StatusCode.PERMISSION_DENIED, method.name
            assert peer in details


async def test_strangers_reach_no_method(authority: Authority, agent: Path, tmp_path: Path) -> None:
    stranger = Authority().issue(tmp_path / "stranger", peers.ROUTER, also_trusts=[authority])
    late = authority.issue(tmp_path / "late", peers.ROUTER, until=EXPIRED)
    async with serving(AgentRig(tmp_path), TlsFolder(agent)) as address:
        for folder in (stranger, late):
            async with peer_channel(address, TlsFolder(folder).material, peers.AGENT) as channel:
                assert (await refusal_of(channel))[0] is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as channel:
            assert (await refusal_of(channel))[0] is grpc.StatusCode.UNAVAILABLE


async def test_another_part_in_the_agents_place_is_not_believed(authority: Authority, router: Path, tmp_path: Path) -> None:
    impostor = TlsFolder(authority.issue(tmp_path / "impostor", peers.ENGINES))
    async with serving(AgentRig(tmp_path), impostor) as address, peer_channel(address, TlsFolder(router).material, peers.AGENT) as channel:
        code, details = await refusal_of(channel)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "Hostname Verification" in details


async def test_a_stream_goes_on_while_the_authority_is_replaced(authority: Authority, agent: Path, router: Path, tmp_path: Path) -> None:
    old = TlsFolder(router)
    async with serving(AgentRig(tmp_path), TlsFolder(agent)) as address, telemetry_of(address, old) as told:
        stream = told.Subscribe(tpb.SubscribeRequest(router="r"))
        messages = aiter(stream)
        await next_message(messages)
        successor, stale = Authority(), old.material
        successor.issue(agent, peers.AGENT)
        successor.issue(router, peers.ROUTER)
        async with telemetry_of(address, TlsFolder(router)) as renewed:
            await renewed.Wake(tpb.WakeRequest(namespace="default", model="a", instance="i", router="r"))
        options = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
        async with peer_channel(address, stale, peers.AGENT, options) as channel:
            assert (await refusal_of(channel))[0] is grpc.StatusCode.UNAVAILABLE
        for _ in range(3):
            await next_message(messages)
        stream.cancel()
