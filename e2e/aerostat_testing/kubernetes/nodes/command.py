"""`make cluster-up NODES=2`, `make cluster-shell`, `make cluster-down`: a cluster that stays until it is taken down.

What it is made of stands in a folder of the user, so that any later command finds it.
"""

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from aerostat_testing.kubernetes.build import node_programs
from aerostat_testing.kubernetes.caches import BuildError
from aerostat_testing.kubernetes.images import build
from aerostat_testing.kubernetes.nodes.cgroups import CgroupError
from aerostat_testing.kubernetes.nodes.cluster import Nodes
from aerostat_testing.kubernetes.nodes.images import ImageError
from aerostat_testing.kubernetes.nodes.network import MAX_NODES
from aerostat_testing.kubernetes.nodes.requirements import MissingError, require
from aerostat_testing.waiting import NotInTimeError

_SHELL: Final = "/bin/sh"


def default_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "aerostat/cluster"


def up(folder: Path, n_nodes: int) -> None:
    """Start what does not run yet."""
    require()  # before the long build
    with _alone(folder):
        nodes = Nodes(folder, node_programs, n_nodes, say=_say)
        if nodes.is_running:
            nodes.n_nodes = max(n_nodes, _n_nodes(folder))
        nodes.start()
        nodes.let_stay()
        _say(nodes.kubectl("get", "nodes").rstrip())
        _say("`make cluster-shell` reaches it; `make cluster-down` ends it.")


def shell(folder: Path, command: list[str]) -> None:
    """Become that command, or a shell, in the cluster's network, where kubectl is the admin."""
    nodes = _running(folder)
    argv = nodes.command(*(command or [os.environ.get("SHELL", _SHELL)]))
    os.execvpe(argv[0], argv, nodes.environment())


def image(folder: Path, archives: list[Path]) -> None:
    """Give all nodes these images (OCI or Docker archives)."""
    nodes = _running(folder)
    for archive in archives:
        nodes.import_image(archive)


def images(folder: Path) -> None:
    """Give all nodes the images of all components, built first where they are not there."""
    nodes = _running(folder)
    nodes.add_images(build.images().values())


def down(folder: Path) -> None:
    """End it, and remove what one left that was killed."""
    with _alone(folder):
        Nodes(folder, node_programs, _n_nodes(folder)).end()


def _running(folder: Path) -> Nodes:
    nodes = Nodes(folder, node_programs, _n_nodes(folder))
    if not nodes.is_running:
        raise SystemExit("there is no cluster: `make cluster-up` first")
    return nodes


def _n_nodes(folder: Path) -> int:
    return len([*folder.glob("node[1-9]")])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another command is working on the cluster in {folder}") from None
        yield


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_NODES:
        raise argparse.ArgumentTypeError(f"1 to {MAX_NODES} nodes, not {text}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aerostat_testing.kubernetes.nodes.command", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where it stands (default %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help=up.__doc__).add_argument("--nodes", type=_number, default=2, help="how many (default %(default)s)")
    commands.add_parser("shell", help=shell.__doc__).add_argument("argv", nargs=argparse.REMAINDER, help="a command, instead of a shell")
    commands.add_parser("image", help=image.__doc__).add_argument("archives", nargs="+", type=Path)
    commands.add_parser("images", help=images.__doc__)
    commands.add_parser("down", help=down.__doc__)
    args = parser.parse_args()
    try:
        if args.command == "up":
            up(args.folder, args.nodes)
        elif args.command == "shell":
            shell(args.folder, args.argv)
        elif args.command == "image":
            image(args.folder, args.archives)
        elif args.command == "images":
            images(args.folder)
        else:
            down(args.folder)
    except (BuildError, ImageError, MissingError, CgroupError, NotInTimeError) as error:
        raise SystemExit(f"cluster: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("cluster: interrupted; what this command began is gone") from None


if __name__ == "__main__":
    main()
