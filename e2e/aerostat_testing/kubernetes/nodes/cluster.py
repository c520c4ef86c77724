"""`Nodes`: one control plane and some nodes, from a folder of theirs, until they are ended or who started them ends."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import yaml

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.build import NodePrograms
from aerostat_testing.kubernetes.client import COMMAND_LIMIT, run_kubectl
from aerostat_testing.kubernetes.images.buildah import Image
from aerostat_testing.kubernetes.nodes import keeper, network, node, oci
from aerostat_testing.kubernetes.nodes.cgroups import Cgroup
from aerostat_testing.kubernetes.nodes.control_plane import ADMIN, ControlPlane
from aerostat_testing.kubernetes.nodes.images import NodeImages, write_without_layers
from aerostat_testing.kubernetes.nodes.init import Boot
from aerostat_testing.kubernetes.nodes.keeper import DISK, KEEPER_FILE, LOGS
from aerostat_testing.kubernetes.nodes.machine import Machine
from aerostat_testing.kubernetes.nodes.processes import Process
from aerostat_testing.kubernetes.nodes.requirements import require
from aerostat_testing.waiting import wait_for

READY_LIMIT: Final[Seconds] = 120.0
END_LIMIT: Final[Seconds] = 60.0
PLANE: Final = "control-plane"
_ASK_EVERY: Final[Seconds] = 0.2
_DEPTH: Final = 2  # unshare lies between what starts a machine and the machine's first process

T = TypeVar("T")
Say = Callable[[str], None]


class Nodes:
    """Context manager: they end with it, and with this process.

    Or `start` and `let_stay`; later another object of that folder may use them, `start` what is off, and `end` them.
    `programs` is asked for what runs as nodes when something is started, or kubectl is: ending them takes none.
    """

    def __init__(self, folder: Path, programs: Callable[[], NodePrograms], n_nodes: int = 2, *, say: Say = lambda _: None) -> None:
        self.folder, self.n_nodes = folder, n_nodes
        self._programs = programs
        self._say = say
        self._plane = Machine(folder / PLANE)
        self._control_plane = ControlPlane(self._plane.folder)
        self._machines: dict[str, Machine] = {}
        self._on_since: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        """What of it does not run yet. Returns when all nodes are ready; what it began is gone when it fails."""
        require()
        keeper.sweep()
        if not (was_running := self.is_running):
            self.end()  # what is left of another one in this folder
        off = [name for name in self.names if self.machine(name).first is None]
        try:
            if not was_running:
                self._start_control_plane()
            self.power_on(*off)
            self.wait_until_ready(*off)
        except BaseException:
            if was_running:
                for name in off:
                    self.cut_power(name)
            else:
                self.end()
            raise

    def let_stay(self) -> None:
        """It outlives this process."""
        if self._plane.is_ours:
            self._plane.let_stay()

    def end(self) -> None:
        """All of it; logs stay until the next start. It may have ended already, in whatever way."""
        if (found := self._keeper()) is not None:
            found.kill(signal.SIGTERM)
            assert found.has_ended(END_LIMIT), f"not ended after {END_LIMIT:g} s; see {self._plane.folder}/machine.log"
        for machine in (self._plane, *self._machines.values()):
            machine.reap()
        (self.folder / KEEPER_FILE).unlink(missing_ok=True)
        keeper.sweep()
        keeper.clear(self.folder)

    def cut_power(self, name: str) -> None:
        """Everything on that node ends at once and nobody is told. Its disk stays."""
        self.machine(name).cut_power()

    def power_on(self, *names: str) -> None:
        """Returns when kubelet starts there, with all images that were imported."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._power_on, names))

    def hold(self, machine: str, program: str) -> None:
        """Kill a program, such as the control plane's `kube-apiserver`, and keep it from being started again until `release`."""
        self._held(machine).mkdir(exist_ok=True)
        (self._held(machine) / program).touch()

    def release(self, machine: str, program: str) -> None:
        (self._held(machine) / program).unlink()

    # ------------------------------------------------------------ use

    @cached_property
    def found(self) -> NodePrograms:
        return self._programs()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.n_nodes + 1))

    @property
    def kubeconfig(self) -> Path:
        """The admin's."""
        return self.folder / "admin.kubeconfig"

    @property
    def is_running(self) -> bool:
        return self._plane.first is not None

    def machine(self, name: str) -> Machine:
        return self._plane if name == PLANE else self._machines.setdefault(name, Machine(self.folder / name))

    def disk(self, name: str) -> Path:
        """Where that node's `/var` and `/tmp` are seen from here."""
        return self.folder / name / DISK

    def logs(self) -> list[Path]:
        """Of all programs that make the cluster."""
        return [*self.folder.glob(f"*/{LOGS}/*.log"), *self.folder.glob("*/machine.log")]

    def command(self, *argv: str, node: str = PLANE) -> list[str]:
        """The command that runs another one in the network of a node, or of the control plane, which reaches all nodes and pods."""
        return self.machine(node).command(argv)

    def environment(self) -> dict[str, str]:
        """In which kubectl and helm are the admin's."""
        path = ":".join([str(self.found.control_plane.kubernetes), str(self.found.helm), os.environ["PATH"]])
        return os.environ | {"PATH": path, "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *arguments: str, stdin: str = "", limit: Seconds = COMMAND_LIMIT) -> str:
        """Its output. Raises CalledProcessError, whose notes have what it said."""
        program = self.command(str(self.found.control_plane.kubectl))
        return run_kubectl(program, *arguments, kubeconfig=self.kubeconfig, home=self.folder, stdin=stdin, limit=limit)

    def get(self, *what: str) -> dict[str, Any]:
        """As `kubectl get`."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *what, "--output=json"))
        return found

    def add_images(self, images: Iterable[Image]) -> None:
        """Images that were built on this machine, to all nodes: they share what the builder has on disk."""
        for image in images:
            archive = self.folder / f"{image.name.replace('/', '-')}.tar"
            write_without_layers(image, archive)
            self.import_image(archive)

    def import_image(self, archive: Path) -> None:
        """An OCI or Docker archive, into all nodes; into those that are off when they start, so it is to stay where it is."""
        with self._images.open("a") as known:
            known.write(f"{archive.stat().st_mtime_ns} {archive.resolve()}\n")
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._import_images, (name for name in self.names if self.machine(name).first)))

    def wait_until_ready(self, *names: str) -> None:
        """Since they were switched on."""
        what = f"{', '.join(names)} are ready; see {self.folder}/*/{LOGS}"
        wait_for(unhurried(lambda: self._are_ready(names)), what, limit=READY_LIMIT)

    def is_serving(self) -> bool:
        """The API server."""
        assert self._plane.first is not None, f"the control plane has ended; see {self._plane.folder}"
        try:
            return self.kubectl("get", "--raw=/readyz") == "ok"
        except subprocess.CalledProcessError:
            return False

    def is_ready(self, name: str) -> bool:
        return self._are_ready([name])

    # ------------------------------------------------------------ inside

    @property
    def _images(self) -> Path:
        """A list of the archives that were imported, with when they were made."""
        return self.folder / "images.txt"

    def _keeper(self) -> Process | None:
        try:
            found = Process.parse((self.folder / KEEPER_FILE).read_text())
        except FileNotFoundError:
            return None
        return found if found and found.is_alive else None

    def _held(self, machine: str) -> Path:
        return self.folder / PLANE / "held" if machine == PLANE else self.disk(machine) / "var/lib/node/held"

    def _start_control_plane(self) -> None:
        began = time.monotonic()
        for old in (self._plane.folder, *self.folder.glob("node*")):
            shutil.rmtree(old, ignore_errors=True)
        self._images.unlink(missing_ok=True)
        self._control_plane.write_secrets({node.user(f"node{n}"): "system:nodes" for n in range(1, network.MAX_NODES + 1)})
        logs = self._plane.folder / LOGS
        for path in (logs, self.disk(PLANE)):
            path.mkdir()
        self._plane.start(keeper.keeper_command(self.folder), _DEPTH)
        network.lay_bridge(self._plane)
        programs = self._control_plane.programs(self.found)
        boot = Boot(hostname=PLANE, programs=programs, path=os.environ["PATH"], logs=str(logs), held=str(self._held(PLANE)))
        self._plane.boot(boot)
        self._control_plane.kubeconfig(ADMIN, self.kubeconfig)
        wait_for(unhurried(self.is_serving), f"the API server is ready; see {logs}", limit=READY_LIMIT)
        self.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(self._control_plane.dns_rights()))
        self._control_plane.start_dns()
        self._write_own_images()
        self._say(f"control plane: ready after {time.monotonic() - began:.1f} s")

    def _write_own_images(self) -> None:
        for name in (oci.PAUSE, oci.HELLO):
            program = self.found.images / name.rpartition("/")[2].partition(":")[0]
            archive = self.folder / f"{program.name}.tar"
            oci.write_archive(archive, name=name, program=program)
            self.import_image(archive)

    def _power_on(self, name: str) -> None:
        began = time.monotonic()
        machine, plane = self.machine(name), self._plane.first
        assert plane is not None, "the cluster has ended"
        number = int(name.removeprefix("node"))
        machine.reap()
        Cgroup.of(plane.pid).child(name).remove()  # with those of the pods that lost their power
        node.prepare(machine.folder, number, self._control_plane)
        self._on_since[name] = time.time()
        machine.start(keeper.machine_command(name, inside=plane), _DEPTH)
        network.plug_in(self._plane, machine, number)
        machine.boot(node.boot(machine.folder, number, self.found))
        machine.let_stay()  # as long as the control plane, in whose machine it is
        self._import_images(name)
        subprocess.run(machine.command(["touch", node.IMAGES_ARE_THERE], namespaces=["mount"]), check=True, timeout=COMMAND_LIMIT)
        self._say(f"{name}: on after {time.monotonic() - began:.1f} s")

    def _import_images(self, name: str) -> None:
        """Those that the node does not have."""
        images = NodeImages(self.machine(name), self.disk(name))
        wait_for(images.is_served, f"containerd runs on {name}; see {self.machine(name).folder}/{LOGS}", limit=READY_LIMIT)
        done = self.disk(name) / "var/lib/node/images.txt"
        has = done.read_text().splitlines() if done.exists() else []
        for line in dict.fromkeys(self._images.read_text().splitlines()):
            if line not in has:
                images.add(Path(line.partition(" ")[2]))
                with done.open("a") as known:
                    known.write(f"{line}\n")

    def _are_ready(self, names: Iterable[str]) -> bool:
        states = {item["metadata"]["name"]: item["status"].get("conditions", ()) for item in self.get("nodes")["items"]}
        return all(_is_ready_since(self._on_since.get(name, 0.0), states.get(name, ())) for name in names)


def unhurried(probe: Callable[[], T]) -> Callable[[], T]:
    """What is waited for needs the processor more than kubectl does."""

    def asked() -> T:
        if not (answer := probe()):
            time.sleep(_ASK_EVERY)
        return answer

    return asked


def _is_ready_since(moment: float, conditions: Iterable[dict[str, Any]]) -> bool:
    """A node that was away is still called ready for a while, and a heartbeat has no parts of a second."""
    (ready,) = [c for c in conditions if c["type"] == "Ready"] or [{"status": "Unknown"}]
    return ready["status"] == "True" and datetime.fromisoformat(ready["lastHeartbeatTime"]).timestamp() >= int(moment)
