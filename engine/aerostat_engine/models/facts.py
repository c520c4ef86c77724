"""What a model's folder says about itself, read from its JSON and safetensors headers alone: checks, sizes, KV shape. No torch."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aerostat_core.errors import PermanentError
from aerostat_core.ids import Bytes

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_STORED: Final[Mapping[str, str]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`kv_values_per_token` counts numbers, not bytes: keys and values of all layers and all ranks."""

    path: Path
    fingerprint: str
    architecture: str
    stored_dtype: str
    n_parameters: int
    other_bytes: Bytes  # tensors that stay as they are whatever the serving type (quantised weights, indices)
    n_layers: int
    kv_values_per_token: int
    max_context_tokens: int

    def weights_bytes(self, dtype: str) -> Bytes:
        return self.n_parameters * DTYPE_BYTES[dtype] + self.other_bytes

    def kv_bytes_per_token(self, dtype: str) -> Bytes:
        return self.kv_values_per_token * DTYPE_BYTES[dtype]


def read_facts(path: Path) -> ModelFacts:
    """Check a model's folder and describe it. Raises PermanentError that says what is wrong with which file."""
    if not path.is_dir():
        raise PermanentError("SourceNotFound", f"{path} is no folder: give the folder that holds config.json and the safetensors files")
    config = read_config(path)
    shards = _shards(path)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    counts: dict[str, int] = {}
    other = 0
    for shard in shards:
        header = _header(shard)
        stat = shard.stat()
        digest.update(f"{shard.name} {stat.st_size} {stat.st_mtime_ns} {json.dumps(header, sort_keys=True)}".encode())
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            stored = _STORED.get(tensor["dtype"])
            if stored is None:
                other += end - begin
            else:
                counts[stored] = counts.get(stored, 0) + (end - begin) // DTYPE_BYTES[stored]
    text = _text_config(config)
    return ModelFacts(
        path=path,
        fingerprint=digest.hexdigest(),
        architecture=config["architectures"][0],
        stored_dtype=max(counts, key=lambda stored: counts[stored], default="bfloat16"),
        n_parameters=sum(counts.values()),
        other_bytes=other,
        n_layers=_number(path, text, "num_hidden_layers", "n_layer"),
        kv_values_per_token=kv_values_per_token(path, text),
        max_context_tokens=_number(path, text, "max_position_embeddings", "n_positions", "seq_length"),
    )


def read_config(path: Path) -> dict[str, Any]:
    """The configuration, once all that comes before the weights is there. Raises PermanentError."""
    config = _config(path)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise PermanentError("TokenizerMissing", f"{path} has no tokenizer: one of {', '.join(_TOKENIZERS)} is needed")
    return config


def kv_values_per_token(path: Path, text: Mapping[str, Any]) -> int:
    """Numbers that one token's KV takes: per layer the latent and its rotary part (MLA), or keys and values of every KV head."""
    layers = _number(path, text, "num_hidden_layers", "n_layer")
    if text.get("kv_lora_rank"):
        return layers * (int(text["kv_lora_rank"]) + _number(path, text, "qk_rope_head_dim"))
    heads = _number(path, text, "num_attention_heads", "n_head")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    key_dim = int(text.get("head_dim") or _number(path, text, "hidden_size", "n_embd") // heads)
    value_dim = int(text.get("v_head_dim") or key_dim)
    return layers * kv_heads * (key_dim + value_dim)


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        hint = " (it looks like a LoRA adapter: adapters are not supported)" if (path / "adapter_config.json").is_file() else ""
        raise PermanentError("ConfigMissing", f"{path} has no config.json{hint}")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise PermanentError("ConfigInvalid", f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise PermanentError("ConfigInvalid", f"{file} names no architecture: its `architectures` list is needed")
    return config


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Models with images or sound keep the language model's shape one level down."""
    nested = config.get("text_config") or config.get("llm_config")
    return nested if isinstance(nested, dict) else config


def _number(path: Path, config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise PermanentError("ConfigInvalid", f"{path / 'config.json'} lacks {' or '.join(names)}")


def indexed_shards(path: Path) -> list[str] | None:
    """The weight files that the folder's index names; None without an index. Raises PermanentError for one that makes no sense."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return None
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise PermanentError("WeightsInvalid", f"{index} is no safetensors index: {error}") from error
    if elsewhere := next((name for name in names if not isinstance(name, str) or Path(name).name != name), None):
        raise PermanentError("WeightsInvalid", f"{index} names {elsewhere!r}: weight files lie beside their index")
    return names


def _shards(path: Path) -> list[Path]:
    names = indexed_shards(path)
    if names is not None:
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise PermanentError("WeightsMissing", f"{path} lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}")
        return [path / name for name in names]
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise PermanentError("WeightsMissing", f"{path} has no *.safetensors file (other weight formats can run code and are not read)")
    return shards


def _header(shard: Path) -> dict[str, Any]:
    size = shard.stat().st_size
    with shard.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise PermanentError("WeightsTruncated", f"{shard} is no whole safetensors file: its header does not fit its {size} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            data = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PermanentError("WeightsInvalid", f"{shard} has no valid safetensors header: {error}") from error
    if size < 8 + length + data:
        raise PermanentError("WeightsTruncated", f"{shard} is cut short: {size} bytes there, {8 + length + data} expected; fetch it again")
    return header
