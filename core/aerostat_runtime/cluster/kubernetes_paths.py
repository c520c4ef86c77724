"""Where the objects of a kind live in the API, and what of them we keep. Pure."""

from typing import Final
from urllib.parse import quote

from aerostat_core.ids import NamespacedName
from aerostat_core.resources import API_VERSION, Resource
from aerostat_runtime.cluster.port import Kind

PLURALS: Final = {Kind.MODEL: "models", Kind.POOL: "pools", Kind.SLO: "slos", Kind.INSTANCE: "instances", Kind.NODE: "nodes"}


def api_version(kind: Kind) -> str:
    return "v1" if kind is Kind.NODE else API_VERSION


def collection(kind: Kind, namespace: str | None) -> str:
    """`namespace` None: those of all namespaces."""
    if kind is Kind.NODE:
        return "/api/v1/nodes"
    within = f"/namespaces/{quote(namespace, safe='')}" if namespace is not None else ""
    return f"/apis/{API_VERSION}{within}/{PLURALS[kind]}"


def item(kind: Kind, name: NamespacedName) -> str:
    return f"{collection(kind, name.namespace)}/{quote(name.name, safe='')}"


def secret(name: NamespacedName) -> str:
    return f"/api/v1/namespaces/{quote(name.namespace, safe='')}/secrets/{quote(name.name, safe='')}"


def kept(kind: Kind, resource: Resource) -> Resource:
    """As an object of a list lacks its kind where its class is built in; without who wrote which field."""
    metadata = {key: value for key, value in resource["metadata"].items() if key != "managedFields"}
    return {"apiVersion": api_version(kind), "kind": kind.value, **resource, "metadata": metadata}
