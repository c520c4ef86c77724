"""Calls that wait and calls that are refused, over the whole router: wakes, limits, silent agents, draining."""

import asyncio
from typing import Any

import httpx
import pytest

from aerostat.v1 import telemetry_pb2 as pb
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import name_of
from aerostat_router.policy.wake_owner import wake_order
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.declared import instance_object, model_object
from aerostat_testing.fake_agent import fake_agent, instance_state, model_state
from aerostat_testing.router_rig import CHAT, SMALL, Rig, rig
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu


async def test_calls_to_a_closed_model_wait_over_one_wake() -> None:
    async with rig(n_routers=2) as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.PARKED, epoch=1, open_seconds=0.2)))
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.state.value == "Parked")
        calls = [asyncio.create_task(r.chat(router=i % 2)) for i in range(6)]
        await eventually(lambda: sum(app.dispatcher.n_held for app in r.apps) == 6, "all are held")
        await eventually(lambda: len({w.router for w in r.agent.wakes}) == 2, "both routers asked")
        assert all((w.instance, w.model) == ("a", "small") for w in r.agent.wakes)
        assert len(r.agent.wakes) == 2
        await r.open_everywhere()
        answers = await asyncio.gather(*calls)
        assert [a.status_code for a in answers] == [200] * 6
        assert {a.headers["x-aerostat-route"] for a in answers} == {"wake"}


async def test_a_model_that_does_not_open_in_time_is_503_and_never_404() -> None:
    async with rig(hold_budget="300ms") as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.STARTING, waking=True, open_in_seconds=7)))
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.is_waking)
        answer = await r.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_waking")
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-aerostat-dropped-reason"] == "rejected-ttl-expired"


async def test_a_wake_that_nobody_can_do_says_why() -> None:
    async with rig() as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.ABSENT, epoch=0)))
        r.agent.wake_reply = pb.WakeReply(refused="InsufficientMemory", message="needs 9Gi, has 1Gi")
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.state.value == "Absent")
        answer = await r.chat()
        assert answer.status_code == 503
        assert "needs 9Gi, has 1Gi" in answer.json()["error"]["message"]


async def test_a_wake_owner_s_word_holds_and_the_place_s_own_agent_opens_it() -> None:
    async with rig() as r, fake_agent() as far:
        b = instance_object("b", ["small"], address=far.address)
        await r.cluster.apply(b)
        await r.cluster.patch_status(Kind.INSTANCE, name_of(b), b["status"])
        agents = {"a": r.agent, "b": far}
        for name, agent in agents.items():
            agent.put(instance_state(name, model_state("small", state=pb.PARKED, epoch=0, open_seconds=1.0)))
        await r.known(lambda app: [c.engine.state.value for c in app.fleet.candidates(SMALL)] == ["Parked"] * 2)
        owner, *_ = wake_order(SMALL, [NamespacedName("default", name) for name in agents])
        (other,) = agents.keys() - {owner.name}
        agents[owner.name].wake_reply = pb.WakeReply(instance=other)
        call = asyncio.create_task(r.chat())
        await eventually(lambda: agents[other].wakes, "the other agent is asked to open it")
        assert (agents[other].wakes[0].instance, agents[other].wakes[0].settled) == (other, True)
        assert not agents[owner.name].wakes[0].settled
        agents[other].put(instance_state(other, model_state("small", port=r.engine.port)))
        assert (await call).headers["x-aerostat-instance"] == other


async def test_a_place_that_refuses_is_ruled_out_for_the_next_proposal() -> None:
    async with rig(n_engines=2) as r:
        for name in "ab":
            r.agent.put(instance_state(name, model_state("small", state=pb.PARKED, epoch=0)))
        r.agent.wake_reply = pb.WakeReply(refused="InsufficientMemory", message="full")
        await r.known(lambda app: all(c.engine.state.value == "Parked" for c in app.fleet.candidates(SMALL)))
        assert (await r.chat()).status_code == 503
        assert [(wake.instance, list(wake.ruled_out)) for wake in r.agent.wakes[:2]] == [("a", []), ("b", ["a"])]


async def test_queueing_whole_sessions_and_opens_in_vain_are_measured() -> None:
    async with rig() as r:
        await r.chat(session="s")
        await r.chat(session="s", headers={"x-aerostat-session-final": "true"})
        r.agent.put(instance_state("a", model_state("small", state=pb.PARKED)))
        await r.known(lambda app: not app.fleet.candidates(SMALL)[0].engine.can_serve)
        call = asyncio.create_task(r.chat())
        await eventually(lambda: r.agent.wakes, "a wake is under way")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        def measured(name: str) -> float | None:
            return r.app.metrics.registry.get_sample_value(name, {"model": str(SMALL)})

        assert measured("aerostat_queue_seconds_count") == 2
        assert measured("aerostat_session_completion_seconds_count") == 1
        await eventually(lambda: measured("aerostat_avoidable_opens_total") == 1, "the open was in vain")


async def test_a_model_whose_engine_gave_up_is_refused_at_once_with_the_engines_words() -> None:
    async with rig() as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.FAILED, reason="CrashLoop", message="out of luck")))
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.state.value == "Failed")
        answer = await r.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
        assert "out of luck" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_while_its_call_is_held_is_forgotten() -> None:
    async with rig() as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.PARKED)))
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.state.value == "Parked")
        call = asyncio.create_task(r.chat())
        await eventually(lambda: r.app.dispatcher.n_held == 1, "the call is held")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: r.app.dispatcher.n_held == 0, "nobody waits")


async def test_a_silent_agent_s_instance_takes_only_a_return_with_a_lease_that_its_engine_confirms() -> None:
    async with rig(lease_ttl="30s", hold_budget="300ms") as r:
        await r.chat(session="s")
        await eventually(lambda: r.agent.sessions, "the lease is published")
        r.agent.is_silent = True
        await eventually(lambda: not r.app.fleet.is_fresh(r.agent.address, SystemClock().monotonic()), "the instance is stale")
        fresh = await r.chat(session="other")
        assert fresh.status_code == 503
        returning = await r.chat(session="s")
        assert returning.headers["x-aerostat-route"] == "lease"
        r.engine.is_healthy = False
        refused = await r.chat(session="s")
        assert refused.status_code == 503
        assert r.app.fleet.leases.counts["discarded", "unhealthy"] == 1


async def test_a_gap_in_the_versions_makes_a_new_subscription() -> None:
    async with rig() as r:
        assert r.agent.n_subscriptions == 1
        r.agent.skip_a_version()
        r.agent.say()
        await eventually(lambda: r.agent.n_subscriptions == 2, "subscribed again")
        assert (await r.chat()).status_code == 200


async def test_a_new_agent_epoch_voids_the_leases_of_the_old_one() -> None:
    async with rig(lease_ttl="30s") as r:
        await r.chat(session="s")
        await eventually(lambda: r.agent.sessions, "the lease is published")
        r.agent.restart()
        await eventually(lambda: r.agent.n_subscriptions == 2, "subscribed again")
        await r.known(lambda app: [epoch for _, epoch, _ in app.fleet.agents()] == [2])
        assert r.app.fleet.leases.n_live(SMALL) == 0
        assert (await r.chat(session="s")).headers["x-aerostat-route"] != "lease"


async def test_a_new_engine_epoch_voids_leases_and_kv() -> None:
    async with rig(lease_ttl="30s") as r:
        await r.chat(session="s")
        await r.open_everywhere(epoch=2)
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.epoch == 2)
        assert (await r.chat(session="s")).headers["x-aerostat-route"] == "residency"
        assert r.app.fleet.leases.counts["discarded", "epoch"] == 1


async def test_a_model_over_its_limit_rejects_or_spills_as_its_policy_says() -> None:
    full: dict[str, Any] = {"max_running": 1, "running": 1, "queue_seconds": 60.0}
    async with rig(overload={"policy": "Reject"}) as r:
        await r.open_everywhere(**full)
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.max_running == 1)
        answer = await r.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "saturated")
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    async with rig(overload={"policy": "Spill", "spillTo": "other"}) as r:
        await r.cluster.apply(model_object("other"))
        states = [model_state("small", port=r.engine.port, **full), model_state("other", port=r.engine.port)]
        r.agent.put(instance_state("a", *states))
        await r.known(lambda app: app.fleet.candidates(NamespacedName("default", "other")))
        answer = await r.chat()
        assert answer.headers["x-aerostat-route"] == "spill"
        assert r.engine.got[0].body["model"] == "other"


async def test_held_calls_go_as_soon_as_a_running_one_ends() -> None:
    async with rig() as r:
        await r.open_everywhere(max_running=1, queue_seconds=60)
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.max_running == 1)
        r.engine.gate.clear()
        first = asyncio.create_task(r.chat(max_tokens=1))
        await eventually(lambda: r.engine.got, "the first runs")
        second = asyncio.create_task(r.chat(max_tokens=1))
        await eventually(lambda: r.app.dispatcher.n_held == 1, "the second waits")
        r.engine.gate.set()
        assert [(await first).status_code, (await second).status_code] == [200, 200]


async def test_draining_finishes_streams_and_refuses_what_comes() -> None:
    async with rig() as r:
        r.engine.mid_gate.clear()
        async with r.clients[0].stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(r.app.stop(5))
            await eventually(lambda: r.app.http.is_draining, "the drain has begun")
            with pytest.raises(httpx.ConnectError):
                await httpx.AsyncClient().post(f"http://127.0.0.1:{r.app.http_port}/v1/chat/completions", json=CHAT)
            r.engine.mid_gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await stopping == 0


async def test_an_engine_s_refusal_keeps_its_status_and_words_in_our_shape() -> None:
    async with rig() as r:
        r.engine.statuses = [400]
        r.engine.refusal = {"object": "error", "message": "The input is longer than the model's context length", "type": "BadRequestError"}
        answer = await r.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def not_placed(r: Rig, model: NamespacedName, reason: str, message: str) -> None:
    condition = {
        "type": "Scheduled",
        "status": "False",
        "reason": reason,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    await r.cluster.patch_status(Kind.MODEL, model, {"conditions": [condition]})


async def test_a_declared_model_that_the_operator_cannot_place_says_so() -> None:
    async with rig() as r:
        await r.cluster.apply(model_object("huge"))
        await not_placed(r, NamespacedName("default", "huge"), "TooLarge", "9Gi asked, 1Gi there")
        await r.known(lambda app: (model := app.catalog.model("huge")) and app.catalog.why_unplaced(model))
        answer = await r.chat(model="huge")
        assert answer.status_code == 503
        assert "TooLarge: 9Gi asked, 1Gi there" in answer.json()["error"]["message"]


async def test_a_call_that_waited_for_a_model_that_is_taken_away_is_told_why_and_not_that_it_wakes() -> None:
    async with rig(hold_budget="200ms") as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.DRAINING)))
        await not_placed(r, SMALL, "NoInstances", "no instance accepts models")
        await r.known(lambda app: (model := app.catalog.model("small")) and app.catalog.why_unplaced(model))
        answer = await r.chat()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_capacity"
        assert "no instance accepts models" in answer.json()["error"]["message"]


async def test_a_call_whose_only_node_is_cordoned_is_told_so_at_once_and_not_held_for_an_opening() -> None:
    async with rig(hold_budget="20s") as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.ABSENT, epoch=0), draining=True))
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.is_draining)
        held = asyncio.create_task(r.chat())
        await eventually(lambda: r.apps[0].dispatcher.n_held == 1, "it is held until the operator has judged")
        await not_placed(r, SMALL, "NoInstances", "no instance accepts models")
        async with asyncio.timeout(10):
            for answer in (await held, await r.chat()):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
                assert "NoInstances: no instance accepts models" in answer.json()["error"]["message"]


async def test_demand_is_reported_to_the_agents() -> None:
    async with rig() as r:
        await r.chat()
        await eventually(lambda: "r0" in r.agent.demand and r.agent.demand["r0"].demand, "demand is reported")
        assert r.agent.demand["r0"].demand[0].arrivals == 1
