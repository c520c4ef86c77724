"""Events come out the same however the stream is cut and whatever its line ends are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_router.http.sse import EventReader

pytestmark = pytest.mark.cpu


def read(*pieces: bytes) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_cut_at_any_byte_changes_nothing(end: bytes) -> None:
    lines = [
        b": comment",
        b"event: a",
        b"data: one",
        b"",
        b"data:two",
        b"data:  lines",
        b"id: 3",
        b"",
        b"event: x",
        b"",
        b"data: x",
        b"",
        b"z",
    ]
    stream = end.join(lines)
    for i in range(len(stream)):
        assert read(stream[:i], stream[i:]) == [b"one", b"two\n lines", b"x"]


@given(st.lists(st.binary(max_size=20).map(lambda d: d.replace(b"\r", b"").replace(b"\n", b"")), max_size=8), st.integers(1, 30))
def test_what_was_written_is_read(payloads: list[bytes], size: int) -> None:
    stream = b"".join(b"data: %b\n\n" % payload for payload in payloads)
    assert read(*[stream[i : i + size] for i in range(0, len(stream), size)]) == payloads


def test_an_event_that_never_ends_is_refused() -> None:
    reader = EventReader(max_event_bytes=10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        list(reader.feed(b"data: 01234567890"))
