"""The system's clock."""

import time

from aerostat_core.ids import Seconds


class SystemClock:
    def monotonic(self) -> Seconds:
        return time.monotonic()

    def wall(self) -> Seconds:
        return time.time()
