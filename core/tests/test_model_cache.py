"""The node's folder of models: what it takes, what leaves it whole, and who is never robbed."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aerostat_runtime.model_cache import ModelCache, in_use

pytestmark = pytest.mark.cpu

HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path)


def put(cache: ModelCache, key: str, n_bytes: int = 10_000, used: float = 100.0) -> Path:
    folder = cache.model(key)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"w" * n_bytes)
    os.utime(folder, (used, used))
    return folder


def left(cache: ModelCache) -> set[str]:
    return {
        str(path.relative_to(cache.root)) for path in cache.root.rglob("*") if path.parent.name != "locks" and path.parent != cache.root
    }


def test_each_model_is_counted_with_its_parts_and_its_last_use(cache: ModelCache) -> None:
    put(cache, "whole", used=200.0)
    cache.download("coming").mkdir()
    (cache.download("coming") / "a.whl.part").write_bytes(b"w" * 5000)
    cache.model("coming.partial").mkdir()
    (cache.model("coming.partial") / "shard").write_bytes(b"w" * 5000)
    coming, whole = cache.kept()
    assert (coming.key, coming.is_whole, whole.key, whole.is_whole, whole.last_used) == ("coming", False, "whole", True, 200.0)
    assert coming.n_bytes >= 10_000
    assert whole.n_bytes >= 10_000
    with_code = cache.model("whole-code")
    with_code.mkdir()
    (with_code / "model.safetensors").hardlink_to(cache.model("whole") / "model.safetensors")
    assert [each.n_bytes for each in cache.kept()] == [coming.n_bytes, whole.n_bytes, 0], "shared weights take room once"


def test_nothing_stays_of_what_is_evicted(cache: ModelCache) -> None:
    put(cache, "k")
    cache.public_marker("k").touch()
    cache.download("k").mkdir()
    assert cache.evict(cache.kept()[0])
    assert left(cache) == set()


@pytest.mark.parametrize(("place", "how"), [("locks/k", fcntl.LOCK_EX), ("models/k", fcntl.LOCK_SH)])
def test_what_another_process_makes_or_serves_stays(cache: ModelCache, place: str, how: int) -> None:
    put(cache, "k")
    (cache.root / "locks" / "k").touch()
    command = [sys.executable, "-c", HOLD, str(cache.root / place), str(how)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert not cache.evict(cache.kept()[0])
        assert (cache.model("k") / "model.safetensors").is_file()
        holder.kill()
    assert cache.evict(cache.kept()[0]), "a lock ends with its holder"


def test_an_engine_and_another_hold_a_model_together(cache: ModelCache) -> None:
    folder = put(cache, "k")
    with in_use(folder), in_use(folder):
        assert not cache.evict(cache.kept()[0])


def test_what_was_used_since_it_was_chosen_stays(cache: ModelCache) -> None:
    put(cache, "k")
    chosen = cache.kept()[0]
    cache.touch("k")
    assert not cache.evict(chosen)
    assert cache.evict(cache.kept()[0])


def test_what_a_killed_process_left_is_swept_but_a_download_goes_on(cache: ModelCache) -> None:
    (cache.root / "evicted" / "k.1.1" / "0").mkdir(parents=True)
    for key in ("dead", "alive"):
        cache.model(f"{key}.partial").mkdir()
    cache.download("dead").mkdir()
    with cache.locked("alive", lambda: None):
        cache.sweep()
    assert left(cache) == {"models/alive.partial", "downloads/dead"}


def test_a_source_leads_to_its_model_while_it_looks_the_same(cache: ModelCache) -> None:
    assert cache.key_of("hf://a/b") is None
    cache.remember("hf://a/b", "one")
    cache.remember("hf://a/b", "code", with_code=True)
    cache.remember("file:///m.gguf", "two", stamp="10 1")
    assert (cache.key_of("hf://a/b"), cache.key_of("hf://a/b", with_code=True)) == ("one", "code")
    assert (cache.key_of("file:///m.gguf"), cache.key_of("file:///m.gguf", stamp="10 1")) == ("two", "two")
    assert cache.key_of("file:///m.gguf", stamp="11 1") is None
