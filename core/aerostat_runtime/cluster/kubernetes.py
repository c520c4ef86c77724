"""`Cluster` over a Kubernetes API server.

The server admits, stores and tells; this module asks. What a write means is left to it: server-side apply with one field
manager, so that fields of others stay, and a status that is replaced as a whole. Calls are tried again through short
outages and then raise TemporaryError; a watch waits for as long as it takes.
"""

import asyncio
import base64
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Final

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError
from aerostat_core.ids import NamespacedName
from aerostat_core.resources import Resource
from aerostat_runtime.clock import SystemClock
from aerostat_runtime.cluster.kubernetes_connection import Connection, Request, Target
from aerostat_runtime.cluster.kubernetes_errors import AlreadyExistsError, InternalError, NotFoundError, RefusedError
from aerostat_runtime.cluster.kubernetes_events import EventRecorder
from aerostat_runtime.cluster.kubernetes_paths import PLURALS, api_version, collection, item, kept, secret
from aerostat_runtime.cluster.kubernetes_watch import Watch, list_all
from aerostat_runtime.cluster.port import InvalidResourceError, Kind, Note, WatchEvent

_APPLIED_METADATA: Final = ("labels", "annotations", "ownerReferences")
_STRICT: Final = {"fieldValidation": "Strict"}


class KubernetesCluster:
    """The `Cluster` port. Opens no connection before the first call.

    `manager` is who owns the applied fields, and who events are from: the same for all replicas of a component.
    """

    def __init__(self, target: Target, *, manager: str, clock: Clock | None = None) -> None:
        self._namespace = target.namespace
        self._manager = manager
        self._connection = Connection(target, user_agent=manager)
        instance = f"{socket.gethostname()}-{os.getpid()}"
        self._events = EventRecorder(self._connection, clock or SystemClock(), component=manager, instance=instance)
        self._reading: set[asyncio.Future[WatchEvent]] = set()  # what watches wait for
        self._is_closed = False

    async def list(self, kind: Kind) -> list[Resource]:
        resources, _ = await list_all(self._connection, kind, collection(kind, self._namespace), patient=True)
        return resources

    async def watch(self, kind: Kind) -> AsyncGenerator[WatchEvent, None]:
        """Raises PermanentError before SYNCED, when we may not watch or the kind is not installed."""
        async with aclosing(Watch(self._connection, kind, self._namespace).events()) as events:
            while not self._is_closed:
                reading = asyncio.ensure_future(anext(events))
                self._reading.add(reading)
                try:
                    await asyncio.wait({reading})
                    if reading.cancelled():
                        return
                    event = reading.result()
                finally:
                    reading.cancel()
                    self._reading.discard(reading)
                    await asyncio.gather(reading, return_exceptions=True)
                yield event

    async def apply(self, resource: Resource) -> Resource:
        kind = _kind_of(resource)
        name = self._name_of(resource)
        given = resource["metadata"]
        metadata = {"name": name.name, "namespace": name.namespace} | {key: given[key] for key in _APPLIED_METADATA if given.get(key)}
        request = Request(
            what=f"patch {PLURALS[kind]}",
            method="PATCH",
            path=item(kind, name),
            query={"fieldManager": self._manager, "force": "true"} | _STRICT,
            body={key: value for key, value in resource.items() if key != "status"} | {"metadata": metadata},
            content_type="application/apply-patch+yaml",
        )
        try:
            return kept(kind, await self._connection.call(request, at_once=(InternalError,)))
        except InternalError:
            await self._check_schema(kind, name, request)
            return kept(kind, await self._connection.call(request))

    async def _check_schema(self, kind: Kind, name: NamespacedName, apply: Request) -> None:
        """An apply that does not fit the schema is answered as an internal error; a create that is only tried says what it is.

        Raises InvalidResourceError.
        """
        trial = Request(
            what=f"create {PLURALS[kind]}",
            method="POST",
            path=collection(kind, name.namespace),
            query={"fieldManager": self._manager, "dryRun": "All"} | _STRICT,
            body=apply.body,
        )
        with suppress(AlreadyExistsError):
            await self._connection.call(trial)

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        _refuse_nodes(kind)
        request = Request(
            what=f"patch {PLURALS[kind]}/status",
            method="PATCH",
            path=f"{item(kind, name)}/status",
            query={"fieldManager": self._manager} | _STRICT,
            body=[{"op": "add", "path": "/status", "value": status}],  # replaces what is there
            content_type="application/json-patch+json",
        )
        try:
            await self._connection.call(request)
        except NotFoundError:
            return False
        return True

    async def delete(self, kind: Kind, name: NamespacedName) -> None:
        _refuse_nodes(kind)
        try:
            await self._connection.call(Request(what=f"delete {PLURALS[kind]}", method="DELETE", path=item(kind, name)))
        except NotFoundError:
            return

    async def note(self, note: Note) -> None:
        await self._events.record(note)

    async def secret(self, name: NamespacedName) -> Mapping[str, bytes]:
        what = f'Secret "{name.name}" in namespace "{name.namespace}"'
        try:
            found = await self._connection.call(Request(what="get secrets", method="GET", path=secret(name)))
        except NotFoundError as error:
            raise PermanentError("SecretNotFound", f"there is no {what}: create it") from error
        except RefusedError as error:
            if error.reason != "Forbidden":
                raise
            message = f'may not read {what}: add "{name.namespace}" to modelSecrets.namespaces in the values of the chart'
            raise PermanentError("SecretForbidden", message) from error
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    async def close(self) -> None:
        """Ends all watches."""
        self._is_closed = True
        reading = tuple(self._reading)
        for event in reading:
            event.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await self._connection.close()

    def _name_of(self, resource: Resource) -> NamespacedName:
        match resource.get("metadata"):
            case {"name": str(name), **metadata}:
                return NamespacedName(str(metadata.get("namespace") or self._namespace or "default"), name)
            case _:
                raise InvalidResourceError("metadata.name is missing: it is what the object is called")


def _kind_of(resource: Resource) -> Kind:
    try:
        kind = Kind(str(resource.get("kind")))
    except ValueError:
        known = ", ".join(kind for kind in PLURALS if kind is not Kind.NODE)
        raise InvalidResourceError(f'no kind "{resource.get("kind")}": there are {known}') from None
    _refuse_nodes(kind)
    if resource.get("apiVersion") != api_version(kind):
        raise InvalidResourceError(f'no version "{resource.get("apiVersion")}" of {kind}: use {api_version(kind)}')
    return kind


def _refuse_nodes(kind: Kind) -> None:
    if kind is Kind.NODE:
        raise PermanentError("ReadOnly", "Nodes are written by kubelets: here they are only read")
