"""kopf: watches of all our kinds. Its handlers hand events on and decide nothing; what follows from one is the reconciler's.

kopf wants a loop of its own (when it stops, it cancels every task that it finds in it) and takes signals in the main
thread, so it runs in a thread. `on.event` handlers leave no finalizer and no annotation on the objects.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import kopf

from aerostat_core.errors import AerostatError
from aerostat_core.ids import Seconds
from aerostat_core.resources import API_VERSION
from aerostat_runtime.cluster.kubernetes_connection import Target
from aerostat_runtime.cluster.kubernetes_paths import PLURALS, kept
from aerostat_runtime.cluster.port import Change, Kind, WatchEvent

WATCH_SECONDS: Final = 300  # for which a server is asked to keep a watch; a whole number, or it refuses
REQUEST_LIMIT: Final[Seconds] = 20.0
STOP_LIMIT: Final[Seconds] = 3.0
_CHANGES: Final = {None: Change.ADDED, "ADDED": Change.ADDED, "MODIFIED": Change.MODIFIED, "DELETED": Change.DELETED}
_log = logging.getLogger(__name__)

Tell = Callable[[WatchEvent], None]


class _Patience:
    """kopf's waits between tries: it gives a watch up where they end."""

    def __iter__(self) -> Iterator[float]:
        wait = 0.5
        while True:
            yield wait
            wait = min(wait * 2, 8.0)


def registry_of(tell: Tell, target: Target) -> kopf.OperatorRegistry:
    """`tell` is called in kopf's thread."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await _credentials(target)

    def watch(kind: Kind) -> None:
        group, _, version = ("" if kind is Kind.NODE else API_VERSION).rpartition("/")

        @kopf.on.event(group, version or "v1", PLURALS[kind], id=f"enqueue-{PLURALS[kind]}", registry=registry)
        async def enqueue(event: kopf.RawEvent, **_: Any) -> None:
            tell(WatchEvent(_CHANGES[event["type"]], kind, kept(kind, dict(event["object"]))))

    for kind in Kind:
        watch(kind)
    return registry


def settings() -> kopf.OperatorSettings:
    ours = kopf.OperatorSettings()
    ours.peering.standalone = True  # who writes is decided by a Lease
    ours.posting.enabled = False  # events are about transitions, and the reconciler's
    ours.scanning.disabled = True  # no watch of CRDs, and no right to it: without ours nothing starts
    ours.process.ultimate_exiting_timeout = None
    ours.watching.server_timeout = WATCH_SECONDS
    ours.networking.request_timeout = REQUEST_LIMIT
    ours.networking.error_backoffs = _Patience()
    ours.queueing.exit_timeout = 0.5
    return ours


async def _credentials(target: Target) -> kopf.ConnectionInfo:
    """Those of the rest of this process. Read anew when the server refuses the ones we had."""
    try:
        found = await target.configuration()
    except AerostatError as error:
        raise kopf.PermanentError(str(error)) from error
    said = await found.get_api_key_with_prefix("BearerToken") or ""
    return kopf.ConnectionInfo(
        server=found.host or "",
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        token=said.removeprefix("Bearer ") or None,
        username=found.username or None,
        password=found.password or None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
        proxy_url=found.proxy,
    )


class Watches:
    """kopf in its thread. `tell` is called in the loop that makes this object. Once stopped it stays so: make another one."""

    def __init__(self, tell: Tell, target: Target) -> None:
        loop = asyncio.get_running_loop()
        self._registry = registry_of(lambda event: _pass(loop, tell, event), target)
        self._namespaces = () if target.namespace is None else (target.namespace,)
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def ended(self) -> None:
        """Waits until kopf has given up, or was stopped."""
        await self._ended.wait()

    async def stop(self) -> None:
        """A thread that does not end in time is left to the end of the process."""
        self._stopping.set()
        try:
            async with asyncio.timeout(STOP_LIMIT):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("kopf did not stop within %g s", STOP_LIMIT)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.get_loop().set_task_factory(self._task)
                runner.run(
                    kopf.operator(
                        registry=self._registry,
                        settings=settings(),
                        standalone=True,
                        clusterwide=not self._namespaces,
                        namespaces=self._namespaces,
                        stop_flag=self._stopping,
                    )
                )
        except Exception:  # the thread's edge: whoever waits for it starts another one
            _log.exception("kopf has failed")
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._ended.set)

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        task.add_done_callback(self._has_ended)
        return task

    def _has_ended(self, task: "asyncio.Task[Any]") -> None:
        """kopf goes on without a watch that failed. We do not: all begin anew."""
        if not task.cancelled() and task.get_name().startswith("watcher for ") and (error := task.exception()) is not None:
            _log.warning("kopf has lost a watch (%s): %s", task.get_name(), error)
            self._stopping.set()


def _pass(loop: asyncio.AbstractEventLoop, tell: Tell, event: WatchEvent) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(tell, event)
