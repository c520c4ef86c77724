"""The watch of the Kubernetes adapter over an API that fails in every way that a real one can, in virtual time."""

import asyncio
import copy
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerostat_core.errors import AerostatError, PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource, name_of
from aerostat_runtime.cluster import kubernetes_watch
from aerostat_runtime.cluster.kubernetes_connection import Request
from aerostat_runtime.cluster.kubernetes_errors import ExpiredError, RefusedError, UnreachableError
from aerostat_runtime.cluster.kubernetes_watch import Mirror, Watch, list_all
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent

pytestmark = pytest.mark.cpu

DEADLINE = 600.0  # virtual


@dataclass
class FakeApi:
    """A server of SLOs: pages, versions, a log that can be compacted, streams that can be cut; each failure on demand."""

    objects: dict[str, Resource] = field(default_factory=dict)
    log: list[tuple[int, Resource]] = field(default_factory=list)
    version: int = 1
    oldest: int = 0
    failure: AerostatError | None = None
    page_failures: list[AerostatError] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    _cuts: list[asyncio.Future[AerostatError | None]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _uids: "itertools.count[int]" = field(default_factory=itertools.count)

    def put(self, name: str, **spec: Any) -> None:
        self.version += 1
        old = self.objects.get(name)
        uid = old["metadata"]["uid"] if old else f"uid-{next(self._uids)}"
        metadata = {"name": name, "namespace": "default", "uid": uid, "resourceVersion": str(self.version), "managedFields": [{"m": 1}]}
        self.objects[name] = {"metadata": metadata, "spec": spec}
        self._tell("MODIFIED" if old else "ADDED", self.objects[name])

    def remove(self, name: str) -> None:
        if name in self.objects:
            self.version += 1
            gone = copy.deepcopy(self.objects.pop(name))
            gone["metadata"]["resourceVersion"] = str(self.version)
            self._tell("DELETED", gone)

    def bookmark(self) -> None:
        self.version += 1
        self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def compact(self) -> None:
        self.oldest = self.version

    def cut(self, failure: AerostatError | None = None) -> None:
        """End the streams that run: as the server does in time, or in a failure."""
        cuts, self._cuts = self._cuts, []
        for end in cuts:
            if not end.done():
                end.set_result(failure)

    def complain(self, code: int) -> None:
        """An error as an event of the stream."""
        self.version += 1
        self._tell("ERROR", {"code": code, "message": "said so", "reason": "Because"})

    async def call(self, request: Request, *, at_once: tuple[type[AerostatError], ...] = ()) -> Resource:
        return await self.once(request)

    async def once(self, request: Request) -> Resource:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        first = int(request.query.get("continue", "0"))
        if first and self.page_failures:
            raise self.page_failures.pop()
        limit = int(request.query["limit"])
        items = sorted(self.objects.values(), key=name_of, reverse=True)
        more = str(first + limit) if len(items) > first + limit else ""
        metadata = {"resourceVersion": str(self.version), "continue": more}
        return {"items": copy.deepcopy(items[first : first + limit]), "metadata": metadata}

    async def stream(self, request: Request) -> AsyncGenerator[Resource, None]:
        self.requests.append(request)
        seen = int(request.query["resourceVersion"])
        if self.failure is not None:
            raise self.failure
        if seen < self.oldest:
            raise ExpiredError("too old resource version")
        end: asyncio.Future[AerostatError | None] = asyncio.get_running_loop().create_future()
        self._cuts.append(end)
        while not end.done():
            for version, told in [entry for entry in self.log if entry[0] > seen]:
                seen = version
                yield copy.deepcopy(told)
            self._changed.clear()
            news: asyncio.Future[Any] = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([news, end], return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
        if (failure := end.result()) is not None:
            raise failure

    def _tell(self, change: str, resource: Resource) -> None:
        self.log.append((self.version, {"type": change, "object": copy.deepcopy(resource)}))
        self._changed.set()


class Follower:
    """Reads a watch, and checks each event against those before it."""

    def __init__(self, api: FakeApi) -> None:
        self.events: list[WatchEvent] = []
        self.present: dict[str, Resource] = {}
        self.task = asyncio.create_task(self._follow(Watch(api, Kind.SLO, None)))

    async def _follow(self, watch: Watch) -> None:
        async with aclosing(watch.events()) as events:
            async for event in events:
                self.events.append(event)
                self._account(event)

    def _account(self, event: WatchEvent) -> None:
        if event.resource is None:
            assert [e.change for e in self.events].count(Change.SYNCED) == 1
            return
        name, uid = event.resource["metadata"]["name"], event.resource["metadata"]["uid"]
        before = self.present.get(name)
        if event.change is Change.ADDED:
            assert before is None
        else:
            assert before is not None
            assert before["metadata"]["uid"] == uid
        if event.change is Change.DELETED:
            del self.present[name]
        else:
            assert "managedFields" not in event.resource["metadata"]
            self.present[name] = event.resource

    def knows_all_of(self, api: FakeApi) -> bool:
        return {n: r["metadata"]["resourceVersion"] for n, r in self.present.items()} == {
            n: r["metadata"]["resourceVersion"] for n, r in api.objects.items()
        }

    async def catch_up(self, api: FakeApi) -> None:
        async with asyncio.timeout(DEADLINE):
            while not (self.is_synced and self.knows_all_of(api)):
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.05)

    @property
    def is_synced(self) -> bool:
        return any(event.change is Change.SYNCED for event in self.events)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    def changes(self) -> list[tuple[Change, str]]:
        return [(e.change, e.resource["metadata"]["name"] if e.resource else "") for e in self.events]


def watched_versions(api: FakeApi) -> list[str]:
    return [request.query["resourceVersion"] for request in api.requests if "watch" in request.query]


def n_lists(api: FakeApi) -> int:
    return sum("watch" not in request.query for request in api.requests)


@pytest.mark.looptime
async def test_a_stream_that_ends_is_resumed_from_the_last_version() -> None:
    api = FakeApi()
    api.put("a")
    follower = Follower(api)
    await follower.catch_up(api)
    api.put("b")
    api.bookmark()
    bookmarked = api.version
    await asyncio.sleep(1)
    api.cut()
    await asyncio.sleep(1)
    api.remove("a")
    await follower.catch_up(api)
    await follower.stop()
    assert n_lists(api) == 1, "nothing is listed again"
    assert watched_versions(api)[1] == str(bookmarked)
    assert follower.changes() == [(Change.ADDED, "a"), (Change.SYNCED, ""), (Change.ADDED, "b"), (Change.DELETED, "a")]


@pytest.mark.looptime
@pytest.mark.parametrize("how", ["at the request", "in the stream"])
async def test_what_changed_before_an_expired_version_is_found_by_a_list(how: str) -> None:
    api = FakeApi()
    for name in ("stays", "changes", "goes", "is made anew"):
        api.put(name)
    follower = Follower(api)
    await follower.catch_up(api)
    api.failure = UnreachableError("away")
    if how == "in the stream":
        api.complain(410)
    else:
        api.cut(api.failure)
    await asyncio.sleep(5)
    api.put("changes")
    api.remove("goes")
    api.remove("is made anew")
    api.put("is made anew")
    api.put("is new")
    api.compact()
    api.log.clear()
    api.failure = None
    await follower.catch_up(api)
    await follower.stop()
    assert follower.changes()[5:] == [
        (Change.DELETED, "goes"),
        (Change.DELETED, "is made anew"),
        (Change.MODIFIED, "changes"),
        (Change.ADDED, "is made anew"),
        (Change.ADDED, "is new"),
    ]


@pytest.mark.looptime
async def test_an_outage_of_hours_is_waited_for_with_few_calls(looptime: looptime.Chronometer) -> None:
    api = FakeApi()
    follower = Follower(api)
    await follower.catch_up(api)
    api.failure = UnreachableError("connection refused")
    api.cut(api.failure)
    before = len(api.requests)
    await asyncio.sleep(7200)
    assert 7200 / 10 <= len(api.requests) - before <= 7200 / 5 + 20
    api.failure = None
    back = asyncio.get_running_loop().time()
    api.put("late")
    await follower.catch_up(api)
    assert asyncio.get_running_loop().time() - back <= 10.5
    await follower.stop()


@pytest.mark.looptime
async def test_a_server_that_says_when_to_come_back_is_left_alone_until_then() -> None:
    api = FakeApi(failure=UnreachableError("too many requests", asked=60.0))
    follower = Follower(api)
    await asyncio.sleep(59)
    assert len(api.requests) == 1
    api.failure = None
    await follower.catch_up(api)
    await follower.stop()


@pytest.mark.looptime
async def test_what_may_not_be_watched_is_told_at_once_and_waited_for_later() -> None:
    forbidden = RefusedError("Forbidden", "may not list slos")
    api = FakeApi(failure=forbidden)
    follower = Follower(api)
    await asyncio.wait({follower.task})
    with pytest.raises(PermanentError, match="may not list slos"):
        follower.task.result()

    api = FakeApi()
    follower = Follower(api)
    await follower.catch_up(api)
    api.failure = forbidden  # a role is taken away for a moment, as an upgrade does
    api.cut(forbidden)
    await asyncio.sleep(60)
    api.put("meanwhile")
    api.failure = None
    await follower.catch_up(api)
    await follower.stop()


@pytest.mark.looptime
async def test_a_failure_that_nobody_knows_leads_to_a_list() -> None:
    api = FakeApi()
    follower = Follower(api)
    await follower.catch_up(api)
    api.version = 0  # a server that came back from a backup knows less than we do
    api.cut(TemporaryError("Timeout", "Too large resource version", retry_after=1.0))
    api.put("after")
    await follower.catch_up(api)
    await follower.stop()
    assert n_lists(api) == 2


@pytest.mark.looptime
async def test_a_stream_that_ends_at_once_each_time_is_no_busy_loop() -> None:
    api = FakeApi()
    follower = Follower(api)
    await follower.catch_up(api)
    for _ in range(2000):
        api.cut()
        await asyncio.sleep(0.1)
    await follower.stop()
    assert len(api.requests) < 60


async def test_a_list_is_read_in_pages_and_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "PAGE", 3)
    api = FakeApi()
    for i in range(8):
        api.put(f"n{i}")
    resources, version = await list_all(api, Kind.SLO, "/path")
    assert [name_of(r) for r in resources] == [NamespacedName("default", f"n{i}") for i in range(8)]
    assert {(r["kind"], r["apiVersion"]) for r in resources} == {("SLO", "aerostat.dev/v1alpha1")}
    assert version == str(api.version)
    assert len(api.requests) == 3


async def test_a_list_whose_pages_expire_starts_anew_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "PAGE", 1)
    api = FakeApi(page_failures=[ExpiredError("gone")] * 2)
    for name in "ab":
        api.put(name)
    resources, _ = await list_all(api, Kind.SLO, "/path")
    assert len(resources) == 2
    api.page_failures = [ExpiredError("gone")] * 3
    with pytest.raises(TemporaryError, match="cannot list slos"):
        await list_all(api, Kind.SLO, "/path")


def test_a_deletion_of_an_object_that_was_made_anew_since_is_old_news() -> None:
    api, mirror = FakeApi(), Mirror(Kind.SLO)
    api.put("a")
    old = copy.deepcopy(api.objects["a"])
    api.remove("a")
    api.put("a")
    new = api.objects["a"]
    assert [e.change for e in mirror.told(new, deleted=False)] == [Change.ADDED]
    assert mirror.told(old, deleted=True) == []
    assert mirror.told(new, deleted=False) == [], "nothing is told twice"
    assert [e.change for e in mirror.told(new, deleted=True)] == [Change.DELETED]


NAMES = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES),
    st.tuples(st.just("remove"), NAMES),
    st.sampled_from([("bookmark",), ("compact",), ("cut",), ("fail",), ("expire",), ("away",), ("back",), ("wait",)]),
)


async def _live_through(steps: list[tuple[str, ...]]) -> None:
    api = FakeApi()
    follower = Follower(api)
    away = UnreachableError("away")
    for step in steps:
        match step:
            case ("put", name):
                api.put(name)
            case ("remove", name):
                api.remove(name)
            case ("bookmark",):
                api.bookmark()
            case ("compact",):
                api.compact()
            case ("cut",):
                api.cut()
            case ("fail",):
                api.cut(TemporaryError("Http500", "oops", retry_after=1.0))
            case ("expire",):
                api.cut(ExpiredError("too old"))
            case ("away",):
                api.failure = away
                api.cut(away)
            case ("back",):
                api.failure = None
            case _:
                await asyncio.sleep(1)
    api.failure = None
    await follower.catch_up(api)
    await follower.stop()


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_nothing_is_missed_and_no_event_is_impossible(steps: list[tuple[str, ...]]) -> None:
    loop = looptime.new_event_loop()
    try:
        loop.run_until_complete(_live_through(steps))
    finally:
        loop.close()
