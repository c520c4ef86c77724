"""Addresses, and the `ip` commands that lay the network: a bridge in the control plane's namespace, a port for each node.

Pods are routed, not bridged: a node has a route to each of its pods and to the ranges of the others. There is no way out.
"""

import subprocess
from typing import Final

from aerostat_core.ids import Seconds
from aerostat_testing.kubernetes.nodes.machine import Machine

MAX_NODES: Final = 9
CONTROL_PLANE: Final = "10.200.0.100"
SERVICES: Final = "10.96.0.0/16"
PODS: Final = "10.244.0.0/16"
_BRIDGE: Final = "br0"
_LIMIT: Final[Seconds] = 20.0


def address(number: int) -> str:
    return f"10.200.0.{number}"


def pods_of(number: int) -> str:
    return f"10.244.{number}.0/24"


def lay_bridge(plane: Machine) -> None:
    """The control plane reaches pods, and Services through the first node's kube-proxy."""
    routes = [f"route add {pods_of(n)} via {address(n)}" for n in range(1, MAX_NODES + 1)]
    _ip(
        plane,
        "link set lo up",
        f"link add {_BRIDGE} type bridge",
        f"addr add {CONTROL_PLANE}/24 dev {_BRIDGE}",
        f"link set {_BRIDGE} up",
        *routes,
        f"route add {SERVICES} via {address(1)}",
    )


def plug_in(plane: Machine, node: Machine, number: int) -> None:
    first = node.first
    assert first is not None, f"{node.name} is off"
    port = f"port{number}"
    _ip(plane, f"link del {port}", is_forced=True)  # of a node whose power was cut just now
    _ip(plane, f"link add {port} type veth peer name eth0 netns {first.pid}", f"link set {port} master {_BRIDGE} up")
    others = [f"route add {pods_of(n)} via {address(n)}" for n in range(1, MAX_NODES + 1) if n != number]
    _ip(
        node,
        "link set lo up",
        f"addr add {address(number)}/24 dev eth0",
        "link set eth0 up",
        *others,
        f"route add {SERVICES} dev eth0",  # so that there is a route before kube-proxy rewrites the address
        "route add unreachable default",
    )


def _ip(machine: Machine, *commands: str, is_forced: bool = False) -> None:
    argv = machine.command(["ip", "-batch", "-"])
    done = subprocess.run(argv, input="\n".join(commands) + "\n", capture_output=True, text=True, timeout=_LIMIT)
    assert is_forced or done.returncode == 0, f"{machine.name}: ip {'; '.join(commands)}: {done.stderr}"
