"""GGUF to a Hugging Face folder (bfloat16 safetensors, tokenizer, chat template) by transformers. Imports torch: call it once per model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging, modeling_gguf_pytorch_utils

from aerostat_engine.models.manifest import Progress

_STORED: Final = 2  # bytes of a number in bfloat16


def convert_gguf(gguf: Path, out: Path, progress: Progress) -> None:
    """Write the model of one GGUF file to the folder `out`. Raises OSError when the disk is full, ValueError for what is no GGUF model."""
    modeling_gguf_pytorch_utils.tqdm = partial(_counted, progress)  # its bar goes over what takes the time
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks what came from a GGUF as quantised, though the weights are plain numbers by now, and would refuse to save it
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _counted(progress: Progress, tensors: Sequence[Any], **_: object) -> Iterator[Any]:
    total, done = _STORED * sum(int(tensor.n_elements) for tensor in tensors), 0
    for tensor in tensors:
        yield tensor
        done += _STORED * int(tensor.n_elements)
        progress(done, total)
