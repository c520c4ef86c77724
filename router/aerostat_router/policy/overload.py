"""What becomes of a call that no engine may take now: it waits, goes elsewhere, or is refused with a typed reason."""

from dataclasses import dataclass
from enum import StrEnum

from aerostat_core.ids import ModelName
from aerostat_core.specs import Overload, OverloadPolicy


class Shedding(StrEnum):
    HOLD = "hold"
    SPILL = "spill"
    REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    shedding: Shedding
    spill_to: ModelName | None = None


def on_overload(overload: Overload, *, is_running: bool, can_spill: bool) -> Verdict:
    """`is_running`: some engine has the model open and is merely full. A model that must first be opened is never rejected
    for that: its calls are held over the wake. A spill target that cannot take the call leaves it queued.
    """
    if overload.policy is OverloadPolicy.SPILL and overload.spill_to is not None and can_spill:
        return Verdict(shedding=Shedding.SPILL, spill_to=overload.spill_to)
    if overload.policy is OverloadPolicy.REJECT and is_running:
        return Verdict(shedding=Shedding.REJECT)
    return Verdict(shedding=Shedding.HOLD)
