"""Log files of the keeper's processes: appended to, private, bounded.

The child writes through a descriptor of its own, so a file is cut in place (O_APPEND keeps its next write right);
what is cut off stays in one older file beside it.
"""

import os
import shutil
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 64 << 20


def open_log(path: Path) -> int:
    """A descriptor that appends. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def bound_log(path: Path, limit_bytes: int = MAX_LOG_BYTES) -> bool:
    """Cut the file when it is over the limit. Lines written between the copy and the cut are lost. Raises OSError."""
    if not path.exists() or path.stat().st_size <= limit_bytes:
        return False
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)
    return True
