"""The token probe: a fixed prompt and the first tokens that a healthy engine answers greedily. Made by transformers, not by what it tests.

Among the prompts that are tried, the one whose greedy choices are the clearest wins, so that other kernels' rounding cannot change them.
Imports torch: made once per model and number type, then read from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

N_TOKENS = 4
_PROMPTS = (
    "one two three four five six seven eight",
    "a b c d e f g h i j k l m n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is",
    "yes no yes no yes no yes no yes no",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProbe:
    """`margin` is the smallest lead, in logits, of a chosen token over the next best."""

    prompt_ids: list[int]
    expected_ids: list[int]
    margin: float


def make_probe(path: Path, dtype: str, *, trust_remote_code: bool) -> TokenProbe:
    """Load the model in `dtype` and choose the clearest prompt. No hub is asked, not even by code that the model brings."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, local_files_only=True
    ).eval()
    with torch.inference_mode():
        return max((_try(model, tokenizer.encode(text)) for text in _PROMPTS), key=lambda probe: probe.margin)


def _try(model: torch.nn.Module, prompt_ids: list[int]) -> TokenProbe:
    made: list[int] = []
    margin = float("inf")
    past = None
    step = torch.tensor([prompt_ids])
    for _ in range(N_TOKENS):
        answer = model(input_ids=step, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        best = answer.logits[0, -1].float().topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        made.append(int(best.indices[0]))
        step = torch.tensor([[made[-1]]])
    return TokenProbe(prompt_ids=prompt_ids, expected_ids=made, margin=margin)
