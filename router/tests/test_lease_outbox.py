"""What an agent is told of leases: in batches, in order, nothing in vain, and never waited for. Virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerostat_core.ids import Epoch, LeaseId, NamespacedName, Seconds, SessionKey
from aerostat_router.background import Background
from aerostat_router.lease_outbox import COALESCE, MAX_WAITING, LeaseOutbox
from aerostat_router.policy.views import LeaseView
from aerostat_router.telemetry_client import AgentUnreachableError
from aerostat_testing.agent_fakes import LoopClock

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]

LATENCY = 0.02
PLACE = NamespacedName("default", "a")


class Agent:
    """Keeps leases by the rules of the protocol: what is consumed first, then what is installed."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.messages: list[tuple[list[str], list[str]]] = []
        self.left: list[Seconds] = []
        self.refuses: set[str] = set()
        self.refused: list[tuple[str, str]] = []
        self.is_away = False
        self.n_asking = 0

    async def tell(self, consumed: list[LeaseView], installed: list[tuple[LeaseView, Seconds]]) -> dict[LeaseId, str]:
        assert not self.n_asking, "messages to one agent overlap"
        self.n_asking += 1
        await asyncio.sleep(LATENCY)
        self.n_asking -= 1
        if self.is_away:
            raise AgentUnreachableError("agent", "gone")
        self.messages.append(([lease.id for lease in consumed], [lease.id for lease, _ in installed]))
        self.live -= {lease.id for lease in consumed}
        self.live |= {lease.id for lease, _ in installed if lease.id not in self.refuses}
        self.left += [left for _, left in installed]
        return {lease.id: "NoAdmissionUnit" for lease, _ in installed if lease.id in self.refuses}


@asynccontextmanager
async def outbox() -> AsyncIterator[tuple[LeaseOutbox, Agent, Callable[[str], LeaseView]]]:
    agent, background, clock = Agent(), Background(), LoopClock()
    box = LeaseOutbox(agent.tell, lambda lease, why: agent.refused.append((lease.id, why)), clock, background)

    def lease(name: str) -> LeaseView:
        expires_at = clock.monotonic() + 1.0
        return LeaseView(id=LeaseId(name), session=SessionKey(name), model=PLACE, instance=PLACE, epoch=Epoch(1), expires_at=expires_at)

    yield box, agent, lease
    await asyncio.sleep(1.0)
    assert not len(box)
    assert not len(background)


async def test_what_happens_within_some_milliseconds_or_while_a_message_is_under_way_is_one_message() -> None:
    async with outbox() as (box, agent, lease):
        for name in "abc":
            box.install(lease(name))
        await asyncio.sleep(2 * COALESCE)
        for name in "de":
            box.install(lease(name))
        box.consume(lease("a"))
        await asyncio.sleep(1.0)
        assert agent.messages == [([], ["a", "b", "c"]), (["a"], ["d", "e"])]


async def test_a_lease_that_is_spent_before_it_is_told_is_never_told() -> None:
    async with outbox() as (box, agent, lease):
        box.install(lease("a"))
        box.consume(lease("a"))
        await asyncio.sleep(1.0)
        assert agent.messages == []


async def test_a_lease_is_told_with_the_time_that_it_has_left_and_not_at_all_once_it_expired() -> None:
    async with outbox() as (box, agent, lease):
        box.install(lease("a"))
        await asyncio.sleep(2 * COALESCE)
        box.install(lease("b"))
        await asyncio.sleep(1.0)
        assert agent.left == pytest.approx([1.0 - COALESCE, 1.0 - LATENCY], abs=1e-6)
        late = lease("c")
        await asyncio.sleep(1.0)
        box.install(late)
        await asyncio.sleep(1.0)
        assert agent.live == {"a", "b"}


async def test_refusals_are_heard_by_lease() -> None:
    async with outbox() as (box, agent, lease):
        agent.refuses = {"b"}
        for name in "abc":
            box.install(lease(name))
        await asyncio.sleep(1.0)
        assert agent.refused == [("b", "NoAdmissionUnit")]


async def test_an_agent_that_is_away_is_not_told_later_and_what_waits_for_it_is_bounded() -> None:
    async with outbox() as (box, agent, lease):
        agent.is_away = True
        box.install(lease("lost"))
        await asyncio.sleep(COALESCE + LATENCY / 2)
        for i in range(2 * MAX_WAITING):
            box.install(lease(f"i{i}"))
            box.consume(lease(f"c{i}"))
        assert len(box) == 2 * MAX_WAITING
        await asyncio.sleep(LATENCY)
        agent.is_away = False
        await asyncio.sleep(1.0)
        assert agent.refused == []
        assert len(agent.messages) == 1
        assert "lost" not in agent.live


STEPS = st.lists(st.tuples(st.sampled_from(["install", "consume"]), st.integers(0, 5), st.sampled_from([0.0, 0.003, 0.03])), max_size=40)


@given(STEPS)
@settings(max_examples=60, deadline=None)
@pytest.mark.looptime(False)
def test_in_the_end_the_agent_has_what_was_installed_and_not_spent(steps: list[tuple[str, int, float]]) -> None:
    async def run() -> None:
        async with outbox() as (box, agent, lease):
            made: list[LeaseView] = []
            live: set[str] = set()
            for what, n, pause in steps:
                if what == "install":
                    made.append(lease(f"l{len(made)}"))
                    live.add(made[-1].id)
                    box.install(made[-1])
                elif made:
                    spent = made[n % len(made)]
                    if spent.id in live:
                        live.discard(spent.id)
                        box.consume(spent)
                await asyncio.sleep(pause)
            await asyncio.sleep(0.2)
            assert agent.live == live

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(run())
