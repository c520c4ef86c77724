"""`python -m aerostat_engine.prepare` as a process of its own, on a disk that takes only so much if that is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aerostat_core.ids import Bytes, Seconds

LIMIT: Seconds = 120.0


def start_preparing(
    uri: str,
    cache: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    file_limit: Bytes | None = None,
    under: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """With `file_limit`, a file that grows larger than that fails to. `under`: a command that runs what follows it.

    `prlimit` sets it, not Python between fork and exec: threads of other tests, gRPC's above all, may end such a child before it is one.
    """
    command = [sys.executable, "-m", "aerostat_engine.prepare", "--uri", uri, "--cache", str(cache), *options]
    if file_limit is not None:
        command = ["prlimit", f"--fsize={file_limit}", *command]
    return subprocess.Popen([*under, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str], *, limit: Seconds = LIMIT) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and what it said, line by line. One that takes longer is killed."""
    try:
        said, complaints = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    lines = [json.loads(line) for line in said.splitlines()]
    assert lines, f"it ended with {process.returncode} and said nothing: {complaints[-2000:]}"
    return process.returncode, lines
