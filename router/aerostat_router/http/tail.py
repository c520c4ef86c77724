"""The end of a body, kept while the body passes through, so that its token usage can be read once, at completion.

Parsing every event costs more than moving it; the usage object lies in the last events of a stream and near the end of a JSON body.
"""

import json
import re
from typing import Any

_DECODER = json.JSONDecoder()
# Inside a JSON string the closing quote of this key would be escaped, so that text which a model wrote never matches.
_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')


class Tail:
    """At most `max_bytes` of the end are given, at most three times that is held, and each byte is copied once or twice."""

    __slots__ = ("_n_held", "_parts", "max_bytes", "n_bytes")

    def __init__(self, max_bytes: int = 16 << 10) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0  # of the whole body
        self._parts: list[bytes] = []
        self._n_held = 0

    def add(self, data: bytes) -> None:
        n = len(data)
        self.n_bytes += n
        if n > self.max_bytes:
            data = data[-self.max_bytes :]
            n = self.max_bytes
        self._parts.append(data)
        self._n_held += n
        if self._n_held > 2 * self.max_bytes:
            self._parts = [b"".join(self._parts)[-self.max_bytes :]]
            self._n_held = self.max_bytes

    def value(self) -> bytes:
        return b"".join(self._parts)[-self.max_bytes :]

    def usage(self) -> dict[str, Any] | None:
        """The last usage object of a stream or JSON body; None where there is none, or where it was cut."""
        text = self.value()
        found = list(_USAGE.finditer(text))
        if not found:
            return None
        try:
            usage, _ = _DECODER.raw_decode(text[found[-1].end() :].decode("utf-8", "replace"))
        except ValueError:
            return None
        return usage if isinstance(usage, dict) else None
