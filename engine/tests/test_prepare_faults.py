"""Preparing for real, as processes, under what can happen to them: company, kill -9, a disk without room."""

import hashlib
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from aerostat_core.ids import Bytes
from aerostat_testing.preparing import LIMIT, outcome, start_preparing
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cpu

N_LAYERS, WIDTH, HEADS, KV_HEADS, VOCABULARY = 2, 64, 4, 2, 320
FILE_LIMIT = 64 << 10  # less than the model's weights, more than all its other files


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights as a GGUF file, its tokenizer one token for each byte."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    tokens = [*(f"t{i}" for i in range(VOCABULARY - 129)), "ab", *(chr(i) if chr(i).isprintable() else f"<{i}>" for i in range(128))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, 0.2, shape)
        writer.add_tensor(name, values.astype(np.float32))

    tensor("token_embd.weight", VOCABULARY, WIDTH)
    tensor("output_norm.weight", WIDTH)
    tensor("output.weight", VOCABULARY, WIDTH)
    kv_width = WIDTH * KV_HEADS // HEADS
    for i in range(N_LAYERS):
        tensor(f"blk.{i}.attn_norm.weight", WIDTH)
        tensor(f"blk.{i}.ffn_norm.weight", WIDTH)
        tensor(f"blk.{i}.attn_q.weight", WIDTH, WIDTH)
        tensor(f"blk.{i}.attn_k.weight", kv_width, WIDTH)
        tensor(f"blk.{i}.attn_v.weight", kv_width, WIDTH)
        tensor(f"blk.{i}.attn_output.weight", WIDTH, WIDTH)
        tensor(f"blk.{i}.ffn_gate.weight", 2 * WIDTH, WIDTH)
        tensor(f"blk.{i}.ffn_up.weight", 2 * WIDTH, WIDTH)
        tensor(f"blk.{i}.ffn_down.weight", WIDTH, 2 * WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def start(model: Path, cache: Path, file_limit: Bytes | None = None) -> subprocess.Popen[str]:
    return start_preparing(f"file://{model}", cache, "--dtype", "float32", file_limit=file_limit)


def steps(lines: list[dict[str, Any]]) -> set[str]:
    return {line["progress"]["step"] for line in lines if "progress" in line}


def left_half_done(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if "partial" in path.name]


def test_two_at_once_convert_once_and_both_have_the_model(tiny_gguf: Path, tmp_path: Path) -> None:
    both = [start(tiny_gguf, tmp_path) for _ in range(2)]
    (first_code, first), (second_code, second) = map(outcome, both)
    assert (first_code, second_code) == (0, 0)
    assert first[-1]["model"] == second[-1]["model"]
    assert sorted(["convert" in steps(first), "convert" in steps(second)]) == [False, True]
    model = first[-1]["model"]
    assert [str(path) for path in (tmp_path / "models").iterdir()] == [model["path"]]
    assert Path(model["path"]).name == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest() != model["fingerprint"]
    assert left_half_done(tmp_path) == []


def test_a_conversion_that_was_killed_is_done_anew(tiny_gguf: Path, tmp_path: Path) -> None:
    killed = start(tiny_gguf, tmp_path)
    wait_for(lambda: list((tmp_path / "models").glob("*.partial")), "the conversion is under way", limit=LIMIT)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=LIMIT)
    assert killed.returncode == -signal.SIGKILL
    assert left_half_done(tmp_path), "it was killed in the middle"
    code, lines = outcome(start(tiny_gguf, tmp_path))
    assert code == 0
    assert "convert" in steps(lines)
    assert "wait" not in steps(lines), "the lock died with its holder"
    assert left_half_done(tmp_path) == []


def test_a_disk_that_takes_no_more_is_said_so_and_nothing_half_written_stays(tiny_gguf: Path, tmp_path: Path) -> None:
    code, lines = outcome(start(tiny_gguf, tmp_path, FILE_LIMIT))
    assert code == 2
    assert lines[-1]["error"]["reason"] == "DiskFull"
    assert left_half_done(tmp_path) == []
    assert list((tmp_path / "models").iterdir()) == []


def test_a_disk_with_too_little_room_is_refused_before_the_work(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aerostat_engine import prepare

    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=10 << 20))
    assert prepare.main(["--uri", f"file://{tiny_gguf}", "--cache", str(tmp_path)]) == 2
    said = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert said["reason"] == "DiskFull"
    assert "10Mi are free: free disk space" in said["message"]
    assert said["needs_bytes"] > 10 << 20
    assert said["entry"] == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
