"""A folder of manifests becomes objects, and nothing that is wrong in it takes an object away."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from aerostat_core.errors import SettingError, TemporaryError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.cluster import store
from aerostat_runtime.cluster.folder import FolderCluster
from aerostat_runtime.cluster.manifests import ManifestFolder, SyncReport, read_rejections
from aerostat_runtime.cluster.port import Kind

pytestmark = pytest.mark.cpu


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FolderCluster]:
    cluster = FolderCluster(tmp_path / ".aerostat")
    yield cluster
    await cluster.close()


@pytest.fixture
def folder(tmp_path: Path, cluster: FolderCluster) -> ManifestFolder:
    return ManifestFolder(tmp_path, cluster)


def slo(name: str, ttft: str = "1s", **metadata: str) -> str:
    more = "".join(f"\n  {key}: {value}" for key, value in metadata.items())
    return f"apiVersion: aerostat.dev/v1alpha1\nkind: SLO\nmetadata:\n  name: {name}{more}\nspec:\n  ttft: {ttft}\n  tpot: 100ms\n"


async def present(cluster: FolderCluster) -> dict[str, str]:
    """TTFT of each SLO by name."""
    return {r["metadata"]["name"]: r["spec"]["ttft"] for r in await cluster.list(Kind.SLO)}


def said(report: SyncReport) -> list[str]:
    return [str(rejection) for rejection in report.rejected]


async def test_files_are_followed_through_edits(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    (tmp_path / "a.yaml").write_text(slo("a") + "---\n" + slo("b"))
    (tmp_path / "c.json").write_text(
        '{"apiVersion": "aerostat.dev/v1alpha1", "kind": "SLO", "metadata": {"name": "c"}, "spec": {"ttft": "1s", "tpot": "1s"}}'
    )
    assert await folder.sync() == SyncReport(changed=("SLO default/a", "SLO default/b", "SLO default/c"))
    assert await folder.sync() == SyncReport()
    (tmp_path / "a.yaml").write_text(slo("a", "2s"))
    assert await folder.sync() == SyncReport(changed=("SLO default/a",), deleted=("SLO default/b",))
    (tmp_path / "c.json").unlink()
    assert await folder.sync() == SyncReport(deleted=("SLO default/c",))
    assert await present(cluster) == {"a": "2s"}


async def test_an_object_may_move_to_another_file(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    (tmp_path / "a.yaml").write_text(slo("x"))
    await folder.sync()
    (before,) = await cluster.list(Kind.SLO)
    (tmp_path / "a.yaml").rename(tmp_path / "b.yml")
    report = await folder.sync()
    assert report.deleted == ()
    (after,) = await cluster.list(Kind.SLO)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["generation"] == 1
    (tmp_path / "b.yml").unlink()
    assert await folder.sync() == SyncReport(deleted=("SLO default/x",))


async def test_a_file_removed_while_nobody_watched_is_noticed(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(slo(name))
    await folder.sync()
    (tmp_path / "a.yaml").unlink()
    assert await ManifestFolder(tmp_path, cluster).sync() == SyncReport(deleted=("SLO default/a",))


async def test_what_no_manifest_declared_is_left_alone(cluster: FolderCluster, folder: ManifestFolder) -> None:
    spec = {"ttft": "1s", "tpot": "1s"}
    await cluster.apply({"apiVersion": "aerostat.dev/v1alpha1", "kind": "SLO", "metadata": {"name": "by-hand"}, "spec": spec})
    await folder.sync()
    assert set(await present(cluster)) == {"by-hand"}


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "no-yaml": (lambda text: text + "a: [", "a.yaml:16: no YAML"),
    "empty": (lambda text: "", "a.yaml:1: has no object"),
    "cut in the first object": (lambda text: text[: text.index("ttft") + 7], "a.yaml:5: spec.tpot: Required"),
    "cut in the second object": (lambda text: text[: text.rindex("  ttft")], "a.yaml:13: spec: Invalid"),
    "no object": (lambda text: "just text", "a.yaml:1: not an object"),
    "a list": (lambda text: "- 1", "a.yaml:1: not an object"),
    "unknown kind": (lambda text: text.replace("kind: SLO", "kind: Balloon"), "a.yaml:2: no kind 'Balloon' to declare"),
    "the operator's kind": (lambda text: text.replace("kind: SLO", "kind: Instance"), "a.yaml:2: an Instance is made by the operator"),
    "wrong apiVersion": (lambda text: text.replace("v1alpha1", "v9"), "a.yaml:1: apiVersion: no version"),
    "no kind": (lambda text: text.replace("kind: SLO\n", ""), "a.yaml:1: no kind None to declare"),
    "no name": (lambda text: text.replace("name: a", "labels: {}"), "a.yaml:3: metadata.name is missing"),
    "a bad value": (lambda text: text.replace("ttft: 1s", "ttft: soon", 1), "a.yaml:6: spec.ttft: Invalid value"),
    "a broken rule": (lambda text: text.replace("ttft: 1s", "ttft: 0s", 1), "a.yaml:6: spec.ttft: Invalid value"),
    "an unknown field": (lambda text: text.replace("tpot", "topt", 1), "a.yaml:7: spec.topt: unknown field"),
    "twice in the file": (lambda text: text.replace("name: b", "name: a"), "a.yaml:9: SLO default/a is declared already in a.yaml:1"),
    "a key twice": (lambda text: text.replace("tpot: 100ms", "ttft: 2s", 1), "a.yaml:7: no YAML: the key 'ttft' stands twice"),
}


@pytest.mark.parametrize("how", list(BROKEN))
async def test_a_broken_file_is_reported_and_takes_nothing_away(
    how: str, tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder
) -> None:
    breaks, report = BROKEN[how]
    good = slo("a") + "---\n" + slo("b")
    (tmp_path / "a.yaml").write_text(good)
    await folder.sync()
    before = await cluster.list(Kind.SLO)
    (tmp_path / "a.yaml").write_text(breaks(good))
    broken = await folder.sync()
    assert any(line.startswith(report) for line in said(broken)), said(broken)
    assert broken.deleted == ()
    assert await cluster.list(Kind.SLO) == before
    assert read_rejections(cluster.state) == broken.rejected
    (tmp_path / "a.yaml").write_text(good)
    assert await folder.sync() == SyncReport()
    assert read_rejections(cluster.state) == ()


async def test_the_good_objects_of_a_file_are_applied_beside_a_bad_one(
    tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder
) -> None:
    (tmp_path / "a.yaml").write_text(slo("a", "0s") + "---\n" + slo("b"))
    report = await folder.sync()
    assert report.changed == ("SLO default/b",)
    assert [r.subject for r in report.rejected] == ["SLO default/a"]


async def test_an_object_of_two_files_stays_with_the_one_it_came_from(
    tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder
) -> None:
    (tmp_path / "b.yaml").write_text(slo("x", "1s"))
    await folder.sync()
    (tmp_path / "a.yaml").write_text(slo("x", "2s"))
    report = await folder.sync()
    assert said(report) == ["a.yaml:1: SLO default/x is declared already in b.yaml:1: keep one of them"]
    assert await present(cluster) == {"x": "1s"}
    (tmp_path / "b.yaml").unlink()
    assert await folder.sync() == SyncReport(changed=("SLO default/x",))
    assert await present(cluster) == {"x": "2s"}


async def test_of_two_new_files_the_first_by_name_declares(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    (tmp_path / "b.yaml").write_text(slo("x", "2s"))
    (tmp_path / "a.yaml").write_text(slo("x", "1s"))
    assert [r.file for r in (await folder.sync()).rejected] == ["b.yaml"]
    assert await present(cluster) == {"x": "1s"}


async def test_a_namespace_may_be_named_or_left_out(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    (tmp_path / "a.yaml").write_text(slo("x") + "---\n" + slo("x", namespace="team"))
    assert (await folder.sync()).changed == ("SLO default/x", "SLO team/x")


async def test_other_files_are_no_manifests(tmp_path: Path, folder: ManifestFolder) -> None:
    (tmp_path / "notes.txt").write_text("not: [yaml")
    (tmp_path / ".hidden.yaml").write_text(slo("hidden"))
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "target").write_text(slo("linked"))
    (tmp_path / "link.yaml").symlink_to(tmp_path / "target")
    assert await folder.sync() == SyncReport()


async def test_a_file_that_is_no_text_or_too_large_is_reported(tmp_path: Path, folder: ManifestFolder) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: 1\nb: \xff")
    (tmp_path / "b.yaml").write_text("#" * (1 << 20) + "\n")
    assert said(await folder.sync()) == ["a.yaml:2: no UTF-8 text", "b.yaml:1: larger than 1048576 bytes: split it"]


async def test_a_folder_that_goes_away_takes_nothing_away(tmp_path: Path, cluster: FolderCluster) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "a.yaml").write_text(slo("a"))
    folder = ManifestFolder(manifests, cluster)
    await folder.sync()
    manifests.rename(tmp_path / "elsewhere")
    with pytest.raises(TemporaryError, match="its objects stay"):
        await folder.sync()
    assert set(await present(cluster)) == {"a"}


def test_a_folder_that_is_none_is_a_bad_setting(tmp_path: Path, cluster: FolderCluster) -> None:
    with pytest.raises(SettingError, match="is no folder"):
        ManifestFolder(tmp_path / "nowhere", cluster)


async def test_the_watch_tells_of_changes_only(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    (tmp_path / "a.yaml").write_text(slo("a"))
    async with asyncio.timeout(20), aclosing(folder.watch()) as reports:  # type: ignore[type-var]
        assert await anext(reports) == SyncReport(changed=("SLO default/a",))
        (tmp_path / "notes.txt").write_text("nothing for us")
        (tmp_path / "a.yaml").touch()
        part = tmp_path / ".a.yaml.part"
        part.write_text(slo("a", "2s"))
        os.replace(part, tmp_path / "a.yaml")
        assert await anext(reports) == SyncReport(changed=("SLO default/a",))
        (tmp_path / "a.yaml").write_text("a: [")
        assert [r.file for r in (await anext(reports)).rejected] == ["a.yaml"]
        (tmp_path / "a.yaml").write_text(slo("a", "2s"))
        assert await anext(reports) == SyncReport(), "what was wrong is right again"
        (tmp_path / "a.yaml").unlink()
        assert await anext(reports) == SyncReport(deleted=("SLO default/a",))


async def test_a_file_that_is_still_being_written_is_waited_for(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    text = slo("a", "2s") + "---\n" + slo("b")
    (tmp_path / "a.yaml").write_text(slo("a") + "---\n" + slo("b"))
    async with asyncio.timeout(20), aclosing(folder.watch()) as reports:  # type: ignore[type-var]
        await anext(reports)
        with (tmp_path / "a.yaml").open("w") as file:
            for i in range(0, len(text), 40):
                file.write(text[i : i + 40])
                file.flush()
                await asyncio.sleep(0.02)
        assert await anext(reports) == SyncReport(changed=("SLO default/a",))


async def test_a_full_disk_is_reported_and_tried_again(
    tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_NO_SPACE_RETRY", 0.1)
    async with asyncio.timeout(20), aclosing(folder.watch()) as reports:  # type: ignore[type-var]
        assert await anext(reports) == SyncReport()

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", full)
            (tmp_path / "a.yaml").write_text(slo("a"))
            assert re.search("no space left.*; it is tried again$", (await anext(reports)).rejected[0].message)
        report = await anext(reports)
        assert report == SyncReport(changed=("SLO default/a",))


async def test_an_object_keeps_its_status_when_its_manifest_changes(tmp_path: Path, cluster: FolderCluster, folder: ManifestFolder) -> None:
    (tmp_path / "a.yaml").write_text(slo("a"))
    await folder.sync()
    await cluster.patch_status(Kind.SLO, NamespacedName("default", "a"), {"models": 1})
    assert await folder.sync() == SyncReport(), "a status is no change of ours"
    (tmp_path / "a.yaml").write_text(slo("a", "2s"))
    await folder.sync()
    (changed,) = await cluster.list(Kind.SLO)
    resource: Resource = changed
    assert resource["status"] == {"models": 1}
    assert resource["metadata"]["generation"] == 2
