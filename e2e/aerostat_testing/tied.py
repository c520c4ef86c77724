"""`python -m aerostat_testing.tied PID COMMAND...`: a program of somebody else that ends when its parent does.

Not for our own programs, which have `--die-with-parent`.
"""

import os
import signal
import sys

from aerostat_runtime.process import die_with_parent


def tied(command: list[str]) -> list[str]:
    """The command to start instead, from the thread that shall outlive the program: a thread's end counts as the parent's."""
    return [sys.executable, "-m", "aerostat_testing.tied", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.execv(sys.argv[2], sys.argv[2:])
