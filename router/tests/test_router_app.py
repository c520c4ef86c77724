"""Sessions, engines that fail and clients that leave, over the whole router."""

import asyncio
import json

import pytest

from aerostat.v1 import telemetry_pb2 as pb
from aerostat.v1.agent_pb2 import PrefixHandle
from aerostat_core.ids import NamespacedName
from aerostat_testing.fake_agent import instance_state, model_state
from aerostat_testing.router_rig import CHAT, KEY, SMALL, rig
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu


async def test_the_second_turn_of_a_session_consumes_the_lease_of_the_first() -> None:
    async with rig(n_engines=2) as r:
        first = await r.chat(session="s")
        assert first.status_code == 200, first.text
        assert first.headers["x-aerostat-route"] == "residency"
        await eventually(lambda: r.agent.installed, "the agent has the lease")
        second = await r.chat(session="s")
        assert second.headers["x-aerostat-route"] == "lease"
        assert second.headers["x-aerostat-instance"] == first.headers["x-aerostat-instance"]
        await eventually(lambda: r.agent.consumed, "the agent knows that the lease is spent")
        assert r.agent.consumed[0][0].lease_id == r.agent.installed[0].lease_id
        assert r.app.fleet.leases.counts["consumed", ""] == 1


async def test_another_router_honours_the_lease_of_the_one_that_saw_the_completion() -> None:
    async with rig(n_engines=2, n_routers=2) as r:
        first = await r.chat(session="s", router=0)
        await eventually(lambda: r.apps[1].fleet.leases.n_live(SMALL), "telemetry told the other router")
        second = await r.chat(session="s", router=1)
        assert second.headers["x-aerostat-route"] == "lease"
        assert second.headers["x-aerostat-instance"] == first.headers["x-aerostat-instance"]
        await eventually(lambda: r.agent.consumed and r.agent.consumed[0][1], "the agent deleted it")


async def test_two_routers_infer_the_same_session_without_an_id() -> None:
    async with rig(n_engines=2, n_routers=2) as r:
        first = await r.chat(router=0)
        await eventually(lambda: r.apps[1].fleet.leases.n_live(SMALL), "telemetry told the other router")
        answer = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
        turns = [*CHAT["messages"], answer, {"role": "user", "content": "And?"}]
        second = await r.chat(router=1, messages=turns)
        assert second.headers["x-aerostat-route"] == "lease"
        keys = [got.headers["x-smg-routing-key"] for engine in r.engines for got in engine.got]
        assert len(set(keys)) == 1


async def test_a_session_without_a_lease_goes_where_its_kv_is() -> None:
    async with rig(n_engines=2, lease_ttl="0s") as r:
        handle = PrefixHandle(engine_epoch=1, prefix_hash=b"x", n_tokens=16)
        r.agent.put_session(
            pb.SessionState(session=KEY, namespace="default", instance="b", model="small", tier=pb.DEVICE, handle=handle, turns=1)
        )
        await r.known(lambda app: app.fleet.knows(KEY))
        answer = await r.chat(session="s", messages=[{"role": "user", "content": "word " * 100}])
        assert (answer.headers["x-aerostat-instance"], answer.headers["x-aerostat-route"]) == ("b", "kv")
        assert not r.agent.installed


async def test_the_last_call_of_a_session_leaves_no_lease() -> None:
    async with rig() as r:
        await r.chat(session="s", headers={"x-aerostat-session-final": "true"})
        await r.settle()
        assert r.app.fleet.leases.counts["installed", ""] == 0


async def test_the_engine_sees_its_own_key_and_the_hashed_session_and_nothing_of_the_clients_credentials() -> None:
    async with rig() as r:
        headers = {
            "authorization": "Bearer secret",
            "x-api-key": "other",
            "x-smg-routing-key": "mine",
            "x-request-id": "id-1",
            "cookie": "c",
        }
        answer = await r.chat(headers=headers)
        assert answer.headers["x-request-id"] == "id-1"
        got = r.engine.got[0].headers
        assert got["authorization"] == "Bearer call-key"
        assert got["x-request-id"] == "id-1"
        assert len(got["x-smg-routing-key"]) == 32
        assert "mine" not in got["x-smg-routing-key"]
        assert not {"x-api-key", "cookie", "x-aerostat-session-id"} & got.keys()


async def test_bodies_pass_unchanged_and_streams_without_a_wish_for_usage_show_none() -> None:
    async with rig() as r:
        async with r.clients[0].stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "odd": [1.50]}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert all("usage" not in json.loads(line[6:]) for line in lines[:-1])
        assert r.engine.got[0].body == CHAT | {"stream": True, "odd": [1.5]}


async def test_a_call_moves_to_another_engine_before_its_first_byte_and_back_when_that_one_lives_on() -> None:
    async with rig(n_engines=2) as r:
        r.engines[0].cuts_before_answer = r.engines[1].cuts_before_answer = 1
        answer = await r.chat()
        assert answer.status_code == 200
        assert sorted(len(engine.got) for engine in r.engines) == [1, 2]


async def test_a_call_that_fails_everywhere_is_told_so_after_three_tries() -> None:
    async with rig(n_engines=2) as r:
        r.engines[0].cuts_before_answer = r.engines[1].cuts_before_answer = 9
        answer = await r.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_disconnected")
        assert sum(len(engine.got) for engine in r.engines) == 3


async def test_a_dead_engine_is_left_for_the_next_and_its_call_succeeds() -> None:
    async with rig(n_engines=2) as r:
        r.agent.put(instance_state("a", model_state("small", port=1)))  # nobody listens there
        await r.known(lambda app: any(c.engine.port == 1 for c in app.fleet.candidates(SMALL)))
        answer = await r.chat()
        assert answer.status_code == 200
        assert answer.headers["x-aerostat-instance"] == "b"


async def test_a_stream_that_breaks_is_never_sent_again_and_ends_with_an_error_event() -> None:
    async with rig(n_engines=2) as r:
        for engine in r.engines:
            engine.cuts_mid_stream = 1
        async with r.clients[0].stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "upstream_disconnected"
        assert "data: [DONE]" not in lines
        assert len(r.engines[0].got) + len(r.engines[1].got) == 1


async def test_a_call_waits_for_a_new_run_of_the_engine_that_just_failed_it() -> None:
    async with rig() as r:
        r.engine.cuts_before_answer = 1
        call = asyncio.create_task(r.chat())
        await eventually(lambda: r.app.dispatcher.n_held, "the call is held")
        await r.open_everywhere(epoch=2)
        assert (await call).status_code == 200


async def test_a_client_that_leaves_in_mid_stream_aborts_the_engine_and_frees_every_counter() -> None:
    async with rig() as r:
        r.engine.mid_gate.clear()
        async with r.clients[0].stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            await anext(answer.aiter_lines())
            assert r.app.dispatcher.n_active == 1
        await eventually(lambda: r.engine.n_aborted == 1 and not r.engine.n_running, "the engine's call is aborted")
        await r.settle()
        assert r.app.fleet.n_in_flight((NamespacedName("default", "a"), SMALL)) == 0
        r.engine.mid_gate.set()
