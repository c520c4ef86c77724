"""One subscription per agent, and the calls back to it. Reconnects by itself; what an agent said is the fleet's to keep.

A gap in the versions, a silent stream and a lost connection all end in the same way: a new subscription, whose first message is
a full snapshot.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from aerostat.v1 import telemetry_pb2 as pb
from aerostat.v1.telemetry_pb2_grpc import TelemetryStub
from aerostat_core import peers
from aerostat_core.clock import Clock
from aerostat_core.defaults import SILENT_AFTER
from aerostat_core.errors import TemporaryError
from aerostat_core.ids import LeaseId, Seconds
from aerostat_router.fleet import AgentUpdate
from aerostat_router.policy.views import LeaseView
from aerostat_router.wire import UpdateReader, lease_updates
from aerostat_runtime.grpc_tls import peer_channel
from aerostat_runtime.tls import Material, TlsFolder

logger = logging.getLogger(__name__)

FIRST_BACKOFF: Final[Seconds] = 0.1
MAX_BACKOFF: Final[Seconds] = 2.0
CALL_TIMEOUT: Final[Seconds] = 2.0
WAKE_TIMEOUT: Final[Seconds] = 5.0
GIVE_UP_AFTER: Final[Seconds] = 3 * SILENT_AFTER  # without a message the stream is taken for dead, whatever TCP believes
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_http_proxy", 0),
)

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


class AgentUnreachableError(TemporaryError):
    def __init__(self, address: str, detail: str) -> None:
        super().__init__("AgentUnreachable", f"The node agent at {address} does not answer: {detail}", retry_after=1.0)


class AgentLink:
    """`apply` takes each update and says whether it fitted; `clock` is the router's. `run` until cancelled, then `close`.

    With a TLS folder, each subscription begins with what that holds then.
    """

    def __init__(
        self,
        address: str,
        *,
        router: str,
        apply: Callable[[str, AgentUpdate, Seconds], bool],
        clock: Clock,
        tls: TlsFolder | None = None,
    ) -> None:
        self.address = address
        self.is_connected = False
        self._router = router
        self._apply = apply
        self._clock = clock
        self._tls = tls
        self._retiring: set[asyncio.Task[None]] = set()
        self._connect()

    async def run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            if self._tls is not None and self._tls.material is not self._material:
                self._retire(self._channel)
                self._connect()
            n_messages = await self._subscribe()
            self.is_connected = False
            backoff = FIRST_BACKOFF if n_messages > 1 else min(2 * backoff, MAX_BACKOFF)
            await asyncio.sleep(backoff)

    async def close(self) -> None:
        await self._channel.close(grace=None)
        await asyncio.gather(*self._retiring)

    async def wake(self, request: pb.WakeRequest) -> pb.WakeReply:
        return await self._call(self._stub.Wake(request, timeout=WAKE_TIMEOUT))

    async def update_leases(self, consumed: list[LeaseView], installed: list[tuple[LeaseView, Seconds]]) -> dict[LeaseId, str]:
        """Returns why leases were refused, by id."""
        reply = await self._call(self._stub.UpdateLeases(lease_updates(consumed, installed), timeout=CALL_TIMEOUT))
        return {LeaseId(refusal.lease_id): refusal.reason for refusal in reply.refused}

    async def report_demand(self, request: pb.ReportDemandRequest) -> pb.ReportDemandReply:
        return await self._call(self._stub.ReportDemand(request, timeout=CALL_TIMEOUT))

    def _connect(self) -> None:
        self._material: Material | None = None
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        else:
            self._material = self._tls.material
            self._channel = peer_channel(self.address, self._material, peers.AGENT, _OPTIONS)
        self._stub = TelemetryStub(self._channel)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Calls that are under way on it end by their own deadlines, and within this grace."""
        task = asyncio.create_task(channel.close(grace=WAKE_TIMEOUT))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _call(self, call: Awaitable[Reply]) -> Reply:
        """Raises AgentUnreachableError, also for an agent that refuses the call."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise AgentUnreachableError(self.address, f"{error.code().name} {error.details()}") from error

    async def _subscribe(self) -> int:
        """One stream until it ends, is silent or has a gap; returns the number of its messages."""
        stream = self._stub.Subscribe(pb.SubscribeRequest(router=self._router))
        reader = UpdateReader()
        n_messages = 0
        try:
            while True:
                async with asyncio.timeout(GIVE_UP_AFTER):
                    message = await stream.read()
                if not isinstance(message, pb.TelemetryMessage):  # the end of the stream
                    return n_messages
                n_messages += 1
                now = self._clock.monotonic()
                if not self._apply(self.address, reader.read(message, now), now):
                    logger.info("telemetry of %s has a gap: subscribing again", self.address)
                    return n_messages
                self.is_connected = True
        except grpc.aio.AioRpcError as error:
            logger.info("telemetry of %s ended: %s %s", self.address, error.code().name, error.details())
        except ValueError:
            logger.exception("telemetry of %s cannot be read: subscribing again", self.address)
        except TimeoutError:
            logger.warning("telemetry of %s has been silent for %g s: subscribing again", self.address, GIVE_UP_AFTER)
        finally:
            stream.cancel()
        return n_messages


class Agents:
    """The links to all agents that some declared instance names. `reconcile` after each change of the catalog."""

    def __init__(self, link: Callable[[str], AgentLink], on_drop: Callable[[str], None]) -> None:
        self._make_link = link
        self._on_drop = on_drop
        self._links: dict[str, tuple[AgentLink, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def link(self, address: str) -> AgentLink | None:
        known = self._links.get(address)
        return known[0] if known is not None else None

    def links(self) -> list[AgentLink]:
        return [link for link, _ in self._links.values()]

    def reconcile(self, addresses: frozenset[str]) -> None:
        for address in self._links.keys() - addresses:
            link, task = self._links.pop(address)
            self._end(link, task)
            self._on_drop(address)
        for address in sorted(addresses - self._links.keys()):
            link = self._make_link(address)
            self._links[address] = (link, asyncio.create_task(link.run(), name=f"telemetry {address}"))

    async def close(self) -> None:
        for link, task in self._links.values():
            self._end(link, task)
        self._links.clear()
        await asyncio.gather(*self._closing)

    def _end(self, link: AgentLink, task: asyncio.Task[None]) -> None:
        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await link.close()

        closing = asyncio.create_task(end())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
