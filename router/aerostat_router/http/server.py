"""Listens, drains, counts. One server has one handler and one caller, whose connections it does not own."""

import asyncio
import errno

from aerostat_core.errors import SettingError
from aerostat_core.ids import Seconds
from aerostat_router.http.exchange import Handler
from aerostat_router.http.front import Front, Hub
from aerostat_router.http.settings import FrontSettings, ListenSettings
from aerostat_router.http.stream_call import StreamCaller

_REMEDIES = {
    errno.EADDRINUSE: "another process listens there: stop it, or choose another port",
    errno.EACCES: "ports below 1024 need a privilege: choose a higher one",
    errno.EADDRNOTAVAIL: "this machine has no such address: choose one of its own, or 0.0.0.0",
}


class HttpServer:
    """Made and used inside a running loop."""

    def __init__(self, handler: Handler, caller: StreamCaller, settings: FrontSettings | None = None) -> None:
        self._hub = Hub(handler, caller, settings or FrontSettings(), asyncio.get_running_loop())
        self._server: asyncio.Server | None = None

    @property
    def n_connections(self) -> int:
        return len(self._hub.fronts)

    @property
    def n_in_flight(self) -> int:
        return self._hub.n_in_flight

    @property
    def is_draining(self) -> bool:
        return self._hub.is_draining

    def check_integrity(self) -> None:
        self._hub.check_integrity()

    async def start(self, listen: ListenSettings) -> int:
        """Begins to accept and returns the port. Raises SettingError, which says what to set, when that is not possible."""
        address = listen.address
        try:
            self._server = await self._hub.loop.create_server(
                lambda: Front(self._hub), address.host, address.port, backlog=listen.backlog, reuse_port=listen.reuse_port or None
            )
        except OSError as refused:
            # uvloop and asyncio word the same errno differently, and put the name of the address into the text.
            remedy = _REMEDIES.get(refused.errno or 0, str(refused))
            raise SettingError(f"cannot listen on {address}: {remedy} ({address.flag})") from refused
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def drain(self, grace: Seconds) -> int:
        """Stops accepting, lets answers under way finish for `grace` seconds, then cuts. Returns the number of connections cut."""
        hub = self._hub
        hub.is_draining = True
        if self._server is not None:
            self._server.close()
            self._server = None
        for front in list(hub.fronts):
            front.drain()
        try:
            async with asyncio.timeout(grace):
                await hub.emptied.wait()
        except TimeoutError:
            n_cut = len(hub.fronts)
            for front in list(hub.fronts):
                front.cut()
            await hub.emptied.wait()
            return n_cut
        return 0
