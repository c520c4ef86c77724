"""How long an engine takes: prefill by length, decode by batch. Measured by engines, used by routers and the simulator.

A profile is a value; `observe_*` returns the next one. Between known points it interpolates, beyond them it goes on
with the nearest cost per token. An empty profile answers with the assumption that it was made with, so that a new
engine is neither free nor forbidden.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from aerostat_core.ids import Seconds

WEIGHT = 0.2  # of a new observation in the EWMA (Talaria section 4.1: profiles are EWMAs from reported rounds)


def _bucket(n: int) -> int:
    """The power of two at or above n: points that are close share one average."""
    return 1 << max(n - 1, 0).bit_length()


def _interpolate(points: Mapping[int, Seconds], n: int) -> Seconds:
    keys = sorted(points)
    i = bisect_left(keys, n)
    if i < len(keys) and keys[i] == n:
        return points[n]
    if i == 0:
        return points[keys[0]] * n / keys[0]
    if i == len(keys):
        return points[keys[-1]] * n / keys[-1]
    low, high = keys[i - 1], keys[i]
    share = (n - low) / (high - low)
    return points[low] + share * (points[high] - points[low])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyProfile:
    """`prefill` seconds by new tokens (powers of two), `decode` seconds per step by batch (powers of two)."""

    prefill: Mapping[int, Seconds] = field(default_factory=dict)
    decode: Mapping[int, Seconds] = field(default_factory=dict)
    assumed_prefill_per_token: Seconds = 0.001
    assumed_decode: Seconds = 0.05

    def observe_prefill(self, n_tokens: int, seconds: Seconds) -> Self:
        """Raises ValueError for less than a token or negative time."""
        return replace(self, prefill=_averaged(self.prefill, n_tokens, seconds))

    def observe_decode(self, batch: int, seconds: Seconds) -> Self:
        """Raises ValueError for an empty batch or negative time."""
        return replace(self, decode=_averaged(self.decode, batch, seconds))

    def prefill_seconds(self, n_tokens: int) -> Seconds:
        if n_tokens <= 0:
            return 0.0
        if not self.prefill:
            return n_tokens * self.assumed_prefill_per_token
        return _interpolate(self.prefill, n_tokens)

    def decode_seconds(self, batch: int) -> Seconds:
        """Seconds of one step of `batch` sequences: what each of them waits for its next token."""
        if batch <= 0:
            return 0.0
        if not self.decode:
            return self.assumed_decode
        below = min(self.decode)
        return self.decode[below] if batch <= below else _interpolate(self.decode, batch)


def _averaged(points: Mapping[int, Seconds], n: int, seconds: Seconds) -> dict[int, Seconds]:
    if n < 1 or seconds < 0:
        raise ValueError(f"an observation needs n >= 1 and seconds >= 0, got n={n}, seconds={seconds}")
    key = _bucket(n)
    scaled = seconds * key / n  # to the bucket's own size: cost per token is locally constant
    old = points.get(key)
    return {**points, key: scaled if old is None else old + WEIGHT * (scaled - old)}
