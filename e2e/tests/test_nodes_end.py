"""Nothing is left of a cluster, however it ends: in order, half made, or with everything that looked after it killed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest

from aerostat_testing.kubernetes.build import NodePrograms
from aerostat_testing.kubernetes.nodes import cgroups, keeper
from aerostat_testing.kubernetes.nodes.cgroups import Cgroup
from aerostat_testing.kubernetes.nodes.cluster import PLANE, Nodes
from aerostat_testing.kubernetes.nodes.processes import Process
from aerostat_testing.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long]

START_LIMIT: Final = 120.0
END_LIMIT: Final = 60.0
# A test run that is killed: it makes nodes and waits.
RUN: Final = """
import sys, time
from pathlib import Path
from aerostat_testing.kubernetes.build import node_programs
from aerostat_testing.kubernetes.nodes.cluster import Nodes
with Nodes(Path(sys.argv[1]), node_programs):
    print("ready", flush=True)
    time.sleep(600)
"""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What a cluster is on the machine while it runs."""

    keeper: Process
    processes: frozenset[Process]
    networks: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> "Traces":
        kept = Process.parse((folder / keeper.KEEPER_FILE).read_text())
        assert kept is not None
        found = {process for process in _all_processes() if cgroups.name_for(kept) in _read(process, "cgroup")}
        networks = {_network(process) for process in found} - {_network(Process.of(os.getpid())), ""}
        return cls(keeper=kept, processes=frozenset(found), networks=frozenset(networks))

    def left(self) -> list[str]:
        """A bridge and what else is in a network namespace goes with it."""
        cgroup = Cgroup.of(os.getpid()).child(cgroups.name_for(self.keeper))
        return [
            *(f"process {process}" for process in self.processes if process.is_alive),
            *(f"network {network}" for network in self.networks & {_network(process) for process in _all_processes()}),
            *(f"cgroup {folder}" for folder in cgroup.folders if folder.exists()),
        ]


@dataclass(frozen=True, kw_only=True)
class Host:
    """What nothing of a cluster may change."""

    mounts: str
    links: str

    @classmethod
    def now(cls) -> "Host":
        links = subprocess.run(["ip", "-oneline", "link"], check=True, capture_output=True, text=True, timeout=10).stdout
        return cls(mounts=Path("/proc/self/mounts").read_text(), links=re.sub(r" (qlen|state) \S+", "", links))


def _all_processes() -> list[Process]:
    found = []
    for pid in psutil.pids():
        try:
            found.append(Process.of(pid))
        except ProcessLookupError:
            continue
    return found


def _read(process: Process, name: str) -> str:
    try:
        return Path(f"/proc/{process.pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _network(process: Process) -> str:
    """Empty for one that has ended, and for those that are nobody's business, such as the machine's own first process."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


@pytest.fixture(autouse=True)
def _host_is_as_before(found_node_programs: NodePrograms) -> Iterator[None]:
    """Programs are built before: the tests' limits are for a machine that has them."""
    before = Host.now()
    yield
    assert Host.now() == before


def started_run(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder)], stdout=subprocess.PIPE, text=True)


def traces_when_ready(run: subprocess.Popen[str], folder: Path) -> Traces:
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    return Traces.of(folder)


def all_gone(traces: Traces) -> None:
    wait_for(lambda: not traces.left(), lambda: f"nothing is left, not even {traces.left()}", limit=END_LIMIT)


def disks(folder: Path) -> list[Path]:
    return [*folder.glob(f"*/{keeper.DISK}")]


def command(folder: Path, *arguments: str) -> str:
    argv = [sys.executable, "-m", "aerostat_testing.kubernetes.nodes.command", f"--folder={folder}", *arguments]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cluster_that_ends_in_order_leaves_its_logs(found_node_programs: NodePrograms, tmp_path: Path) -> None:
    with Nodes(tmp_path, lambda: found_node_programs, 1):
        traces = Traces.of(tmp_path)
        assert len(traces.networks) == 2, "the control plane's and the node's"
    assert traces.left() == []
    assert disks(tmp_path) == []
    assert (tmp_path / PLANE / "log/kube-apiserver.log").stat().st_size > 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("stage", [f"{PLANE}/first-process", "node1/first-process"])
def test_one_that_is_interrupted_half_way_leaves_nothing(tmp_path: Path, stage: str, signum: signal.Signals) -> None:
    with started_run(tmp_path) as run:
        wait_for((tmp_path / stage).exists, f"it has come to {stage}", limit=START_LIMIT)
        traces = Traces.of(tmp_path)
        assert traces.processes
        run.send_signal(signum)
        run.wait(END_LIMIT)
    all_gone(traces)
    wait_for(lambda: not disks(tmp_path), "no disk is left", limit=END_LIMIT)


def test_a_test_run_that_is_killed_takes_its_cluster_with_it(tmp_path: Path) -> None:
    with started_run(tmp_path) as run:
        traces = traces_when_ready(run, tmp_path)
        run.kill()
    all_gone(traces)
    wait_for(lambda: not disks(tmp_path), "no disk is left", limit=END_LIMIT)


def test_what_a_killed_keeper_leaves_goes_when_the_cluster_is_taken_down(tmp_path: Path) -> None:
    with started_run(tmp_path) as run:
        traces = traces_when_ready(run, tmp_path)
        traces.keeper.kill()
        run.kill()
    wait_for(lambda: not any(process.is_alive for process in traces.processes), "all processes end", limit=END_LIMIT)
    assert disks(tmp_path), "nobody was there to remove them"
    command(tmp_path, "down")
    assert traces.left() == []
    assert disks(tmp_path) == []


def test_one_that_was_brought_up_stays_until_it_is_taken_down(tmp_path: Path) -> None:
    assert "node1: on after" in command(tmp_path, "up", "--nodes", "1")
    traces = Traces.of(tmp_path)
    assert "on after" not in command(tmp_path, "up", "--nodes", "1"), "nothing was off"
    assert Traces.of(tmp_path).keeper == traces.keeper
    assert "node2: on after" in command(tmp_path, "up", "--nodes", "2")
    assert command(tmp_path, "shell", "kubectl", "get", "nodes", "--output=name").split() == ["node/node1", "node/node2"]
    traces = Traces.of(tmp_path)
    command(tmp_path, "down")
    assert traces.left() == []
    assert disks(tmp_path) == []
    command(tmp_path, "down")
