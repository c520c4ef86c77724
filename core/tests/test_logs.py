"""What every process of ours writes to its log, and what it does where that cannot be written."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

PROGRAM = """
import logging, sys
from pathlib import Path
from aerostat_runtime.logs import set_up_logs
set_up_logs(file=Path(sys.argv[1]) if sys.argv[1:] else None)
logging.getLogger("watchfiles.main").info("1 change detected")
logging.getLogger("watchfiles.main").warning("too many files")
logging.getLogger("aerostat").info("served")
"""


def log_of(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout == ""
    return done.stderr


def test_events_of_files_are_not_told() -> None:
    lines = [line.split(" ", 2)[2] for line in log_of().splitlines()]
    assert lines == ["WARNING watchfiles.main: too many files", "INFO aerostat: served"]


def test_a_log_goes_to_a_file(tmp_path: Path) -> None:
    assert log_of(str(tmp_path / "x.log")) == ""
    assert "INFO aerostat: served" in (tmp_path / "x.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_brings_no_traceback() -> None:
    assert "Traceback" not in log_of("/dev/full")
