"""The agent's hold on the cache: room is made, promised and given back; what is needed, open or on its way is left alone."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from aerostat_agent.model_cache import Needs, NodeCache
from aerostat_core.errors import PermanentError, SettingError
from aerostat_runtime.model_cache import ModelCache, in_use
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

KI = 1 << 10
MI = 1 << 20


class Rig:
    """A node's cache of models of one MiB, used in the order of `put`."""

    def __init__(self, root: Path, limit: int | None) -> None:
        self.files = ModelCache(root)
        self.sources: set[tuple[str, bool]] = set()
        self.folders: set[Path] = set()
        self.evicts: list[Path] = []
        self.cache = NodeCache(
            root, limit, needs=lambda: Needs(sources=frozenset(self.sources), folders=frozenset(self.folders)), evicts=self.evicts.append
        )

    def put(self, *keys: str) -> None:
        for key in keys:
            used = 1000.0 + len(self.names())
            self.files.model(key).mkdir()
            (self.files.model(key) / "weights").write_bytes(b"w" * MI)
            os.utime(self.files.model(key), (used, used))

    def names(self) -> list[str]:
        return sorted(each.key for each in self.files.kept())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, 4 * MI + 64 * KI)


async def test_room_is_made_of_what_nobody_needs(rig: Rig) -> None:
    rig.put("oldest", "needed", "served", "newest")
    rig.files.remember("hf://org/needed", "needed", with_code=True)
    rig.sources = {("hf://org/needed", True)}
    rig.folders = {rig.files.model("served"), Path("/elsewhere")}
    with rig.cache.preparation() as ask:
        await ask("coming", MI)
        assert rig.names() == ["needed", "newest", "served"]
        await ask("coming", 2 * MI)
        assert rig.names() == ["needed", "served"]
        with pytest.raises(PermanentError, match=r"3Mi more are needed in the model cache, 2\.062Mi can be had") as caught:
            await ask("coming", 3 * MI)
    assert caught.value.reason == "CacheFull"
    assert rig.evicts == [rig.files.model("oldest"), rig.files.model("newest")]


async def test_a_cache_over_its_limit_is_trimmed_at_the_start_and_what_a_killed_process_left_is_gone(rig: Rig) -> None:
    rig.put("first", "second", "third", "fourth", "fifth")
    rig.files.remember("hf://org/first", "first")
    rig.sources = {("hf://org/first", False)}
    (rig.files.root / "evicted" / "left.1.1").mkdir()
    running = asyncio.create_task(rig.cache.run())
    await eventually(lambda: rig.cache.n_evicted, "one went")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert rig.names() == ["fifth", "first", "fourth", "third"]
    assert not any((rig.files.root / "evicted").iterdir())


async def test_what_one_was_promised_no_other_gets_until_it_ends(rig: Rig) -> None:
    with rig.cache.preparation() as first, rig.cache.preparation() as second:
        await first("a", 3 * MI)
        with pytest.raises(PermanentError):
            await second("b", 2 * MI)
        rig.put("a")  # it grows: what came is no more to come
        await second("b", MI)
        with pytest.raises(PermanentError):
            await second("c", 2 * MI)
        assert rig.names() == ["a"], "on its way, it is nobody's to evict"
    with rig.cache.preparation() as third:
        await third("b", 4 * MI)
    assert rig.names() == []


async def test_two_that_prepare_the_same_model_hold_its_room_as_long_as_one_of_them_does(rig: Rig) -> None:
    with rig.cache.preparation() as first:
        await first("a", 3 * MI)
        with rig.cache.preparation() as second:
            await second("a", 3 * MI)
        with rig.cache.preparation() as third, pytest.raises(PermanentError):
            await third("b", 2 * MI)


async def test_a_model_that_an_engine_has_open_stays_and_another_goes(rig: Rig) -> None:
    rig.put("open", "next", "third", "fourth")
    with in_use(rig.files.model("open")), rig.cache.preparation() as ask:
        await ask("coming", MI)
    assert rig.names() == ["fourth", "open", "third"]


async def test_a_part_that_nobody_works_on_goes_even_if_its_source_is_needed(rig: Rig) -> None:
    rig.files.remember("pypi://part@1", "part")
    rig.sources = {("pypi://part@1", False)}
    rig.files.download("part").mkdir()
    (rig.files.download("part") / "p.whl.part").write_bytes(b"w" * MI)
    with rig.files.locked("part", lambda: None), rig.cache.preparation() as ask, pytest.raises(PermanentError):
        await ask("coming", 4 * MI)
    with rig.cache.preparation() as ask:
        await ask("coming", 4 * MI)
    assert rig.names() == []


async def test_a_disk_without_room_evicts_too_and_says_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, None)
    rig.put("old")
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=MI if "old" in rig.names() else 2 * MI))
    with rig.cache.preparation() as ask:
        await ask("coming", 2 * MI)
        assert rig.names() == []
        with pytest.raises(
            PermanentError, match=r"2Mi can be had \(2Mi are free, 0 is what no Instance needs\): free disk space"
        ) as caught:
            await ask("coming", 3 * MI)
    assert caught.value.reason == "DiskFull"


def test_a_folder_that_cannot_be_used_is_a_bad_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"--model-cache .* cannot be used"):
        NodeCache(tmp_path / "file", None, needs=lambda: Needs(sources=frozenset(), folders=frozenset()), evicts=lambda folder: None)
