"""What lists and watches tell together, in whatever order: the mirror ends as the cluster is."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource
from aerostat_operator.intake import GRACE, Intake
from aerostat_operator.mirror import Mirror
from aerostat_operator.work_queue import WorkQueue
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent
from aerostat_testing.declared import model_object
from aerostat_testing.loops import run_in_new_loop
from aerostat_testing.memory_cluster import MemoryCluster

pytestmark = pytest.mark.cpu


class Clock:
    def __init__(self) -> None:
        self.now: Seconds = 0.0

    def monotonic(self) -> Seconds:
        return self.now

    def wall(self) -> Seconds:
        return self.now


class Versions(MemoryCluster):
    """Keeps what watches have to tell until it is taken. `meanwhile` happens after a list was read and before it is answered."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[WatchEvent] = []
        self.meanwhile: Callable[[], None] | None = None

    async def list(self, kind: Kind) -> list[Resource]:
        found = await super().list(kind)
        if kind is Kind.MODEL and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return found

    def put(self, name: str) -> None:
        """A new version of it."""
        key = (Kind.MODEL, NamespacedName("default", name))
        resource = self.objects.get(*key)
        if resource is None:
            resource = model_object(name)
            resource["metadata"]["uid"] = f"uid-{self.objects.revision}"
        self.events.append(WatchEvent(Change.MODIFIED, Kind.MODEL, self.objects.write(*key, resource)))

    def remove(self, name: str) -> None:
        key = (Kind.MODEL, NamespacedName("default", name))
        gone = self.objects.get(*key)
        if gone is not None:
            self.objects.remove(*key)
            last = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.objects.revision)}}
            self.events.append(WatchEvent(Change.DELETED, Kind.MODEL, last))

    def truth(self) -> dict[str, str]:
        return {r["metadata"]["name"]: r["metadata"]["resourceVersion"] for r in self.objects.list(Kind.MODEL)}


class Scene:
    def __init__(self) -> None:
        self.cluster, self.clock, self.mirror = Versions(), Clock(), Mirror()
        self.intake = Intake(self.cluster, self.clock, self.mirror, WorkQueue(self.clock))

    def tell(self) -> None:
        """What the watch has not told yet."""
        events, self.cluster.events = self.cluster.events, []
        for event in events:
            self.intake.observe(event)

    def known(self) -> dict[str, str]:
        return {key[1].name: r["metadata"]["resourceVersion"] for key, r in self.mirror.objects.items()}


@pytest.fixture
async def scene() -> Scene:
    return Scene()


async def test_after_the_first_sweep_all_kinds_are_known(scene: Scene) -> None:
    scene.cluster.put("a")
    before = scene.mirror.is_synced
    assert await scene.intake.sweep() == 1
    assert (before, scene.mirror.is_synced) == (False, True)
    assert scene.known() == scene.cluster.truth()


async def test_a_deletion_that_no_watch_told_is_found(scene: Scene) -> None:
    scene.cluster.put("a")
    await scene.intake.sweep()
    scene.cluster.remove("a")
    assert await scene.intake.sweep() == 1
    assert scene.known() == {}


async def test_what_a_watch_told_already_is_no_news_to_a_sweep(scene: Scene) -> None:
    scene.cluster.put("a")
    await scene.intake.sweep()
    scene.cluster.put("a")
    scene.tell()
    assert await scene.intake.sweep() == 0


async def test_a_watch_is_deaf_if_it_does_not_tell_in_time_what_a_sweep_found(scene: Scene) -> None:
    scene.cluster.put("a")
    await scene.intake.sweep()
    scene.clock.now += GRACE
    assert scene.intake.untold() == [(Kind.MODEL, NamespacedName("default", "a"))]
    scene.intake.forget_untold()
    assert scene.intake.untold() == []


async def test_a_watch_that_tells_late_what_a_sweep_found_is_not_deaf(scene: Scene) -> None:
    scene.cluster.put("a")
    scene.cluster.put("b")
    await scene.intake.sweep()
    scene.cluster.remove("b")
    await scene.intake.sweep()
    scene.tell()
    scene.clock.now += GRACE
    assert scene.intake.untold() == []


async def test_an_object_that_goes_while_a_list_is_under_way_does_not_come_back_with_it(scene: Scene) -> None:
    def goes() -> None:
        scene.cluster.remove("a")
        scene.tell()

    scene.cluster.put("a")
    scene.tell()
    scene.cluster.meanwhile = goes
    await scene.intake.sweep()
    assert scene.known() == {}


async def test_an_object_that_comes_while_a_list_is_under_way_is_not_taken_for_deleted(scene: Scene) -> None:
    def comes() -> None:
        scene.cluster.put("a")
        scene.tell()

    scene.cluster.meanwhile = comes
    await scene.intake.sweep()
    assert scene.known() == scene.cluster.truth()


_NAMES = st.sampled_from(["a", "b", "c"])
_STEPS = st.tuples(st.sampled_from(["put", "remove", "tell", "lose", "sweep"]), _NAMES, st.booleans(), _NAMES)


@given(st.lists(_STEPS, max_size=40))
def test_a_sweep_and_what_is_told_leave_the_truth_whatever_was_lost(steps: list[tuple[str, str, bool, str]]) -> None:
    async def run() -> None:
        scene = Scene()
        for what, name, tells, other in steps:
            await step(scene, what, name, tells, other)
        scene.cluster.meanwhile = None
        await scene.intake.sweep()
        assert scene.known() == scene.cluster.truth()
        scene.tell()  # late, and nothing that it undoes
        assert scene.known() == scene.cluster.truth()

    run_in_new_loop(run())


async def step(scene: Scene, what: str, name: str, tells: bool, other: str) -> None:
    def meanwhile() -> None:
        scene.cluster.remove(name)
        scene.cluster.put(other)
        if tells:
            scene.tell()

    match what:
        case "put":
            scene.cluster.put(name)
        case "remove":
            scene.cluster.remove(name)
        case "tell":
            scene.tell()
        case "lose":
            scene.cluster.events.clear()
        case _:
            scene.cluster.meanwhile = meanwhile
            await scene.intake.sweep()
