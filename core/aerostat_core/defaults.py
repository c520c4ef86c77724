"""Defaults of the protocols between the parts, each in one place. What a person sets is in the CRDs instead."""

from typing import Final

from aerostat_core.ids import Seconds

HEARTBEAT: Final[Seconds] = 0.2
STALE_AFTER: Final[Seconds] = 3 * HEARTBEAT
SILENT_AFTER: Final[Seconds] = 10 * HEARTBEAT
LEASE_TTL: Final[Seconds] = 1.0
DEMAND_WINDOW: Final[Seconds] = 10.0
HOLD_BUDGET_IN_TTFT: Final = 10  # times the SLO's TTFT
HOLD_BUDGET_MAX: Final[Seconds] = 120.0
RESTART_DELAYS: Final[tuple[Seconds, ...]] = (1.0, 2.0, 4.0, 8.0, 16.0)  # then Failed
PLACEMENT_HYSTERESIS: Final = 0.10
PLACEMENT_MOVES_PER_CYCLE: Final = 1
STATUS_FIGURES_EVERY: Final[Seconds] = 30.0
STATUS_STATE_AT_MOST_EVERY: Final[Seconds] = 1.0
