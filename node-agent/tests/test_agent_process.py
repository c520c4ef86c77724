"""Keeper and agent as real processes over fake engines: kill -9 of either side, and what a router sees over gRPC."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest

from aerostat.v1 import telemetry_pb2 as tpb
from aerostat_core.resources import name_of
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.agent_fakes import instance_resource
from aerostat_testing.agent_processes import NodeProcesses, node_processes, telemetry_of
from aerostat_testing.fake_engine import FakeModel
from aerostat_testing.ports import free_port
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu


async def model_state(node: NodeProcesses, name: str) -> tpb.ModelState:
    """As a router gets it."""
    address = (await node.status())["agentAddress"]
    async with telemetry_of(address) as telemetry, asyncio.timeout(60):
        stream = telemetry.Subscribe(tpb.SubscribeRequest(router="r"))
        async for message in stream:
            assert message.full
            return next(m for i in message.instances for m in i.models if m.model == name)
    raise AssertionError("the stream ended")


async def stream_chat(http: aiohttp.ClientSession, model: tpb.ModelState, n_tokens: int, begun: asyncio.Event) -> list[str]:
    """The data lines of a streamed answer."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": n_tokens, "stream": True}
    headers = {"Authorization": f"Bearer {model.call_key}", "x-smg-routing-key": "session-1"}
    lines = []
    async with http.post(f"http://{model.host}:{model.port}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.strip():
                lines.append(line.decode().strip())
                begun.set()
    return lines


async def test_an_agent_that_is_killed_and_started_again_breaks_no_stream_and_starts_no_second_engine(tmp_path: Path) -> None:
    uri = FakeModel(token_seconds=0.05).write(tmp_path / "m")
    async with node_processes(tmp_path) as node, aiohttp.ClientSession() as http:
        await node.cluster.apply(instance_resource(uri, "a"))
        node.start_keeper()
        node.start_agent()
        before = await node.until_state("a", "Open")
        model = await model_state(node, "a")
        pid = node.engines["a"].pid
        begun = asyncio.Event()
        streaming = asyncio.create_task(stream_chat(http, model, 120, begun))
        await asyncio.wait_for(begun.wait(), 60)
        assert node.agent is not None
        assert await node.end(node.agent, signal.SIGKILL) == -signal.SIGKILL
        node.start_agent()
        after = await node.until_state("a", "Open", agent_epoch_after=before["agentEpoch"])
        assert after["models"][0]["restarts"] == 0
        lines = await streaming
        assert lines[-1] == "data: [DONE]"
        assert sum(bool(json.loads(line[6:])["choices"][0]["delta"]) for line in lines[:-1]) == 120
        adopted = await model_state(node, "a")
        assert (adopted.engine_epoch, adopted.call_key, adopted.port) == (model.engine_epoch, model.call_key, model.port)
        assert {name: p.pid for name, p in node.engines.items()} == {"a": pid}
        fenced = node.agent
        node.start_agent()
        await node.until_state("a", "Open", agent_epoch_after=after["agentEpoch"])
        assert await eventually(fenced.poll, "the older agent gives way", limit=60) == 2
        assert await node.end(node.agent) == 0  # an upgrade leaves engines alone
        assert node.engines["a"].pid == pid
        assert not (node.run_dir / "agent.sock").exists()
        assert node.keeper is not None
        assert await node.end(node.keeper) == 0
        assert not psutil.pid_exists(pid)
        assert not (node.run_dir / "keeper.sock").exists()


async def test_a_killed_keeper_takes_its_engines_along_and_the_agent_starts_them_under_the_next_one(tmp_path: Path) -> None:
    uri = FakeModel().write(tmp_path / "m")
    async with node_processes(tmp_path) as node:
        await node.cluster.apply(instance_resource(uri, "a"))
        node.start_keeper()
        node.start_agent()
        before = await node.until_state("a", "Open")
        pid = node.engines["a"].pid
        assert node.keeper is not None
        await node.end(node.keeper, signal.SIGKILL)
        await eventually(lambda: not psutil.pid_exists(pid), "the engine died with its keeper", limit=60)
        node.start_keeper()
        await node.until_state("a", "Open", agent_epoch_after=before["agentEpoch"])
        assert node.engines["a"].pid != pid


async def test_an_engine_that_is_killed_is_missed_at_once_and_started_again(tmp_path: Path) -> None:
    uri = FakeModel().write(tmp_path / "m")
    instance = instance_resource(uri, "a", "w")
    instance["spec"]["models"][1]["resident"] = False
    async with node_processes(tmp_path) as node, aiohttp.ClientSession() as http:
        await node.cluster.apply(instance)
        node.start_keeper()
        node.start_agent()
        status = await node.until_state("a", "Open")
        model = await model_state(node, "a")
        await stream_chat(http, model, 40, asyncio.Event())
        async with telemetry_of(status["agentAddress"]) as telemetry, asyncio.timeout(60):
            install = tpb.LeaseInstalled(
                namespace="default", instance="cpu-0", model="a", session="session-1", lease_id="l1", ttl_seconds=60
            )
            install.engine_epoch = model.engine_epoch
            for _ in range(2):
                assert not (await telemetry.UpdateLeases(tpb.UpdateLeasesRequest(installed=[install]))).refused
            sessions: dict[str, tpb.SessionState] = {}
            version = None
            async for message in telemetry.Subscribe(tpb.SubscribeRequest(router="r")):
                assert version is None or message.version == version + 1
                version = message.version
                sessions |= {s.session: s for s in message.sessions}
                if message.full:
                    assert sessions["session-1"].lease.id == "l1"
                    assert sessions["session-1"].tier == tpb.DEVICE
                    os.kill(node.engines["a"].pid, signal.SIGKILL)
                states = [m for i in message.instances for m in i.models if m.model == "a"]
                if states and states[0].state == tpb.OPEN and states[0].engine_epoch > model.engine_epoch:
                    break
            assert sessions["session-1"].tier == tpb.MISSING
            assert not sessions["session-1"].HasField("lease")
            again = await telemetry.UpdateLeases(tpb.UpdateLeasesRequest(installed=[install]))
            assert [refusal.reason for refusal in again.refused] == ["AlreadyEnded"]
        reasons = [note["reason"] for note in await node.cluster.notes()]
        assert "EngineExited" in reasons
        admin = re.search(r"metrics and health on (\S+)", node.said("agent"))
        assert admin is not None
        async with http.get(f"http://{admin[1]}/metrics") as answer:
            metrics = await answer.text()
        assert 'aerostat_agent_engine_failures_total{instance="default/cpu-0",model="a"} 1.0' in metrics
        assert 'aerostat_agent_leases_total{outcome="void"} 1.0' in metrics
        async with http.get(f"http://{admin[1]}/readyz") as answer:
            assert answer.status == 200
        assert model.call_key not in node.said("agent") + node.said("keeper")
        await _wake_and_delete(node, status["agentAddress"])


async def _wake_and_delete(node: NodeProcesses, agent_address: str) -> None:
    """A sleeping model opens once for all who ask; with its Instance everything goes."""
    async with telemetry_of(agent_address) as telemetry:
        wake = tpb.WakeRequest(namespace="default", model="w", instance="cpu-0", router="r")
        replies = await asyncio.gather(*(telemetry.Wake(wake) for _ in range(5)))
        assert {(r.instance, r.refused) for r in replies} == {("cpu-0", "")}
    await node.until_state("w", "Open")
    pids = [p.pid for p in node.engines.values()]
    assert len(pids) == 2
    assert node.said("keeper").count("started ") == 4  # a twice, w once, and one preparation for both
    (instance,) = await node.cluster.list(Kind.INSTANCE)
    await node.cluster.delete(Kind.INSTANCE, name_of(instance))
    await eventually(lambda: not node.engines, "the engines drained and ended", limit=60)
    await eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "their processes are reaped", limit=60)
    await eventually(lambda: not list((node.run_dir / "e").iterdir()), "nothing of them is left in the run folder", limit=60)


async def test_an_agent_that_waits_for_its_keeper_ends_at_once_when_told_to(tmp_path: Path) -> None:
    async with node_processes(tmp_path) as node:
        asked = asyncio.Event()

        async def never_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            writer.close()

        async with await asyncio.start_unix_server(never_answer, node.run_dir / "keeper.sock") as keeper:
            node.start_agent()
            await asyncio.wait_for(asked.wait(), 60)
            keeper.close()
        (node.run_dir / "keeper.sock").unlink(missing_ok=True)
        assert node.agent is not None
        async with asyncio.timeout(10):  # waiting for a keeper takes longer
            assert await node.end(node.agent) == 0


async def test_an_agent_without_a_keeper_is_alive_and_not_ready_until_one_is_there(tmp_path: Path) -> None:
    admin = f"127.0.0.1:{free_port()}"
    async with node_processes(tmp_path) as node, aiohttp.ClientSession() as http:

        async def answer(path: str) -> tuple[int, str]:
            try:
                async with http.get(f"http://{admin}{path}") as got:
                    return got.status, await got.text()
            except aiohttp.ClientConnectionError:  # it begins, or has just found its keeper
                return 0, ""

        async def until(path: str, status: int, words: str) -> None:
            async with asyncio.timeout(60):
                while True:
                    told = await answer(path)
                    if told[0] == status and words in told[1]:
                        return
                    await asyncio.sleep(0.05)

        node.start_agent("--admin-listen", admin, "--keeper-limit", "inf")
        await until("/readyz", 503, "no keeper answers on")
        assert await answer("/healthz") == (200, "ok\n")
        node.start_keeper()
        await until("/readyz", 200, "ready")
        assert node.keeper is not None
        await node.end(node.keeper, signal.SIGKILL)
        await until("/readyz", 503, "no keeper answers on")
        assert await answer("/healthz") == (200, "ok\n")
