"""Children of `aerostat up`: real processes, since starting and ending them is all that the module does."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from aerostat_cli.standalone import children
from aerostat_cli.standalone.children import Child, ChildSpec, Family
from aerostat_core.errors import SettingError
from aerostat_runtime.process import adopt_orphans
from aerostat_testing.waiting import eventually

pytestmark = pytest.mark.cpu

PR_SET_CHILD_SUBREAPER = 36
SLEEPS = "import time; time.sleep(60)"
IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
PARENT_OF_SLEEPER = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]).pid, flush=True)
time.sleep(60)
"""


def spec(tmp_path: Path, code: str, *, stop_grace: float = 5.0) -> ChildSpec:
    log = tmp_path / "child.log"
    log.touch()
    return ChildSpec(
        name="child", argv=(sys.executable, "-c", code), log=log, stop_grace=stop_grace, what_it_means="calls fail until it is back"
    )


@asynccontextmanager
async def supervised(*specs: ChildSpec) -> AsyncIterator[tuple[Family, list[Child], list[str]]]:
    said: list[str] = []
    family = Family(said.append)
    members = [family.add(s) for s in specs]
    tasks = [asyncio.create_task(m.run()) for m in members]
    try:
        yield family, members, said
    finally:
        async with asyncio.timeout(20):
            await family.stop(members)
            await asyncio.gather(*tasks)


async def first_line(log: Path) -> str:
    text = await eventually(lambda: text if (text := log.read_text()).endswith("\n") else None, "the child printed a line")
    return text.split("\n")[0]


async def pid_other_than(child: Child, old: int | None) -> int:
    return await eventually(lambda: pid if (pid := child.pid) != old else None, "the child runs")


async def test_a_killed_child_is_started_again_and_the_user_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "RESTART_DELAYS", (0.0,))
    async with supervised(spec(tmp_path, SLEEPS)) as (_, (child,), said):
        first = await pid_other_than(child, None)
        os.kill(first, signal.SIGKILL)
        await pid_other_than(child, first)
        assert said == ["child ended by SIGKILL; calls fail until it is back. Starting it again in 0 s"]
    assert child.pid is None


async def test_a_child_that_dies_again_and_again_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "RESTART_DELAYS", (0.0, 60.0))
    async with supervised(spec(tmp_path, "raise SystemExit('no such node')")) as (_, _, said):
        await eventually(lambda: len(said) == 2, "it died twice")
        assert "with exit code 1" in said[0]
        assert "no such node" not in said[0]
        assert said[1].endswith("    no such node\n    no such node")


async def test_a_child_with_a_bad_setting_is_not_started_again(tmp_path: Path) -> None:
    code = "import sys; print('--listen must be HOST:PORT', flush=True); sys.exit(2)"
    child = Family(pytest.fail).add(spec(tmp_path, code))
    with pytest.raises(SettingError, match="--listen must be HOST:PORT"):
        await child.run()


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with supervised(spec(tmp_path, IGNORES_SIGTERM, stop_grace=0.1)) as (family, (child,), said):
        await first_line(child.spec.log)
        pid = child.pid
        await family.stop([child])
        assert said == ["child did not end within 0.1 s: killed"]
        assert pid is not None
        assert not psutil.pid_exists(pid)


@pytest.fixture
def adopting() -> Iterator[None]:
    """For one test: whoever adopts and does not reap keeps the dead of later tests."""
    adopt_orphans()
    yield
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("adopting")
async def test_what_a_killed_child_leaves_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "RESTART_DELAYS", (60.0,))
    async with supervised(spec(tmp_path, PARENT_OF_SLEEPER)) as (_, (child,), said):
        orphan = int(await first_line(child.spec.log))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await eventually(lambda: said, "the user hears of it")
        assert not psutil.pid_exists(orphan)


async def test_ctrl_c_in_the_terminal_does_not_reach_a_child(tmp_path: Path) -> None:
    async with supervised(spec(tmp_path, SLEEPS)) as (_, (child,), _):
        pid = await pid_other_than(child, None)
        assert os.getpgid(pid) == pid
