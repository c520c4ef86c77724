"""`python -m aerostat_engine.tiny OUT`: a model of random weights that serves like a real one, for tests and for trying things out.

Byte-level tokenizer with a chat template; the KV shape differs from SmolLM2's. The weights depend on the architecture and the seed alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MAX_CONTEXT_TOKENS = 8192
ARCHITECTURES = ("qwen3", "llama")

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the chat's special tokens."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=MAX_CONTEXT_TOKENS
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def tiny_model(architecture: str, seed: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Weights are wide enough that greedy tokens have clear margins, which tests of exactness need."""
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(seed)
    if architecture == "qwen3":
        qwen3 = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_CONTEXT_TOKENS,
            tie_word_embeddings=True,
            eos_token_id=eos,
            initializer_range=0.12,
        )
        return Qwen3ForCausalLM(qwen3)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=False,
        eos_token_id=eos,
        initializer_range=0.12,
    )
    return LlamaForCausalLM(llama)


def write(out: Path, architecture: str = "qwen3", seed: int = 0) -> Path:
    """Write the model to the folder `out` and return it."""
    tokenizer = byte_tokenizer()
    tiny_model(architecture, seed, tokenizer).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m aerostat_engine.tiny", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    sys.stdout.write(f"{write(args.out, args.arch, args.seed)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
