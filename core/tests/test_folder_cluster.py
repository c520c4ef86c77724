"""What is the folder adapter's own: several processes, files, a full disk, Nodes, garbage, events."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError, SettingError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource, parse_node
from aerostat_runtime.cluster import folder, open_cluster, store
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.port import Change, Kind, Note
from aerostat_runtime.cluster.state_lock import StateLock

pytestmark = pytest.mark.cpu

NAME = NamespacedName("default", "fast")


class FixedClock(Clock):
    def monotonic(self) -> Seconds:
        return 0.0

    def wall(self) -> Seconds:
        return 1_777_777_777.5


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
async def cluster(state: Path) -> AsyncIterator[FolderCluster]:
    cluster = FolderCluster(state, clock=FixedClock())
    yield cluster
    await cluster.close()


def slo(ttft: str = "1s", name: str = "fast") -> Resource:
    spec = {"ttft": ttft, "tpot": "100ms"}
    return {"apiVersion": "aerostat.dev/v1alpha1", "kind": "SLO", "metadata": {"name": name}, "spec": spec}


NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "local", "labels": {"kubernetes.io/hostname": "local"}},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}


def test_a_url_names_the_adapter(tmp_path: Path) -> None:
    assert isinstance(open_cluster(f"folder:{tmp_path}"), FolderCluster)
    for url in ("", "folder", "folder:", "etcd:127.0.0.1"):
        with pytest.raises(SettingError, match="folder:PATH"):
            open_cluster(url)


async def test_a_node_is_put_with_its_status_and_watched(cluster: FolderCluster) -> None:
    first = await cluster.put(NODE)
    assert await cluster.put(NODE) == first, "unchanged writes nothing"
    (stored,) = await cluster.list(Kind.NODE)
    assert parse_node(stored).ready
    cordoned = await cluster.put(NODE | {"spec": {"unschedulable": True}})
    assert cordoned["metadata"]["uid"] == first["metadata"]["uid"]
    assert not parse_node(cordoned).schedulable
    assert await cluster.patch_status(Kind.NODE, NamespacedName("default", "local"), {"conditions": []})
    with pytest.raises(PermanentError, match="use apply"):
        await cluster.put(slo())


async def test_objects_are_readable_files(state: Path, cluster: FolderCluster) -> None:
    made = await cluster.apply(slo())
    path = state / "objects" / "SLO" / "default" / "fast.json"
    assert b'"ttft": "1s"' in path.read_bytes()
    assert made["metadata"]["creationTimestamp"] == "2026-05-03T03:09:37Z"
    assert os.stat(state / "objects").st_mode & 0o077 == 0, "objects are for their user only"


async def test_what_another_process_writes_is_seen(state: Path, cluster: FolderCluster) -> None:
    script = (
        "import asyncio, sys; from aerostat_runtime.cluster import open_cluster\n"
        "async def main():\n"
        "    cluster = open_cluster('folder:' + sys.argv[1])\n"
        "    for i in range(1, 21):\n"
        "        metadata = {'name': f's{i % 3}'}\n"
        "        spec = {'ttft': f'{i}s', 'tpot': '1s'}\n"
        "        await cluster.apply({'apiVersion': 'aerostat.dev/v1alpha1', 'kind': 'SLO', 'metadata': metadata, 'spec': spec})\n"
        "asyncio.run(main())\n"
    )
    async with asyncio.timeout(30), aclosing(cluster.watch(Kind.SLO)) as events:  # type: ignore[type-var]
        assert (await anext(events)).change is Change.SYNCED
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(state))
        seen: dict[str, str] = {}
        while seen != {"s0": "18s", "s1": "19s", "s2": "20s"}:
            event = await anext(events)
            assert event.resource is not None
            seen[event.resource["metadata"]["name"]] = event.resource["spec"]["ttft"]
        assert await writer.wait() == 0


async def test_a_change_that_no_event_told_is_found(state: Path, cluster: FolderCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "RELIST", 0.2)
    await cluster.apply(slo())
    async with asyncio.timeout(15), aclosing(cluster.watch(Kind.SLO)) as events:  # type: ignore[type-var]
        assert [(await anext(events)).change, (await anext(events)).change] == [Change.ADDED, Change.SYNCED]
        (state / "objects" / "SLO" / "default" / "fast.json").unlink()
        assert (await anext(events)).change is Change.DELETED


async def test_a_write_that_died_half_way_still_gets_a_newer_version(state: Path, cluster: FolderCluster) -> None:
    first = await cluster.apply(slo())
    (state / "objects" / "revision").write_text("0")
    second = await cluster.apply(slo("2s"))
    assert int(second["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])


async def test_orphans_of_an_edited_state_folder_are_collected(state: Path, cluster: FolderCluster) -> None:
    child = slo(name="child")
    child["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "SLO", "name": "gone", "uid": "nobody"}]
    await cluster.apply(child)
    assert await cluster.list(Kind.SLO) == [], "its owner was gone before it came"
    owner = await cluster.apply(slo())
    child["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "SLO", "name": "fast", "uid": owner["metadata"]["uid"]}]
    await cluster.apply(child)
    (state / "objects" / "SLO" / "default" / "fast.json").unlink()
    await cluster.collect_garbage()
    assert await cluster.list(Kind.SLO) == []


async def test_events_are_kept_in_order_and_bounded(state: Path, cluster: FolderCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_EVENTS_MAX_BYTES", 2000)
    for i in range(100):
        await cluster.note(Note(kind=Kind.SLO, name=NAME, reason="Changed", message=f"for the {i}th time", warning=i % 2 == 1))
    assert (state / "events.jsonl").stat().st_size <= 2200
    notes = await cluster.notes()
    assert notes[-1] == {
        "time": "2026-05-03T03:09:37.500Z",
        "kind": "SLO",
        "name": "default/fast",
        "reason": "Changed",
        "message": "for the 99th time",
        "warning": True,
    }
    numbers = [int(note["message"].split()[2][:-2]) for note in notes]
    assert numbers == list(range(100 - len(numbers), 100))
    assert len(numbers) >= 5


async def test_a_full_disk_loses_nothing_and_says_what_to_do(state: Path, cluster: FolderCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await cluster.apply(slo())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(TemporaryError, match=r"free some$") as refused:
            await cluster.apply(slo("2s"))
        assert refused.value.retry_after > 0
        assert not any(name.endswith(".tmp") for _, _, names in os.walk(state) for name in names), "what was begun is taken back"
    assert await cluster.list(Kind.SLO) == [before]
    assert (await cluster.apply(slo("2s")))["metadata"]["generation"] == 2


async def test_an_event_that_cannot_be_written_harms_nobody(state: Path, cluster: FolderCluster, caplog: pytest.LogCaptureFixture) -> None:
    (state / "events.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        await cluster.notes()
    (state / "events.jsonl").rmdir()
    (state / "events.jsonl").symlink_to("/dev/full")
    await cluster.note(Note(kind=Kind.SLO, name=NAME, reason="Changed", message="x"))
    assert "not recorded: no space left" in caplog.text


async def test_a_folder_that_cannot_be_written_is_named(state: Path, cluster: FolderCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(state))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(PermanentError, match=r"cannot write the state folder: .*state: Read-only file system"):
        await cluster.apply(slo())


def test_a_file_in_the_place_of_the_folder_is_named(state: Path) -> None:
    state.write_text("")
    with pytest.raises(PermanentError, match="make it a folder"):
        FolderCluster(state)


def test_a_state_folder_of_another_version_is_refused(state: Path) -> None:
    FolderCluster(state)
    (state / "version").write_text("7")
    with pytest.raises(SettingError, match=r"another version of Aerostat \(layout '7', this one reads '1'\): move the folder away"):
        FolderCluster(state)


async def test_a_torn_object_is_named(state: Path, cluster: FolderCluster) -> None:
    await cluster.apply(slo())
    (state / "objects" / "SLO" / "default" / "fast.json").write_text('{"kind"')
    with pytest.raises(PermanentError, match=r"fast\.json is no JSON .*: delete it"):
        await cluster.list(Kind.SLO)


async def test_a_writer_that_never_lets_go_is_told_of(state: Path, cluster: FolderCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_LOCK_WAIT", 0.05)
    other = store.ObjectStore(state)
    with other.writing(), pytest.raises(TemporaryError, match="is one stopped"):
        await cluster.apply(slo())
    await cluster.apply(slo())


async def test_a_name_cannot_leave_the_folder(cluster: FolderCluster) -> None:
    for name in ("../x", "..", "", ".hidden"):
        with pytest.raises(ValueError, match="no name of an object"):
            await cluster.delete(Kind.SLO, NamespacedName("default", name))


async def test_a_folder_keeps_no_secrets(cluster: FolderCluster) -> None:
    with pytest.raises(PermanentError, match="none is called hub: remove secretRef and set HF_TOKEN in its environment"):
        await cluster.secret(NamespacedName("default", "hub"))


async def test_one_aerostat_up_for_a_state_folder(state: Path) -> None:
    script = "import sys, time; from pathlib import Path; from aerostat_runtime.cluster.state_lock import StateLock\n"
    script += "lock = StateLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(state), stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    async with asyncio.timeout(20):
        assert await holder.stdout.readline() == b"held\n"
    with pytest.raises(SettingError, match=rf"runs already in .* \(pid {holder.pid}\): stop it \(kill {holder.pid}\)"):
        StateLock(state)
    holder.send_signal(signal.SIGKILL)
    await holder.wait()
    with StateLock(state):
        assert (state / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(SettingError, match=f"pid {os.getpid()}"):
            StateLock(state)
    StateLock(state).release()
