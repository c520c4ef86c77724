"""Process sessions as the kernel shows them: who belongs to one, and signals to all of them.

An engine is its whole session: SGLang puts its children into process groups of their own, so a group is not enough.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_DEAD: Final = frozenset({"Z", "X", "x"})  # a zombie holds no memory and takes no signal


def living() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, session) of every process that still executes."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = (entry / "stat").read_text()
            fields = stat[stat.rindex(")") + 2 :].split()  # the command before may hold blanks
            state, parent, session, n_threads = fields[0], int(fields[1]), int(fields[3]), int(fields[17])
            if state not in _DEAD or n_threads > 1:  # a first thread may end before the others
                yield int(entry.name), parent, session


def members_of(session: int) -> tuple[int, ...]:
    return tuple(pid for pid, _, of in living() if of == session)


def signal_session(session: int, signum: int) -> int:
    """Send the signal to each member; returns how many got it."""
    n = 0
    for pid in members_of(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
            n += 1
    return n
