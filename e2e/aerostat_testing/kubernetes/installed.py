"""The chart's rights on an API server, with the pods whose tokens our processes use. There is no kubelet that would run them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.cluster import open_cluster
from aerostat_runtime.cluster.port import Cluster
from aerostat_testing.kubernetes.apiserver import ApiServer
from aerostat_testing.kubernetes.chart import CLUSTER_WIDE, Chart, pod_template
from aerostat_testing.kubernetes.operators import add_node

_RIGHTS: Final = ("ServiceAccount", "Role", "RoleBinding", "Secret", *CLUSTER_WIDE)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """`watched` is where objects are declared; the pods' namespaces are others."""

    server: ApiServer
    rendered: tuple[Resource, ...]
    namespace: str
    nodes: str
    watched: str
    elsewhere: str
    url: str  # of the cluster, as the chart writes it

    @property
    def is_wide(self) -> bool:
        return "namespace=" not in self.url

    def account(self, component: str) -> NamespacedName:
        return NamespacedName(self.nodes if component in ("agent", "engines") else self.namespace, f"aerostat-{component}")

    def kubeconfig(self, component: str, *, node: str | None = None) -> Path:
        """`node`: by the token of the component's pod there."""
        return self.server.kubeconfig_of(self.account(component), pod=None if node is None else f"{component}-{node}")

    def cluster_url(self, component: str, *, node: str | None = None) -> str:
        """What the component is told as its cluster, with its own rights."""
        query = "&".join(filter(None, (self.url.partition("?")[2], f"kubeconfig={self.kubeconfig(component, node=node)}")))
        return f"kubernetes:?{query}"

    @asynccontextmanager
    async def cluster(self, component: str, *, node: str | None = None) -> AsyncIterator[Cluster]:
        """As the component opens it."""
        cluster = open_cluster(self.cluster_url(component, node=node), manager=f"aerostat-{component}")
        try:
            yield cluster
        finally:
            await cluster.close()

    def container(self, component: str) -> Resource:
        """The container of that component that works."""
        found: Resource = template_of(self.rendered, component)["spec"]["containers"][0]
        return found


def install(
    chart: Chart, server: ApiServer, *node_names: str, one_namespace: bool, reads_secrets: bool = False, tls: bool = True
) -> Installed:
    """With these nodes, and an agent's pod on each. `reads_secrets`: where objects are declared. `tls`: between parts."""
    namespace, watched, elsewhere = (server.create_namespace(prefix) for prefix in ("release", "watched", "elsewhere"))
    nodes = server.create_namespace("nodes") if one_namespace else namespace
    settings: dict[str, Any] = {"watch.namespace": watched, "nodes.namespace": nodes} if one_namespace else {}
    settings |= {"tls.enabled": tls}
    settings |= {"modelSecrets.namespaces": [watched]} if reads_secrets else {}
    rendered = chart.render(namespace=namespace, settings=settings)
    rights = [o for o in rendered if o["kind"] in _RIGHTS]
    server.kubectl("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(rights))
    for node in node_names:
        add_node(server, node)
        server.call("POST", f"/api/v1/namespaces/{nodes}/pods", _agent_pod(rendered, node))
    args = [a for o in rendered if (t := pod_template(o)) for a in t["spec"]["containers"][0]["args"] if a.startswith("--cluster=")]
    (url,) = {argument.removeprefix("--cluster=") for argument in args}
    return Installed(
        server=server, rendered=tuple(rendered), namespace=namespace, nodes=nodes, watched=watched, elsewhere=elsewhere, url=url
    )


def template_of(rendered: list[Resource] | tuple[Resource, ...], component: str) -> Resource:
    """The component's pod template."""
    label = "app.kubernetes.io/component"
    (template,) = (t for o in rendered if (t := pod_template(o)) and o["metadata"]["labels"][label] == component)
    return template


def _agent_pod(rendered: list[Resource], node: str) -> Resource:
    """As the DaemonSet controller would make it for that node."""
    template = template_of(rendered, "agent")
    spec = {k: v for k, v in template["spec"].items() if k != "priorityClassName"} | {"nodeName": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"agent-{node}"}, "spec": spec}
