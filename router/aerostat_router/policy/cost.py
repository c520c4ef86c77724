"""`Cost(r, i) = dR + C_kv + C_act`, in seconds (Talaria eq. 1), and the ranking by it.

Each kind of work is charged once: the new tokens and the queue in dR, the recovery of a known prefix in C_kv, bringing the model up
in C_act. A prefix on the host is charged its recomputation: an engine restores only where that is cheaper, so this bounds it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aerostat_core.ids import Epoch, NamespacedName, Seconds
from aerostat_core.specs import EngineState
from aerostat_router.policy.views import CallView, Candidate, SessionView, Tier

Holdings = Mapping[NamespacedName, SessionView]  # what is known of the call's session, by instance


class Cost(NamedTuple):
    """Seconds, by cause."""

    work: Seconds
    kv: Seconds
    activation: Seconds

    @property
    def total(self) -> Seconds:
        return self.work + self.kv + self.activation


# What a call would cost on a candidate, its tier there, the instance's name, the candidate. Sorts by the first that differs, so that
# two routers that know the same rank the same; names are unique, since a model and its instances share a namespace.
Ranked = tuple[Seconds, Tier, str, Candidate]


def tier_on(held: SessionView | None, epoch: Epoch) -> Tier:
    """Of an older engine run everything is missing."""
    return held.tier if held is not None and held.epoch == epoch else Tier.MISSING


def n_reusable(call: CallView, holdings: Holdings) -> int:
    """Prompt tokens that some instance need not compute; at least the last one always is."""
    longest = max((held.n_tokens for held in holdings.values()), default=0)
    return max(0, min(longest, call.n_prompt_tokens - 1))


def cost(call: CallView, candidate: Candidate, tier: Tier, n_prefix: int) -> Cost:
    """`n_prefix` is `n_reusable` of the call: a candidate without it pays for its recomputation."""
    engine, load = candidate.engine, candidate.load
    n_new = call.n_prompt_tokens - n_prefix
    prefill = engine.timing.prefill.seconds
    batch = max(1, engine.running + load.n_calls + 1)
    work = engine.queue_seconds + load.seconds + prefill(n_new) + call.n_output_tokens * engine.timing.decode.seconds(batch)
    kv = 0.0 if tier is Tier.DEVICE or not n_prefix else prefill(call.n_prompt_tokens) - prefill(n_new)
    return Cost(work, kv, _activation(candidate))


def _activation(candidate: Candidate) -> Seconds:
    engine = candidate.engine
    if engine.state is EngineState.OPEN:
        return 0.0
    return engine.open_in_seconds if engine.is_waking and engine.open_in_seconds > 0 else engine.open_seconds


def rank(call: CallView, candidates: Sequence[Candidate], holdings: Holdings) -> list[Ranked]:
    """`cost` of each, unsorted. Written out, since it runs for each candidate of each call."""
    n_prompt, n_output = call.n_prompt_tokens, call.n_output_tokens
    n_prefix = n_reusable(call, holdings)
    n_new = n_prompt - n_prefix
    k_prompt, k_new = n_prompt.bit_length(), n_new.bit_length()
    held = {instance.name: view for instance, view in holdings.items()}
    missing, device, is_open = Tier.MISSING, Tier.DEVICE, EngineState.OPEN
    ranked = []
    for candidate in candidates:
        engine, load = candidate.engine, candidate.load
        name, per_token, per_sequence = engine.place, engine.prefill_per_token, engine.decode_per_sequence
        batch = engine.running + load.n_calls + 1
        step = per_sequence[batch.bit_length()] * batch if batch > 1 else per_sequence[1]
        total = engine.queue_seconds + load.seconds + n_output * step
        tier = tier_on(held[name], engine.epoch) if name in held else missing
        if tier is device:
            total += n_new * per_token[k_new]
        else:  # the prefix too has to be computed
            total += n_prompt * per_token[k_prompt]
        if engine.state is not is_open:
            total += _activation(candidate)
        ranked.append((total, tier, name, candidate))
    return ranked
