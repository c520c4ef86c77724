"""The whole router over real sockets: a fake agent's telemetry, a scripted engine behind the real data path, plain HTTP clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from aerostat.v1 import telemetry_pb2 as pb
from aerostat.v1.agent_pb2 import PrefixHandle
from aerostat_core.ids import NamespacedName
from aerostat_core.prefix_hash import session_key
from aerostat_core.resources import name_of
from aerostat_router.app import RouterApp, running_router
from aerostat_router.policy.wake_owner import wake_order
from aerostat_router.settings import parse_settings
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.declared import instance_object, model_object, slo_object
from aerostat_testing.fake_agent import FakeAgent, fake_agent, instance_state, model_state
from aerostat_testing.memory_cluster import MemoryCluster
from aerostat_testing.scripted_engine import ScriptedEngine, scripted_engine
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

SMALL = NamespacedName("default", "small")
CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
KEY = session_key(tenant="default", session_id="s")


@dataclass
class Rig:
    apps: list[RouterApp]
    agent: FakeAgent
    engines: list[ScriptedEngine]  # of the instances a, b, ...
    cluster: MemoryCluster
    clients: list[httpx.AsyncClient]  # one per router

    @property
    def app(self) -> RouterApp:
        return self.apps[0]

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    async def chat(
        self, *, session: str | None = None, router: int = 0, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        ours = {} if session is None else {"x-aerostat-session-id": session}
        return await self.clients[router].post("/v1/chat/completions", json=CHAT | body, headers=ours | (headers or {}))

    async def open_everywhere(self, **figures: Any) -> None:
        """All instances have the model open, and every router knows."""
        for name, engine in zip("ab", self.engines, strict=False):
            self.agent.put(instance_state(name, model_state("small", port=engine.port, **figures)))
        await self.known(lambda app: all(c.engine.can_serve for c in app.fleet.candidates(SMALL)))

    async def known(self, what: Any) -> None:
        for app in self.apps:
            await eventually(lambda app=app: what(app), "the router knows")  # type: ignore[misc]

    async def settle(self) -> None:
        for app in self.apps:
            await eventually(lambda app=app: app.dispatcher.n_active == 0, "no call left")  # type: ignore[misc]
            app.dispatcher.check_integrity()


@asynccontextmanager
async def rig(*, n_engines: int = 1, n_routers: int = 1, hold_budget: str = "5s", lease_ttl: str = "5s", **spec: Any) -> AsyncIterator[Rig]:
    """Routers, instances `a` (and `b`) on one agent with the model open, and a client per router."""
    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(fake_agent())
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(n_engines)]
        instances = [instance_object(name, ["small"], address=agent.address, lease_ttl=lease_ttl) for name in "ab"[:n_engines]]
        cluster = MemoryCluster(model_object("small", slo="fast", **spec), slo_object("fast", hold_budget=hold_budget), *instances)
        for name, engine in zip("ab", engines, strict=False):
            agent.put(instance_state(name, model_state("small", port=engine.port)))
        apps, clients = [], []
        for i in range(n_routers):
            settings = parse_settings(["--cluster", "folder:unused", "--listen", "127.0.0.1:0", "--name", f"r{i}"])
            app = await stack.enter_async_context(running_router(settings, cluster, SystemClock()))
            apps.append(app)
            url = f"http://127.0.0.1:{app.http_port}"
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10)))
        r = Rig(apps, agent, engines, cluster, clients)
        await r.known(lambda app: len(app.fleet.candidates(SMALL)) == n_engines)
        yield r
        await r.settle()


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


async def test_a_declared_model_that_the_operator_cannot_place_says_so() -> None:
    async with rig() as r:
        await r.cluster.apply(model_object("huge"))
        condition = {
            "type": "Scheduled",
            "status": "False",
            "reason": "TooLarge",
            "message": "9Gi asked, 1Gi there",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        await r.cluster.patch_status(Kind.MODEL, NamespacedName("default", "huge"), {"conditions": [condition]})
        await r.known(lambda app: (model := app.catalog.model("huge")) and app.catalog.why_unplaced(model))
        answer = await r.chat(model="huge")
        assert answer.status_code == 503
        assert "TooLarge: 9Gi asked, 1Gi there" in answer.json()["error"]["message"]


async def test_a_call_whose_only_node_is_cordoned_is_told_so_at_once_and_not_held_for_an_opening() -> None:
    async with rig(hold_budget="20s") as r:
        r.agent.put(instance_state("a", model_state("small", state=pb.ABSENT, epoch=0), draining=True))
        await r.known(lambda app: app.fleet.candidates(SMALL)[0].engine.is_draining)
        held = asyncio.create_task(r.chat())
        await eventually(lambda: r.apps[0].dispatcher.n_held == 1, "it is held until the operator has judged")
        condition = {
            "type": "Scheduled",
            "status": "False",
            "reason": "NoInstances",
            "message": "no instance accepts models",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        await r.cluster.patch_status(Kind.MODEL, SMALL, {"conditions": [condition]})
        async with asyncio.timeout(10):
            for answer in (await held, await r.chat()):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
                assert "NoInstances: no instance accepts models" in answer.json()["error"]["message"]


async def test_demand_is_reported_to_the_agents() -> None:
    async with rig() as r:
        await r.chat()
        await eventually(lambda: "r0" in r.agent.demand and r.agent.demand["r0"].demand, "demand is reported")
        assert r.agent.demand["r0"].demand[0].arrivals == 1
