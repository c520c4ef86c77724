"""What the agent writes onto the keeper's record of a process, so that the next agent knows what runs.

The agent keeps no state on disk: these notes are its memory. They hold the engine's keys, so they are never logged.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from aerostat_agent.policy.memory import Footprint
from aerostat_agent.policy.tracks import EngineKey
from aerostat_core.ids import Bytes, ModelName, NamespacedName


class UnreadableNoteError(ValueError):
    """Some other version wrote it: the process cannot be adopted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProbe:
    """Greedy continuation of `prompt_ids` must begin with `expected_ids`; nothing expected: any token will do."""

    prompt_ids: tuple[int, ...]
    expected_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model on this machine's disk, and what was read from it. `dtype` is what its weights are served in."""

    path: str
    dtype: str
    weights_bytes: Bytes
    kv_bytes_per_token: Mapping[str, Bytes]  # by the number type of the KV
    context_tokens: int
    probe: TokenProbe

    def kv_bytes(self, kv_dtype: str) -> Bytes:
        """Per token; `auto` is the weights' own type."""
        return self.kv_bytes_per_token[self.dtype if kv_dtype == "auto" else kv_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNote:
    instance: str
    model: str
    generation: int
    fingerprint: str
    host: str
    port: int
    log_offset: int  # where this process's lines begin in the log of its model
    call_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    footprint: Footprint
    prepared: PreparedModel

    @property
    def key(self) -> EngineKey:
        return EngineKey(NamespacedName.parse(self.instance), ModelName(self.model))

    def to_bytes(self) -> bytes:
        return json.dumps({"engine": asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, note: bytes) -> Self:
        """Raises UnreadableNoteError."""
        try:
            raw = json.loads(note)["engine"]
            prepared = raw["prepared"]
            probe = TokenProbe(**{name: tuple(ids) for name, ids in prepared["probe"].items()})
            parsed = cls(**(raw | {"footprint": Footprint(**raw["footprint"]), "prepared": PreparedModel(**(prepared | {"probe": probe}))}))
            NamespacedName.parse(parsed.instance)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableNoteError(f"a process carries a note that this agent cannot read: {error!r}") from error
        return parsed
