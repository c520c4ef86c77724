"""Asks for a Lease, keeps it and gives it back: the shell around `policy.leadership`, over a coordination.k8s.io Lease.

While it is held, and not a moment longer, `Fenced` lets writes through to the cluster.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from aerostat_core.clock import Clock
from aerostat_core.errors import AerostatError, PermanentError, TemporaryError
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.resources import Resource
from aerostat_operator.policy.leadership import Candidacy, LeaseState, Step, Timing
from aerostat_runtime.cluster.kubernetes_connection import Api, Request
from aerostat_runtime.cluster.kubernetes_errors import AlreadyExistsError, NotFoundError
from aerostat_runtime.cluster.port import Cluster, Kind, Note, WatchEvent

_API: Final = "coordination.k8s.io/v1"
_log = logging.getLogger(__name__)


class NotLeadingError(TemporaryError):
    def __init__(self) -> None:
        super().__init__("NotLeading", "another replica of the operator may hold the lease: nothing is written here", retry_after=1.0)


class Elector:
    """`heard_at` is when the API server last answered."""

    def __init__(self, api: Api, clock: Clock, *, lease: NamespacedName, identity: str, timing: Timing) -> None:
        self._api, self._clock, self._lease = api, clock, lease
        self._timing = timing
        self._own = Candidacy(identity=identity, timing=timing)
        self._changed = asyncio.Event()
        self._is_away = False
        self.heard_at: Seconds | None = None
        self.returned = asyncio.Event()  # set when the server answers again after it did not

    @property
    def holder(self) -> str:
        return self._own.lease.holder if self._own.lease is not None else ""

    def remaining(self) -> Seconds:
        """For how long writes may still be under way, unless the lease is renewed meanwhile; 0 while it is not held."""
        now = self._clock.monotonic()
        return self._own.held_until - now if self._own.held_until is not None and self._own.may_write(now) else 0.0

    async def run(self) -> None:
        """For ever. A server that is away or refuses is asked again; what was held runs out meanwhile."""
        while True:
            try:
                async with asyncio.timeout(self._timing.hold / 3):
                    await self._ask()
            except (AerostatError, TimeoutError) as error:
                self._cannot_ask(error)
            else:
                self._answered()
            await asyncio.sleep(self._timing.retry)

    async def elected(self) -> None:
        while not self.remaining():
            self._changed.clear()
            await self._changed.wait()

    async def lost(self) -> None:
        while remaining := self.remaining():
            self._changed.clear()
            try:
                async with asyncio.timeout(remaining):
                    await self._changed.wait()
            except TimeoutError:
                continue

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """For a write: it does not begin without the lease, and is given up with it. Raises NotLeadingError."""
        remaining = self.remaining()
        if not remaining:
            raise NotLeadingError
        try:
            async with asyncio.timeout(remaining):
                yield
        except TimeoutError as error:
            raise NotLeadingError from error

    async def release(self) -> None:
        """Give it back, so that another replica need not wait. Call it when nothing writes any more and `run` has ended."""
        own = self._own
        is_mine = own.lease is not None and own.lease.holder == own.identity
        self._become(own.gave_up())
        if not is_mine:
            return
        try:
            async with asyncio.timeout(self._timing.retry):
                await self._put(replace(own.wanted(), holder=""))
        except (AerostatError, TimeoutError) as error:
            _log.warning("the lease is not given back and runs out by itself: %s", error)

    # ------------------------------------------------------------ asking

    async def _ask(self) -> None:
        own, asked_at = self._own, self._clock.monotonic()
        step = own.step(asked_at)
        if step is Step.LOOK or own.lease is None:
            found = await self._get()
            self._become(self._own.saw(found, self._clock.monotonic()))
            step = self._own.step(self._clock.monotonic())
            own, asked_at = self._own, self._clock.monotonic()
        if step is Step.LOOK:
            return
        try:
            stored = await (self._create(own.wanted()) if step is Step.CREATE else self._put(own.wanted()))
        except (AlreadyExistsError, NotFoundError, TemporaryError) as error:
            if isinstance(error, TemporaryError) and error.reason != "Conflict":
                raise
            self._become(self._own.saw(await self._get(), self._clock.monotonic()))  # somebody was faster
            return
        self._become(self._own.was_granted(stored, asked_at=asked_at, now=self._clock.monotonic()))

    async def _get(self) -> LeaseState | None:
        try:
            return _read(await self._api.once(self._request("get", "GET")))
        except NotFoundError:
            return None

    async def _create(self, wanted: LeaseState) -> LeaseState:
        path = f"/apis/{_API}/namespaces/{self._lease.namespace}/leases"
        return _read(await self._api.once(Request(what="create leases", method="POST", path=path, body=self._resource(wanted))))

    async def _put(self, wanted: LeaseState) -> LeaseState:
        return _read(await self._api.once(self._request("update", "PUT", self._resource(wanted))))

    def _request(self, verb: str, method: str, body: Resource | None = None) -> Request:
        path = f"/apis/{_API}/namespaces/{self._lease.namespace}/leases/{self._lease.name}"
        return Request(what=f"{verb} leases", method=method, path=path, body=body)

    def _resource(self, wanted: LeaseState) -> Resource:
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
        return {
            "apiVersion": _API,
            "kind": "Lease",
            "metadata": metadata | ({"resourceVersion": wanted.version} if wanted.version else {}),
            "spec": {
                "holderIdentity": wanted.holder,
                "leaseDurationSeconds": max(round(wanted.duration), 1),
                "leaseTransitions": wanted.n_transitions,
                "renewTime": now,
            },
        }

    # ------------------------------------------------------------ what changed

    def _become(self, candidacy: Candidacy) -> None:
        now = self._clock.monotonic()
        was, self._own = self._own.may_write(now), candidacy
        if was != candidacy.may_write(now):
            _log.info("the lease %s is %s", self._lease, "ours: this replica writes" if not was else "not ours any more")
        self._changed.set()

    def _cannot_ask(self, error: Exception) -> None:
        if not self._is_away:
            said = str(error) or "no answer in time"
            level = logging.ERROR if isinstance(error, PermanentError) else logging.WARNING
            _log.log(level, "the lease %s cannot be asked for (tried again every %g s): %s", self._lease, self._timing.retry, said)
        self._is_away = True

    def _answered(self) -> None:
        self.heard_at = self._clock.monotonic()
        if self._is_away:
            self._is_away = False
            self.returned.set()


def _read(resource: Resource) -> LeaseState:
    spec = resource.get("spec") or {}
    return LeaseState(
        holder=spec.get("holderIdentity") or "",
        version=resource["metadata"]["resourceVersion"],
        duration=float(spec.get("leaseDurationSeconds") or 0),
        n_transitions=spec.get("leaseTransitions") or 0,
    )


class Fenced:
    """A `Cluster` whose writes end with the lease: none begins without it, and one that is under way is given up."""

    def __init__(self, cluster: Cluster, elector: Elector) -> None:
        self._cluster, self._elector = cluster, elector

    async def list(self, kind: Kind) -> list[Resource]:
        return await self._cluster.list(kind)

    def watch(self, kind: Kind) -> AsyncIterator[WatchEvent]:
        return self._cluster.watch(kind)

    async def apply(self, resource: Resource) -> Resource:
        async with self._elector.holding():
            return await self._cluster.apply(resource)

    async def patch_status(self, kind: Kind, name: NamespacedName, status: Resource) -> bool:
        async with self._elector.holding():
            return await self._cluster.patch_status(kind, name, status)

    async def delete(self, kind: Kind, name: NamespacedName) -> None:
        async with self._elector.holding():
            await self._cluster.delete(kind, name)

    async def note(self, note: Note) -> None:
        async with self._elector.holding():
            await self._cluster.note(note)

    async def close(self) -> None:
        await self._cluster.close()
