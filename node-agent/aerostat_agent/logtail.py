"""The last lines of a process's log, for people: short, and without secrets."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MAX_LINES: Final = 20
_MAX_BYTES: Final = 16 << 10
_MAX_LINE: Final = 240
_HIDDEN: Final = "***"
# `token=…`, `"api_key": "…"`, `Authorization: Bearer …`: the value goes, the name stays. Counts of tokens are no secrets.
_SECRET: Final = re.compile(
    r"""(?ix) ((?:(?:api|admin|call|access)[_-]?key | password | secret | auth[_-]?token | hf_token | authorization) ["']? \s*[=:]\s*)
    (?:bearer\s+)? (["'][^"']*["'] | [^\s,;)]+)"""
)


def last_lines(path: Path, *, start: int = 0, secrets: Iterable[str] = (), n: int = MAX_LINES) -> str:
    """The last `n` lines that say something, from byte `start` on (0 where the file was cut since); empty without a log."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, 2)
            first = start if start <= end else 0
            if end - first > _MAX_BYTES:
                log.seek(end - _MAX_BYTES)
                log.readline()  # half a line may hold half a secret
            else:
                log.seek(first)
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip()[:_MAX_LINE] for line in re.split(r"[\r\n]+", redact(text, secrets)) if line.strip()]
    return "\n".join(lines[-n:])


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return _SECRET.sub(lambda m: m[1] + _HIDDEN, text)
