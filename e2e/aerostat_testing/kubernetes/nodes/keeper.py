"""`python -m aerostat_testing.kubernetes.nodes.keeper FOLDER`: the one process outside of a cluster that belongs to it.

It makes the cluster's cgroup and its outermost machine, waits until that has ended, for whatever reason, and removes the
cgroup and the disks. SIGTERM ends the cluster. Who started it may be gone long before.

`… keeper enter CGROUP COMMAND...` is its helper: it runs the command in that cgroup below the caller's, or with
`--of PID` below that process's.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from aerostat_testing.kubernetes.nodes.cgroups import Cgroup, abandoned, name_for
from aerostat_testing.kubernetes.nodes.processes import Process
from aerostat_testing.tied import tied

KEEPER_FILE: Final = "keeper"
DISK: Final = "disk"  # of a machine: it goes with the cluster
LOGS: Final = "log"  # of a machine: they stay
NAMESPACES: Final = ("--net", "--mount", "--pid", "--cgroup", "--uts", "--ipc")
_MODULE: Final = "aerostat_testing.kubernetes.nodes.keeper"


def keeper_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", _MODULE, str(folder)]


def machine_command(cgroup: str, *, inside: Process | None = None) -> list[str]:
    """Starts a machine's first process in that cgroup; `inside`: in the machine of that process, and below its cgroup."""
    outer = [f"--of={inside.pid}"] if inside else []
    entered = ["nsenter", f"--target={inside.pid}", "--pid"] if inside else []
    made = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
    init = [sys.executable, "-m", "aerostat_testing.kubernetes.nodes.init"]
    return [sys.executable, "-m", _MODULE, "enter", *outer, cgroup, *entered, *made, *init]


def keep(folder: Path) -> None:
    signal.signal(signal.SIGTERM, _end)
    me = Process.of(os.getpid())
    cgroup = Cgroup.of(me.pid).child(name_for(me))
    try:
        cgroup.create()
        (folder / KEEPER_FILE).write_text(str(me))
        with subprocess.Popen(tied(machine_command(cgroup.name))) as machine:  # it has our input
            try:
                machine.wait()
            finally:
                machine.kill()
    finally:
        cgroup.remove()  # it waits until all in it are gone
        clear(folder)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def clear(folder: Path) -> None:
    """Remove the disks of a cluster that has ended."""
    for disk in folder.glob(f"*/{DISK}"):
        shutil.rmtree(disk)


def sweep() -> None:
    """Remove the cgroups that clusters left whose keepers were killed."""
    for cgroup in abandoned():
        cgroup.remove()


def _enter(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", type=int, default=os.getpid())
    parser.add_argument("cgroup")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    place = Cgroup.of(args.of).child(args.cgroup)
    place.create()
    place.enter()
    os.execvp(args.command[0], args.command)


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        _enter(sys.argv[2:])
    keep(Path(sys.argv[1]))
