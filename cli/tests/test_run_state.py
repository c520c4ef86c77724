"""Who serves which folder: the lock, the run folder, and what a killed run leaves."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aerostat_cli.standalone.run_state import (
    RouterAddresses,
    Run,
    find_run,
    fresh_run_folder,
    holder_of,
    run_folder,
    running,
    runs_folder,
)
from aerostat_core.errors import PermanentError, SettingError
from aerostat_runtime.cluster.state_lock import StateLock
from aerostat_testing.waiting import wait_for

pytestmark = pytest.mark.cpu

HOLDER = """
import sys, time
from pathlib import Path
from aerostat_cli.standalone.run_state import fresh_run_folder
from aerostat_runtime.cluster.state_lock import StateLock
state = Path(sys.argv[1])
with StateLock(state), fresh_run_folder(state) as folder:
    (folder / "keeper.sock").touch()
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ae-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def state_of(folder: Path) -> Path:
    state = folder / ".aerostat"
    state.mkdir(parents=True)
    return state


def describe(folder: Path, state: Path, *, pid: int, started_at: float = 1.0) -> Run:
    addresses = (RouterAddresses(http="127.0.0.1:8080", grpc="127.0.0.1:50051", admin="127.0.0.1:9900"),)
    run = Run(pid=pid, manifests=str(state.parent), state=str(state), started_at=started_at, routers=addresses)
    run.write(folder)
    return run


def test_who_serves_a_folder_is_known_while_it_does(tmp_path: Path) -> None:
    state = state_of(tmp_path / "a")
    with StateLock(state):
        assert holder_of(state) == os.getpid()
    assert holder_of(state) is None


def test_a_folder_that_nobody_ever_served_has_no_holder(tmp_path: Path) -> None:
    assert holder_of(state_of(tmp_path / "a")) is None


def test_a_killed_run_holds_nothing_and_the_next_start_removes_its_run_folder(tmp_path: Path) -> None:
    state = state_of(tmp_path / "a")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(state)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"held\n"
        assert holder_of(state) == process.pid
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert (run_folder(state) / "keeper.sock").exists()
    wait_for(lambda: holder_of(state) is None, "the kernel drops the lock")
    with StateLock(state), fresh_run_folder(state) as folder:
        assert [p.name for p in folder.iterdir()] == ["logs"]
    assert list(runs_folder().iterdir()) == []


def test_a_start_removes_what_killed_runs_of_other_folders_left(tmp_path: Path) -> None:
    dead, alive, mine = (state_of(tmp_path / name) for name in ("dead", "alive", "mine"))
    for state in (dead, alive):
        run_folder(state).mkdir()
        describe(run_folder(state), state, pid=os.getpid())
    with StateLock(alive), StateLock(mine), fresh_run_folder(mine):
        assert not run_folder(dead).exists()
        assert run_folder(alive).exists()


def test_a_run_is_found_by_its_folder_else_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = state_of(tmp_path / "old"), state_of(tmp_path / "new")
    with StateLock(old), fresh_run_folder(old) as old_folder, StateLock(new), fresh_run_folder(new) as new_folder:
        first = describe(old_folder, old, pid=os.getpid(), started_at=1)
        second = describe(new_folder, new, pid=os.getpid(), started_at=2)
        assert running() == [second, first]
        assert find_run(old.parent) == first
        assert find_run(None) == second
        monkeypatch.chdir(old.parent)
        assert find_run(None) == first
        with pytest.raises(PermanentError, match=r"no `aerostat up .*third` is running\. Running: "):
            find_run(tmp_path / "third")
    with pytest.raises(PermanentError, match="Start one: aerostat up DIR"):
        find_run(None)


def test_a_runtime_folder_that_others_can_open_is_refused(runtime: Path) -> None:
    (runtime / f"aerostat-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(SettingError, match="nobody else can open"):
        runs_folder()


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(SettingError, match="shorter folder"):
        runs_folder()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EROFS, "Read-only file system")])
@pytest.mark.parametrize("step", ["mkdir", "symlink_to", "write_bytes"])
def test_a_disk_that_takes_no_run_folder_is_told_with_the_setting_that_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: OSError
) -> None:
    run = Run(pid=1, manifests="m", state=str(tmp_path), started_at=0.0, routers=())

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, step, fail)
    with pytest.raises(SettingError, match=f"{error.strerror}.*XDG_RUNTIME_DIR"), fresh_run_folder(tmp_path) as folder:
        run.write(folder)


def test_a_file_in_the_place_of_the_run_folders_is_told() -> None:
    folder = runs_folder()
    folder.rmdir()
    folder.touch()
    with pytest.raises(SettingError, match="XDG_RUNTIME_DIR"):
        runs_folder()
