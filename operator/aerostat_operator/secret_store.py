"""Single Secrets by name, read and changed: all that the keeper of certificates needs of an API server, and may do there."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aerostat_core.errors import PermanentError
from aerostat_core.ids import NamespacedName
from aerostat_runtime.cluster.kubernetes_connection import Api, Request
from aerostat_runtime.cluster.kubernetes_errors import NotFoundError
from aerostat_runtime.cluster.kubernetes_paths import secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A Secret. Its data is shown in no log."""

    version: str
    data: Mapping[str, bytes] = field(repr=False)
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Of these keys; data that is None goes."""

    data: Mapping[str, bytes | None] = field(repr=False)
    annotations: Mapping[str, str] = field(default_factory=dict)


class SecretStore(Protocol):
    """Both raise PermanentError for what is not there or not allowed, and TemporaryError for what may work later."""

    async def read(self, name: NamespacedName) -> Stored: ...

    async def change(self, name: NamespacedName, edit: Edit, *, version: str) -> None:
        """A Secret that is not of that version any more is a TemporaryError: read it again."""
        ...


class KubernetesSecrets:
    """`manager` owns the fields that are written here."""

    def __init__(self, api: Api, *, manager: str) -> None:
        self._api, self._manager = api, manager

    async def read(self, name: NamespacedName) -> Stored:
        try:
            found = await self._api.call(Request(what="get secrets", method="GET", path=secret(name)))
        except NotFoundError as error:
            raise PermanentError("SecretNotFound", f"there is no Secret {name}: the chart makes it, so run helm upgrade") from error
        return Stored(
            version=found["metadata"]["resourceVersion"],
            data={key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()},
            annotations=found["metadata"].get("annotations") or {},
        )

    async def change(self, name: NamespacedName, edit: Edit, *, version: str) -> None:
        data = {key: None if value is None else base64.b64encode(value).decode() for key, value in edit.data.items()}
        request = Request(
            what="patch secrets",
            method="PATCH",
            path=secret(name),
            query={"fieldManager": self._manager, "fieldValidation": "Strict"},
            body={"metadata": {"resourceVersion": version, "annotations": dict(edit.annotations)}, "data": data},
            content_type="application/merge-patch+json",
        )
        await self._api.once(request)
