"""Kubernetes quantities and durations: `64Gi`, `512M`, `800ms`, `1.5s`, `1h30m`."""

import re
from decimal import Decimal, InvalidOperation

from aerostat_core.ids import Bytes, Seconds

_SIZE = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_SIZE_UNITS = {
    None: 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_DURATION_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}


def parse_size(text: str | int) -> Bytes:
    """Bytes of a quantity. Raises ValueError that shows the expected form."""
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"expected a size such as 512Mi or 64Gi, got {text!r}")
    return int(Decimal(match[1]) * _SIZE_UNITS[match[2]])


def parse_duration(text: str) -> Seconds:
    """Seconds of a duration. Raises ValueError that shows the expected form."""
    matches = list(_DURATION.finditer(text)) if isinstance(text, str) else []
    if not matches or "".join(m[0] for m in matches) != text:
        raise ValueError(f"expected a duration such as 800ms, 1.5s or 1h30m, got {text!r}")
    try:
        return float(sum(Decimal(m[1]) * _DURATION_UNITS[m[2]] for m in matches))
    except InvalidOperation as error:
        raise ValueError(f"expected a duration such as 800ms, 1.5s or 1h30m, got {text!r}") from error


def format_size(n: Bytes) -> str:
    """The shortest quantity that people read at a glance: `1.5Gi`, `270Mi`, `12Ki`, `17`."""
    for unit in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        if abs(n) >= _SIZE_UNITS[unit]:
            return f"{n / _SIZE_UNITS[unit]:.4g}{unit}"
    return str(n)


def format_duration(seconds: Seconds) -> str:
    """`350ms`, `1.5s`, `2m`, `1h30m`; rounded to what a person would say."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m" if minutes else f"{hours}h"
