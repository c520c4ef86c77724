"""Server-sent events out of a byte stream (HTML standard §9.2.6), as far as inference APIs use them: the data of each event."""

import re
from collections.abc import Iterator

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the very end may be the half of a CRLF


class EventReader:
    """`max_event_bytes` bounds what an event that never ends can hold."""

    def __init__(self, max_event_bytes: int = 4 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._n_data = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Gives the events that are whole now. Comments, ids, names, and events without data are skipped. ValueError past the bound."""
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        for line in lines:
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                self._data, self._n_data = [], 0
            elif line.startswith(b"data:"):
                value = line[5:].removeprefix(b" ")
                self._n_data += len(value)
                self._data.append(value)
        if self._n_data + len(self._rest) > self._max_event_bytes:
            raise ValueError(f"an event of more than {self._max_event_bytes} bytes")
