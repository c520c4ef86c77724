"""Files of models that are described and never loaded."""

import json
import struct
from typing import Final

CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 96,
    "max_position_embeddings": 4096,
}


def safetensors(n_values: int, dtype: str = "BF16", size: int = 2) -> bytes:
    header = json.dumps({"__metadata__": {}, "w": {"dtype": dtype, "shape": [n_values], "data_offsets": [0, n_values * size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(n_values * size)
