"""The part of a kubelet that our processes notice: whenever it is stopped, what it runs has ended."""

import asyncio
import sys
from pathlib import Path
from typing import Final

import pytest

from aerostat_testing.kubernetes.kubelet import Container, Pod

pytestmark = pytest.mark.cpu

LIMIT: Final = 20.0


async def test_a_container_that_is_stopped_while_it_starts_ends(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    container = Container(Pod(name="sleeper", argv=argv, log=str(tmp_path / "log"), grace=LIMIT / 2, stage=0))
    running = asyncio.create_task(container.run())
    await asyncio.sleep(0)  # the process is there, and the container does not have it yet
    assert not running.done()
    async with asyncio.timeout(LIMIT):
        await container.stop()
        await running
