"""Own writes count at once; what a watch delivers late does not undo them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_operator.mirror import Mirror
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent

pytestmark = pytest.mark.cpu
KEY = (Kind.MODEL, NamespacedName("default", "m"))


def resource(version: int, *, uid: str = "u") -> Resource:
    return {"metadata": {"name": "m", "namespace": "default", "uid": uid, "resourceVersion": str(version)}, "spec": {}}


def event(change: Change, version: int, *, uid: str = "u") -> WatchEvent:
    return WatchEvent(change, Kind.MODEL, resource(version, uid=uid))


def test_it_is_synced_once_every_kind_was_delivered() -> None:
    mirror = Mirror()
    for kind in Kind:
        assert not mirror.is_synced
        mirror.observe(WatchEvent(Change.SYNCED, kind, None))
    assert mirror.is_synced


def test_an_older_version_does_not_undo_an_own_write() -> None:
    mirror = Mirror()
    mirror.applied(Kind.MODEL, resource(10))
    assert mirror.observe(event(Change.MODIFIED, 9)) is None
    assert mirror.objects[KEY]["metadata"]["resourceVersion"] == "10"
    assert mirror.observe(event(Change.MODIFIED, 11)) == KEY


@given(st.lists(st.tuples(st.sampled_from(("watch", "apply", "list")), st.integers(1, 99)), min_size=1))
def test_the_newest_version_counts_whoever_tells_it_in_whatever_order(told: list[tuple[str, int]]) -> None:
    mirror = Mirror()
    for source, version in told:
        if source == "watch":
            mirror.observe(event(Change.MODIFIED, version))
        elif source == "apply":
            mirror.applied(Kind.MODEL, resource(version))
        else:
            with mirror.listing(Kind.MODEL) as take:
                take([resource(version)])
    assert mirror.version_of(KEY) == str(max(version for _, version in told))


def test_an_own_status_stays_until_it_is_forgotten() -> None:
    mirror = Mirror()
    mirror.observe(event(Change.ADDED, 1))
    mirror.patched(KEY, {"state": "Open"})
    mirror.observe(event(Change.MODIFIED, 2))
    assert mirror.objects[KEY]["status"] == {"state": "Open"}
    mirror.forget_own_statuses()
    assert "status" not in mirror.objects[KEY]


def test_a_new_object_of_the_same_name_starts_without_the_old_ones_status() -> None:
    mirror = Mirror()
    mirror.observe(event(Change.ADDED, 5))
    mirror.patched(KEY, {"state": "Open"})
    assert mirror.observe(event(Change.ADDED, 2, uid="other")) == KEY
    assert "status" not in mirror.objects[KEY]
    assert mirror.observe(event(Change.DELETED, 5)) is None, "the old one's end says nothing about the new one"
    assert mirror.observe(event(Change.DELETED, 2, uid="other")) == KEY
    assert mirror.objects == {}
    mirror.patched(KEY, {"state": "Open"})  # answered after the watch told the end
    mirror.observe(event(Change.ADDED, 7, uid="third"))
    assert "status" not in mirror.objects[KEY]
