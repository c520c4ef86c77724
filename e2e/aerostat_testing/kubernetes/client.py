"""Being a client of an API server: a kubeconfig that says who one is, kubectl run as that, and what its answers say."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from aerostat_core.ids import Seconds

COMMAND_LIMIT: Final[Seconds] = 60.0
_CLUSTER: Final = "tests"


def write_kubeconfig(path: Path, *, server: str, certificate: Path | str, user: str, token: str, namespace: str | None = None) -> Path:
    """`certificate`: the server's, where the client sees it. `namespace`: what commands are about that name none."""
    context = {"cluster": _CLUSTER, "user": user} | ({"namespace": namespace} if namespace else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": _CLUSTER, "cluster": {"server": server, "certificate-authority": str(certificate)}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": user, "context": context}],
        "current-context": user,
    }
    path.write_text(yaml.safe_dump(config))
    return path


def run_kubectl(
    kubectl: Sequence[str], *arguments: str, kubeconfig: Path, home: Path, stdin: str = "", limit: Seconds = COMMAND_LIMIT
) -> str:
    """Its output. `home`: where it keeps what it knows of that cluster. Raises CalledProcessError, whose notes have what it said."""
    command = [*kubectl, f"--kubeconfig={kubeconfig}", *arguments]
    environment = os.environ | {"HOME": str(home)}
    done = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(done.stdout + done.stderr)
        raise error
    return done.stdout


def is_true(resource: dict[str, Any], condition: str) -> bool:
    """Whether that condition of an object is so."""
    found = resource.get("status", {}).get("conditions", [])
    return any(c["type"] == condition and c["status"] == "True" for c in found)
