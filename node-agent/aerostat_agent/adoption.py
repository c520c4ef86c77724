"""What a new agent does with each process that the keeper lists. Pure: the executor signals and forgets."""

from collections.abc import Iterable
from dataclasses import dataclass

from aerostat_agent.keeper_client import KeptProcess
from aerostat_agent.notes import EngineNote, UnreadableNoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """`engines` go on as they are. `strays` are killed: preparations, unreadable notes, a second engine of one model.
    `ended` are accounted for and forgotten; an engine among them has its note."""

    engines: tuple[tuple[KeptProcess, EngineNote], ...]
    strays: tuple[KeptProcess, ...]
    ended: tuple[tuple[KeptProcess, EngineNote | None], ...]


def sort_out(processes: Iterable[KeptProcess]) -> Adoption:
    """Of several engines of one model the latest stays."""
    engines: dict[object, tuple[KeptProcess, EngineNote]] = {}
    strays: list[KeptProcess] = []
    ended: list[tuple[KeptProcess, EngineNote | None]] = []
    for process in sorted(processes, key=lambda p: p.epoch):
        try:
            note = EngineNote.from_bytes(process.note)
        except UnreadableNoteError:
            note = None
        if process.exit_code is not None:
            ended.append((process, note))
        elif note is None:
            strays.append(process)
        else:
            if (older := engines.get(note.key)) is not None:
                strays.append(older[0])
            engines[note.key] = (process, note)
    return Adoption(engines=tuple(engines.values()), strays=tuple(strays), ended=tuple(ended))
