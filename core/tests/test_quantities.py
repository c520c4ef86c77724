"""Sizes and durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerostat_core.quantities import format_duration, format_size, parse_duration, parse_size

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("0", 0),
        ("17", 17),
        (17, 17),
        ("1k", 1000),
        ("1Ki", 1024),
        ("1.5Gi", 3 << 29),
        ("64Gi", 64 << 30),
        ("512M", 512 * 10**6),
        ("0.5", 0),
    ],
)
def test_sizes_are_read(text: str | int, n: int) -> None:
    assert parse_size(text) == n


@pytest.mark.parametrize("text", ["", "Gi", "-1", "1gi", "1 Gi", "1Gi ", "1e3", ".5Gi", "1.Gi", "1Gi\n", True, None, 1.5, -3])
def test_other_sizes_are_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="a size such as 512Mi or 64Gi"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0.0), ("800ms", 0.8), ("1.5s", 1.5), ("2m", 120.0), ("1h30m", 5400.0), ("1m1s1ms", 61.001), ("0.1s", 0.1)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "s", "-1s", "1d", "1 s", "1s ", "1.s", "1s2", "1S", "1s\n", None, 1])
def test_other_durations_are_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="a duration such as 800ms"):
        parse_duration(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0"), (17, "17"), (12 << 10, "12Ki"), (3 << 29, "1.5Gi"), (270 << 20, "270Mi"), (1023, "1023")]
)
def test_sizes_are_written_for_people(n: int, text: str) -> None:
    assert format_size(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.35, "350ms"), (1.5, "1.5s"), (10.0, "10s"), (120.0, "2m"), (135.0, "2m15s"), (5400.0, "1h30m"), (7200.0, "2h")],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 2**60))
def test_a_written_size_is_read_back_to_four_digits(n: int) -> None:
    assert abs(parse_size(format_size(n)) - n) <= n * 5.1e-4 + 1


@given(st.floats(0, 10**7))
def test_a_written_duration_is_read_back_nearly(seconds: float) -> None:
    step = 0.0005 if seconds < 1 else 0.05 if seconds < 60 else 0.5 if seconds < 3600 else 60
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= step * 1.001


@given(st.integers(0, 2**62))
def test_bytes_as_plain_digits_are_exact(n: int) -> None:
    assert parse_size(str(n)) == parse_size(n) == n
