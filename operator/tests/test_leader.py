"""The Lease over an API that is slow, away or answers somebody else, in virtual time; and what is fenced by it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from aerostat_core.errors import AerostatError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import API_VERSION, Resource
from aerostat_operator.leader import Elector, Fenced, NotLeadingError
from aerostat_operator.policy.leadership import Timing
from aerostat_runtime.cluster.kubernetes_connection import Request
from aerostat_runtime.cluster.kubernetes_errors import AlreadyExistsError, NotFoundError, UnreachableError
from aerostat_runtime.cluster.port import Kind
from aerostat_testing.memory_cluster import MemoryCluster

pytestmark = [pytest.mark.cpu, pytest.mark.looptime]
TIMING = Timing(duration=15.0, hold=10.0, retry=2.0)
DEADLINE: Seconds = 600.0  # virtual
LEASE = NamespacedName("aerostat", "operator")
MODEL = {
    "apiVersion": API_VERSION,
    "kind": "Model",
    "metadata": {"name": "m", "namespace": "default"},
    "spec": {"source": {"uri": "pypi://m@1"}, "pool": "p"},
}


class LoopClock:
    def monotonic(self) -> Seconds:
        return asyncio.get_running_loop().time()

    def wall(self) -> Seconds:
        return 1_800_000_000.0 + asyncio.get_running_loop().time()


class LeaseApi:
    """One Lease, kept as a server keeps it: a write of an old version is a conflict."""

    def __init__(self) -> None:
        self.stored: Resource | None = None
        self.version = 0
        self.is_away = False
        self.delay: Seconds = 0.0
        self.n_calls = 0

    async def call(self, request: Request, *, at_once: tuple[type[AerostatError], ...] = ()) -> Resource:
        return await self.once(request)

    def stream(self, request: Request) -> AsyncGenerator[Resource, None]:
        raise AssertionError("a lease is not watched")

    async def once(self, request: Request) -> Resource:
        self.n_calls += 1
        await asyncio.sleep(self.delay)
        if self.is_away:
            raise UnreachableError("no answer")
        if request.method == "GET":
            if self.stored is None:
                raise NotFoundError("no such lease")
            return self.stored
        if request.method == "POST":
            if self.stored is not None:
                raise AlreadyExistsError("it is there")
        elif self.stored is None or request.body["metadata"]["resourceVersion"] != self.stored["metadata"]["resourceVersion"]:
            raise TemporaryError("Conflict", "the object has been modified", retry_after=1.0)
        self.version += 1
        self.stored = {**request.body, "metadata": {**request.body["metadata"], "resourceVersion": str(self.version)}}
        return self.stored

    @property
    def holder(self) -> str:
        return str(self.stored["spec"]["holderIdentity"]) if self.stored is not None else ""


def elector(api: LeaseApi, identity: str) -> Elector:
    return Elector(api, LoopClock(), lease=LEASE, identity=identity, timing=TIMING)


@asynccontextmanager
async def running(*electors: Elector) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(e.run()) for e in electors]
    try:
        async with asyncio.timeout(DEADLINE):
            yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_first_one_gets_the_lease_and_keeps_it() -> None:
    api = LeaseApi()
    a, b = elector(api, "a"), elector(api, "b")
    async with running(a):
        await a.elected()
        async with running(b):
            for _ in range(100):
                await asyncio.sleep(1.0)
                assert a.remaining() > 0
                assert not b.remaining()
    assert api.holder == "a"


async def test_the_next_one_takes_over_after_the_duration_when_the_holder_is_killed() -> None:
    api = LeaseApi()
    a, b = elector(api, "a"), elector(api, "b")
    async with AsyncExitStack() as stack:
        async with running(a):
            await a.elected()
            await stack.enter_async_context(running(b))
            await asyncio.sleep(20.0)
        died_at = asyncio.get_running_loop().time()
        await b.elected()
        assert TIMING.duration - TIMING.retry <= asyncio.get_running_loop().time() - died_at <= TIMING.duration + TIMING.retry
        assert not a.remaining()


async def test_a_lease_that_is_given_back_is_taken_at_the_next_look() -> None:
    api = LeaseApi()
    a, b = elector(api, "a"), elector(api, "b")
    async with AsyncExitStack() as stack:
        async with running(a):
            await a.elected()
            await stack.enter_async_context(running(b))
            await asyncio.sleep(5.0)
        await a.release()
        assert not a.remaining()
        released_at = asyncio.get_running_loop().time()
        await b.elected()
        assert asyncio.get_running_loop().time() - released_at <= TIMING.retry
        await a.release()  # what is not ours is not given back
        assert api.holder == "b"


async def test_without_a_server_the_lease_is_lost_in_time_and_its_return_is_told() -> None:
    api = LeaseApi()
    a = elector(api, "a")
    async with running(a):
        await a.elected()
        api.is_away = True
        away_at = asyncio.get_running_loop().time()
        await a.lost()
        assert asyncio.get_running_loop().time() - away_at <= TIMING.hold
        assert not a.returned.is_set()
        api.is_away = False
        await a.elected()
        assert a.returned.is_set()


async def test_a_server_that_accepts_and_never_answers_does_not_prolong_it() -> None:
    api = LeaseApi()
    a = elector(api, "a")
    async with running(a):
        await a.elected()
        api.delay = 1000.0
        hung_at = asyncio.get_running_loop().time()
        await a.lost()
        assert asyncio.get_running_loop().time() - hung_at <= TIMING.hold


async def test_a_lease_that_somebody_deleted_is_made_again() -> None:
    api = LeaseApi()
    a = elector(api, "a")
    async with running(a):
        await a.elected()
        api.stored = None
        await asyncio.sleep(3 * TIMING.retry)
        assert api.holder == "a"
        assert a.remaining() > 0


async def test_a_lease_that_another_one_took_by_force_ends_ours_at_the_next_question() -> None:
    api = LeaseApi()
    a = elector(api, "a")
    async with running(a):
        await a.elected()
        await asyncio.sleep(1.0)
        assert api.stored is not None
        spec = {**api.stored["spec"], "holderIdentity": "b"}
        api.version += 1
        api.stored = {**api.stored, "metadata": {**api.stored["metadata"], "resourceVersion": str(api.version)}, "spec": spec}
        await a.lost()
        assert asyncio.get_running_loop().time() <= 2 * TIMING.retry


class SlowCluster(MemoryCluster):
    """Each write takes `delay` before it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.delay: Seconds = 0.0

    async def apply(self, resource: Resource) -> Resource:
        await asyncio.sleep(self.delay)
        return await super().apply(resource)


async def test_writes_need_the_lease_and_one_under_way_ends_with_it() -> None:
    api, cluster = LeaseApi(), SlowCluster()
    a = elector(api, "a")
    fenced = Fenced(cluster, a)
    with pytest.raises(NotLeadingError):
        await fenced.apply(MODEL)
    async with running(a):
        await a.elected()
        made = await fenced.apply(MODEL)
        assert await cluster.list(Kind.MODEL) == [made]
        api.is_away = True
        cluster.delay = 1000.0
        began = asyncio.get_running_loop().time()
        with pytest.raises(NotLeadingError):
            await fenced.apply({**MODEL, "spec": {"source": {"uri": "pypi://m@2"}, "pool": "p"}})
        assert asyncio.get_running_loop().time() - began <= TIMING.hold
        for write in (
            fenced.patch_status(Kind.MODEL, NamespacedName("default", "m"), {}),
            fenced.delete(Kind.MODEL, NamespacedName("default", "m")),
        ):
            with pytest.raises(NotLeadingError):
                await write
    assert await cluster.list(Kind.MODEL) == [made], "nothing was written without the lease"
