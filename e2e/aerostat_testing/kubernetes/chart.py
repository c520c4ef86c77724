"""The Helm chart of this tree: rendered and linted by the real helm, its objects read as JSON."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from aerostat_core.ids import Seconds
from aerostat_core.resources import Resource

CHART: Final = Path(__file__).resolve().parents[3] / "helm/aerostat"
COMMAND_LIMIT: Final[Seconds] = 60.0

# Objects of the chart that belong to no namespace.
CLUSTER_WIDE: Final = ("ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


class ChartError(Exception):
    """What helm said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`home`: where this helm keeps what it remembers."""

    helm: Path
    kubernetes: str  # the version that it is rendered for
    home: Path

    def lint(self, *values: Path) -> str:
        """Raises ChartError for warnings as well."""
        return self._run("lint", "--strict", f"--kube-version={self.kubernetes}", str(CHART), *_files(values))

    def render(
        self,
        *values: Path,
        namespace: str,
        release: str = "aerostat",
        settings: Mapping[str, Any] | None = None,
        apis: tuple[str, ...] = (),
    ) -> list[Resource]:
        """All objects, without the CRDs. `settings` is by dotted path; `apis` are those that a cluster has beside its own."""
        command = ["template", release, str(CHART), f"--namespace={namespace}", f"--kube-version={self.kubernetes}", *_files(values)]
        command += [f"--set-json={path}={json.dumps(value)}" for path, value in (settings or {}).items()]
        command += [f"--api-versions={api}" for api in apis]
        return [document for document in yaml.safe_load_all(self._run(*command)) if document]

    def notes(self, *values: Path, namespace: str) -> str:
        """What an installation says at its end."""
        command = ("install", "aerostat", str(CHART), f"--namespace={namespace}", "--dry-run=client", *_files(values))
        return self._run(*command).partition("\nNOTES:\n")[2]

    def on(self, kubeconfig: Path, *arguments: str) -> str:
        """A command about a cluster, such as `upgrade`; its output."""
        return self._run(*arguments, f"--kubeconfig={kubeconfig}")

    def _run(self, *arguments: str) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        done = subprocess.run(
            [str(self.helm), *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_LIMIT
        )
        if done.returncode:
            raise ChartError(f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
        return done.stdout


def _files(values: tuple[Path, ...]) -> list[str]:
    return [f"--values={path}" for path in values]


def pod_template(resource: Resource) -> Resource | None:
    """Of a Deployment or DaemonSet; None for other objects."""
    template: Resource | None = resource.get("spec", {}).get("template")
    return template
