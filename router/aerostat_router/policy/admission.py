"""May this engine take one more call now, and is a new replica worth opening (Talaria section 3.3, eq. 2).

These are predictions to avoid overload, not guarantees: the engine has the last word on its own batch and pages.
"""

from typing import Final

from aerostat_core.defaults import DEMAND_WINDOW
from aerostat_core.ids import Seconds
from aerostat_router.policy.views import CallView, Candidate

GAMMA: Final = 0.9  # share of the TTFT target that a round may fill


def why_not(call: CallView, candidate: Candidate, *, ttft: Seconds, n_reused_tokens: int) -> str | None:
    """None: it may take the call. Else the check that failed.

    A call whose tokens can never fit is refused here; one that has to wait for a running one may do so inside the
    engine as long as the predicted wait leaves room for the TTFT target. `n_reused_tokens` lie in its cache already.
    """
    engine, load = candidate.engine, candidate.load
    if 0 < engine.kv_capacity_tokens < call.n_prompt_tokens:
        return f"its KV takes {engine.kv_capacity_tokens} tokens, the call has about {call.n_prompt_tokens}"
    units = engine.running + engine.waiting + load.n_calls + load.n_leased
    n_new = call.n_prompt_tokens - n_reused_tokens
    has_unit = engine.max_running == 0 or units < engine.max_running
    has_pages = engine.kv_capacity_tokens == 0 or load.tokens + n_new <= engine.kv_free_tokens
    if has_unit and has_pages:
        return None
    wait = engine.queue_seconds + load.seconds
    if wait > 0 and wait <= GAMMA * ttft and units < 2 * engine.max_running:
        return None
    what = "all its admission units are taken" if not has_unit else "it has too few free pages"
    return f"{what} and the predicted wait is {wait:.3g} s"


def is_worth_opening(
    candidate: Candidate, *, n_open: int, n_calls: int, wait: Seconds, replica_penalty: Seconds, window: Seconds = DEMAND_WINDOW
) -> bool:
    """Eq. 2, `gain > T_swap + mu * dW + nu`, for one more replica beside `n_open` (>= 1) others.

    Gain is the waiting time that the next window's `n_calls` (arrivals and likely returns) would be spared when the load
    of `n_open` replicas, whose calls now wait `wait` each, spreads over one more. No call waits longer than the window counts.
    """
    engine = candidate.engine
    gain = n_calls * min(wait, window) / (n_open + 1)
    return gain > engine.open_seconds + engine.memory_price * engine.weights_bytes + replica_penalty
