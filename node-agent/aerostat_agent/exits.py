"""What the end of an engine process means: from its exit code and the last lines of its log to a failure for people."""

import re
import signal
from pathlib import Path
from typing import Final

from aerostat_agent.logtail import last_lines
from aerostat_agent.notes import EngineNote
from aerostat_agent.policy.tracks import Failure
from aerostat_core.engine_launch import EXIT_BAD_SPEC, EXIT_PLUGIN_MISSING

_PORT_TAKEN: Final = re.compile(r"address already in use|port \d+ is (already in use|not available)", re.IGNORECASE)
_PERMANENT: Final = {EXIT_BAD_SPEC: "EngineSpecRefused", EXIT_PLUGIN_MISSING: "EnginePluginMissing"}


def describe_exit(note: EngineNote, log_path: Path, exit_code: int) -> Failure:
    """An engine whose end nobody asked for."""
    tail = last_lines(log_path, start=note.log_offset, secrets=(note.call_key, note.admin_key))
    how = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    message = (
        f"the engine ended with {how}; the last lines of its log:\n{tail}" if tail else f"the engine ended with {how}, its log is empty"
    )
    if (permanent := _PERMANENT.get(exit_code)) is not None:
        return Failure(reason=permanent, message=message, is_permanent=True)
    if _PORT_TAKEN.search(tail):
        return Failure(reason="PortTaken", message=message, is_port_taken=True)
    return Failure(reason="EngineExited", message=message)
