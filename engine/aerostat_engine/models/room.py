"""Room for a model on this machine's disk: asked for before it is taken, so that no work ends half done for the lack of it.

Who gives room, and what has to go for it, is the agent's to decide; without one, the disk itself is the limit.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from aerostat_core.errors import PermanentError
from aerostat_core.ids import Bytes
from aerostat_core.quantities import format_size
from aerostat_runtime.model_cache import ModelCache


class NoRoomError(PermanentError):
    """`need` bytes more are needed for the model `entry`."""

    def __init__(self, reason: str, message: str, *, entry: str, need: Bytes) -> None:
        super().__init__(reason, message)
        self.entry = entry
        self.need = need


@dataclass(slots=True, kw_only=True)
class Room:
    """`granted`: how much may be added to the cache; None: as much as the disk takes."""

    cache: ModelCache
    granted: Bytes | None = None

    def take(self, entry: str, need: Bytes, what: str) -> None:
        """Raises NoRoomError."""
        free = shutil.disk_usage(self.cache.root).free
        if self.granted is not None and need > self.granted:
            message = f"{what} takes {format_size(need)} in {self.cache.root}, {format_size(self.granted)} are granted: raise --room"
            raise NoRoomError("CacheFull", message, entry=entry, need=need)
        if need > free:
            message = f"{what} takes {format_size(need)} in {self.cache.root}, {format_size(free)} are free: free disk space"
            raise NoRoomError("DiskFull", message, entry=entry, need=need)
        if self.granted is not None:
            self.granted -= need
