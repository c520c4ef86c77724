"""Time as an argument. Shells read a clock and hand `now` to policies; policies never see a clock."""

from typing import Protocol

from aerostat_core.ids import Seconds


class Clock(Protocol):
    def monotonic(self) -> Seconds:
        """For intervals and deadlines inside one process."""
        ...

    def wall(self) -> Seconds:
        """Seconds since 1970, for what crosses to other processes or to people."""
        ...
