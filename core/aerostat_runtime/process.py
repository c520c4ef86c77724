"""What a process of ours asks of the kernel about itself."""

import ctypes
import os
import signal

from aerostat_core.errors import SettingError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Get `signum` when the parent ends, however it ends.

    Called from the main thread of the child, which names the parent that it expects: one that died before the call
    is noticed too. Raises SystemExit then.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent (pid {parent_pid}) is gone already")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended, so that they can be reaped here."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise SettingError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
