"""How every process of ours logs. Who reads the lines, and where they go, its parent decides."""

import logging
from pathlib import Path


def set_up_logs(level: int | str = logging.INFO, *, file: Path | None = None) -> None:
    """Once, at the start of a process. To standard error where no file is given. Raises OSError for a file that cannot be opened."""
    logging.basicConfig(filename=file, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it tells of each file event, several times a second
    logging.raiseExceptions = False  # a full disk costs log lines, not a traceback for each of them
