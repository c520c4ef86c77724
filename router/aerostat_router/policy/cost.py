"""`Cost(r, i) = dR + C_kv + C_act`, in seconds (Talaria eq. 1), and the ranking by it.

Each kind of work is charged once: the new tokens and the queue in dR, the recovery of a known prefix in C_kv, bringing the model up
in C_act. A prefix on the host is charged its recomputation: an engine restores only where that is cheaper, so this bounds it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aerostat_core.ids import Epoch, NamespacedName, Seconds
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
    if not holdings:
        return 0
    return max(0, min(max([held.n_tokens for held in holdings.values()]), call.n_prompt_tokens - 1))


def cost(call: CallView, candidate: Candidate, tier: Tier, n_prefix: int) -> Cost:
    """`n_prefix` is `n_reusable` of the call: a candidate without it pays for its recomputation."""
    activation = candidate.engine.activation_seconds
    n_new = call.n_prompt_tokens - n_prefix
    prefill = candidate.engine.timing.prefill.seconds
    work = candidate.ready_seconds - activation + prefill(n_new) + call.n_output_tokens * candidate.step_seconds
    kv = 0.0 if tier is Tier.DEVICE or not n_prefix else prefill(call.n_prompt_tokens) - prefill(n_new)
    return Cost(work, kv, activation)


def rank(call: CallView, candidates: Sequence[Candidate], holdings: Holdings, n_prefix: int) -> list[Ranked]:
    """`cost` of each, unsorted. Written out for those without the session, since it runs for each candidate of each call."""
    k, n_prompt, n_output = call.n_prompt_tokens.bit_length(), float(call.n_prompt_tokens), float(call.n_output_tokens)
    missing = Tier.MISSING
    held = {instance.name: view for instance, view in holdings.items()}
    ranked = [
        (c.ready_seconds + n_output * c.step_seconds + n_prompt * c.prefill_per_token[k], missing, c.place, c)
        for c in candidates
        if c.place not in held
    ]
    for c in [c for c in candidates if c.place in held] if held else ():
        tier = tier_on(held[c.place], c.engine.epoch)
        ranked.append((cost(call, c, tier, n_prefix).total, tier, c.place, c))
    return ranked
