"""The Telemetry service and the token probe over real sockets: what a router may ask, what an engine may answer."""

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_agent import admin, probe, telemetry
from aerostat_agent.metrics import registry_of
from aerostat_agent.notes import EngineNote, PreparedModel, TokenProbe
from aerostat_agent.policy.memory import Footprint
from aerostat_agent.ports import free_port
from aerostat_agent.probe import HttpProber
from aerostat_agent.publisher import Publisher
from aerostat_core import peers
from aerostat_core.addresses import Address
from aerostat_core.errors import SettingError
from aerostat_runtime.tls import TlsFolder
from aerostat_testing.agent_fakes import AgentRig, instance_model, instance_spec
from aerostat_testing.agent_processes import telemetry_of
from aerostat_testing.certificates import Authority

pytestmark = pytest.mark.cpu

ANY = Address("127.0.0.1", 0)
NOTE = EngineNote(
    instance="default/cpu-0",
    model="a",
    generation=1,
    fingerprint="f",
    host="127.0.0.1",
    port=1,
    log_offset=0,
    call_key="call-key",
    admin_key="admin-key",
    footprint=Footprint(weights=1, reserve=1, kv=1),
    prepared=PreparedModel(
        path="/m",
        dtype="bfloat16",
        weights_bytes=1,
        kv_bytes_per_token={"bfloat16": 1},
        context_tokens=16,
        probe=TokenProbe(prompt_ids=(1, 2), expected_ids=(3,)),
    ),
)


@asynccontextmanager
async def serving(rig: AgentRig) -> AsyncGenerator[str, None]:
    server, address = await telemetry.serve(telemetry.TelemetryService(rig.node, Publisher(rig.node)), ANY, None)
    try:
        yield str(address)
    finally:
        await server.stop(None)


async def test_malformed_requests_are_invalid_arguments(tmp_path: Path) -> None:
    async with serving(AgentRig(tmp_path)) as address, telemetry_of(address) as agent:
        leases = [
            tpb.LeaseInstalled(session="s", ttl_seconds=1),
            tpb.LeaseInstalled(lease_id="l", ttl_seconds=1),
            tpb.LeaseInstalled(lease_id="l", session="s", ttl_seconds=float("nan")),
        ]
        updates = [tpb.UpdateLeasesRequest(installed=[lease]) for lease in leases]
        assert {await agent.UpdateLeases(update).code() for update in updates} == {grpc.StatusCode.INVALID_ARGUMENT}
        reports = [
            tpb.ReportDemandRequest(window_seconds=1),
            tpb.ReportDemandRequest(router="r"),
            tpb.ReportDemandRequest(router="r", window_seconds=float("inf")),
        ]
        assert {await agent.ReportDemand(r).code() for r in reports} == {grpc.StatusCode.INVALID_ARGUMENT}


async def test_refusals_are_answers(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    rig.node.declare(instance_spec(instance_model("a")))
    async with serving(rig) as address, telemetry_of(address) as agent:
        wake = await agent.Wake(tpb.WakeRequest(namespace="default", model="a", instance="elsewhere", router="r", settled=True))
        assert (wake.refused, wake.instance) == ("NoSuchInstance", "elsewhere")
        lease = tpb.LeaseInstalled(namespace="default", instance="cpu-0", model="a", session="s", lease_id="l", ttl_seconds=1)
        answer = await agent.UpdateLeases(tpb.UpdateLeasesRequest(installed=[lease]))
        assert [(refusal.lease_id, refusal.reason) for refusal in answer.refused] == [("l", "EngineChanged")]
        spent = tpb.LeaseConsumed(session="s", lease_id="l")
        assert not (await agent.UpdateLeases(tpb.UpdateLeasesRequest(consumed=[spent]))).refused


async def test_demand_of_two_routers_is_summed(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    async with serving(rig) as address, telemetry_of(address) as agent:
        for router in ("r1", "r2"):
            demand = [tpb.ModelDemand(namespace="default", model="a", arrivals=3, held=2, spilled=1)]
            await agent.ReportDemand(tpb.ReportDemandRequest(router=router, window_seconds=10, demand=demand))
        (total,) = rig.node.demand.sums(rig.clock.monotonic())
        assert (total.arrivals, total.held, total.spilled) == (6, 4, 2)


async def test_an_address_in_use_is_a_fatal_setting(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    publisher = Publisher(rig.node)
    async with serving(rig) as address:
        host, _, port = address.rpartition(":")
        taken = Address(host, int(port), "--some-listen")
        with pytest.raises(SettingError, match="set --some-listen to a free address"):
            await telemetry.serve(telemetry.TelemetryService(rig.node, publisher), taken, None)
        with pytest.raises(SettingError, match="set --some-listen to a free address"):
            async with admin.serving(taken, registry_of(rig.node, publisher, rig.cache), lambda: True):
                pass


async def test_not_ready_before_the_instances_are_known(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    async with (
        admin.serving(ANY, registry_of(rig.node, Publisher(rig.node), rig.cache), lambda: False) as address,
        aiohttp.ClientSession() as http,
        http.get(f"http://{address}/readyz") as ready,
        http.get(f"http://{address}/healthz") as health,
    ):
        assert (ready.status, health.status) == (503, 200)


@asynccontextmanager
async def engine_that_answers(
    answer: web.Response, seen: list[dict[str, object]], tls: ssl.SSLContext | None = None
) -> AsyncGenerator[int, None]:
    async def generate(request: web.Request) -> web.Response:
        seen.append(await request.json() | {"key": request.headers["Authorization"]})
        return answer

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (web.json_response({"output_ids": [3, 9]}), None),
        (web.json_response({"output_ids": [4]}), "expected the tokens [3], got [4]"),
        (web.json_response({"text": "?"}), "no tokens"),
        (web.json_response({"error": "busy"}, status=503), "answered 503"),
        (web.Response(text="hello"), "answered 200: hello"),
    ],
)
async def test_the_probe_asks_greedily_with_the_call_key_and_judges_the_tokens(answer: web.Response, says: str | None) -> None:
    seen: list[dict[str, object]] = []
    async with engine_that_answers(answer, seen) as port, aiohttp.ClientSession() as http:
        failure = await HttpProber(http).probe(replace(NOTE, port=port))
    assert seen[0]["input_ids"] == [1, 2]
    assert seen[0]["key"] == f"Bearer {NOTE.call_key}"
    assert (failure is None) == (says is None)
    assert failure is None or str(says) in failure.message


async def test_a_port_that_never_opens_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIMIT", 0.3)
    async with aiohttp.ClientSession() as http:
        failure = await HttpProber(http).probe(replace(NOTE, port=free_port()))
    assert failure is not None
    assert "no tokens within" in failure.message


async def test_by_tls_the_probe_trusts_the_answers_of_an_engine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority()
    agent, engine, other = (TlsFolder(authority.issue(tmp_path / name, name)) for name in (peers.AGENT, peers.ENGINES, "another.example"))
    right = web.json_response({"output_ids": [3]})
    async with aiohttp.ClientSession() as http:
        async with engine_that_answers(right, [], engine.server_context()) as port:
            assert await HttpProber(http, agent).probe(replace(NOTE, port=port)) is None
        monkeypatch.setattr(probe, "LIMIT", 0.3)
        async with engine_that_answers(right, [], other.server_context()) as port:
            failure = await HttpProber(http, agent).probe(replace(NOTE, port=port))
        assert failure is not None
        assert "Hostname mismatch" in failure.message
        async with engine_that_answers(right, [], None) as port:
            failure = await HttpProber(http, agent).probe(replace(NOTE, port=port))
        assert failure is not None
        assert "SSL" in failure.message
