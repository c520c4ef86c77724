"""What a process was started as, of processes that may end at any moment."""

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Empty for one that has ended, reaped or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
