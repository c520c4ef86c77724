"""What a failure says of a program's log."""

from pathlib import Path
from typing import Final

_N_LINES: Final = 25


def last_lines(log: Path) -> str:
    """Empty where it has not begun."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_N_LINES:]) if log.exists() else ""
