"""Token counts without a tokenizer: per model, EWMAs of body bytes per prompt token and of output tokens per call."""

from dataclasses import dataclass
from typing import Final

from aerostat_core.ids import NamespacedName

WEIGHT: Final = 0.2
DEFAULT_OUTPUT_TOKENS: Final = 128
DEFAULT_BYTES_PER_TOKEN: Final = 4.0
MAX_BYTES_PER_TOKEN: Final = 128  # longer than any token of the vocabularies in use: more text than this is surely too long


@dataclass(slots=True)
class _Estimate:
    bytes_per_token: float = DEFAULT_BYTES_PER_TOKEN
    n_output: float = DEFAULT_OUTPUT_TOKENS


class TokenEstimates:
    """Mutable; bounded by the number of declared models."""

    def __init__(self) -> None:
        self._models: dict[NamespacedName, _Estimate] = {}

    def n_prompt(self, model: NamespacedName, n_bytes: int) -> int:
        known = self._models.get(model)
        return max(1, int(n_bytes / (known.bytes_per_token if known is not None else DEFAULT_BYTES_PER_TOKEN)))

    def n_output(self, model: NamespacedName, max_tokens: int | None) -> int:
        known = self._models.get(model)
        usual = int(known.n_output) if known is not None else DEFAULT_OUTPUT_TOKENS
        return min(usual, max_tokens) if max_tokens is not None else usual

    def observe(self, model: NamespacedName, *, n_bytes: int, n_prompt: int, n_output: int) -> None:
        """Of a finished call. Counts of zero say nothing and are left out."""
        known = self._models.setdefault(model, _Estimate())
        if n_bytes > 0 and n_prompt > 0:
            known.bytes_per_token += WEIGHT * (n_bytes / n_prompt - known.bytes_per_token)
        if n_output > 0:
            known.n_output += WEIGHT * (n_output - known.n_output)

    def keep_only(self, models: set[NamespacedName]) -> None:
        for gone in self._models.keys() - models:
            del self._models[gone]
