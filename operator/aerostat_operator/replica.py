"""One replica of the operator in a cluster: it watches always, and reconciles while it holds the lease."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry

from aerostat_core.clock import Clock
from aerostat_core.errors import PermanentError, TemporaryError
from aerostat_core.ids import Seconds
from aerostat_operator.admin import serving
from aerostat_operator.certificates import CertificateKeeper
from aerostat_operator.handlers import Watches
from aerostat_operator.intake import GRACE, Intake
from aerostat_operator.leader import Elector, Fenced
from aerostat_operator.loop import work
from aerostat_operator.metrics import Metrics
from aerostat_operator.mirror import Mirror
from aerostat_operator.reconcile import Reconciler
from aerostat_operator.secret_store import KubernetesSecrets
from aerostat_operator.settings import Settings
from aerostat_operator.work_queue import WorkQueue
from aerostat_runtime.cluster.kubernetes import KubernetesCluster
from aerostat_runtime.cluster.kubernetes_connection import Connection

MANAGER: Final = "aerostat-operator"  # owns the fields that we apply, whichever replica does
STOP_LIMIT: Final[Seconds] = 5.0  # for the run under way
STUCK_AFTER: Final[Seconds] = 120.0
AGAIN_AFTER: Final[Seconds] = 2.0
_log = logging.getLogger(__name__)


class Replica:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._cluster = KubernetesCluster(settings.target, manager=MANAGER, clock=clock)
        self._connection = Connection(settings.target, user_agent=MANAGER)
        self._elector = Elector(self._connection, clock, lease=settings.lease, identity=settings.identity, timing=settings.timing)
        self._mirror, self._queue = Mirror(), WorkQueue(clock)
        self._intake = Intake(self._cluster, clock, self._mirror, self._queue)
        self._metrics = Metrics()
        self._reconciler: Reconciler | None = None  # while this replica leads
        self._watch_again = asyncio.Event()
        self._is_stopping = False
        self._why_blind: str | None = None  # what the server said to the last list that it refused

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises PermanentError when the cluster lacks our kinds or refuses us from the start."""
        try:
            async with serving(self._settings.listen, self._shown, why_sick=self.why_sick, why_not_ready=self.why_not_ready) as port:
                _log.info("operator %s: admin %d", self._settings.identity, port)
                await self._run(stop)
        finally:
            await self._connection.close()
            await self._cluster.close()

    async def _run(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stopping = loop.create_task(stop.wait(), name="stop")
        electing = loop.create_task(self._elector.run(), name="election")
        leading = loop.create_task(self._lead(), name="leading")
        looking = loop.create_task(self._look(), name="watches and sweeps")
        await asyncio.wait((stopping, electing, leading, looking), return_when=asyncio.FIRST_COMPLETED)
        self._is_stopping = True
        self._queue.close()
        if self._elector.remaining():
            await asyncio.wait((leading,), timeout=STOP_LIMIT)
        await _end((stopping, electing, leading, looking))
        await self._elector.release()
        for task in (electing, leading, looking):
            if not task.cancelled():
                task.result()

    # ------------------------------------------------------------ while it leads

    async def _lead(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            await self._elector.elected()
            term, lost = loop.create_task(self._term(), name="term"), loop.create_task(self._elector.lost(), name="lease")
            try:
                await asyncio.wait((term, lost), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end((term, lost))
                self._reconciler = None
                self._metrics.rested()
            if not term.cancelled():
                term.result()

    async def _term(self) -> None:
        keeping = asyncio.get_running_loop().create_task(self._keep_certificates(), name="certificates")
        try:
            await self._reconcile()
        finally:
            await _end((keeping,))

    async def _keep_certificates(self) -> None:
        if self._settings.tls_secrets is not None:
            store = KubernetesSecrets(self._connection, manager=MANAGER)
            keeper = CertificateKeeper(store, self._clock, self._settings.tls_secrets, writing=self._elector.holding)
            await keeper.run(self._metrics.checked)

    async def _reconcile(self) -> None:
        """Begins from what the server has now: the one before us may have written a moment ago."""
        await self._sweep()
        self._mirror.forget_own_statuses()
        fenced = Fenced(self._cluster, self._elector)
        self._reconciler = Reconciler(fenced, self._clock, self._mirror, url=self._settings.url)
        self._queue.wake_in(0.0)
        await work(self._reconciler, self._mirror, self._queue, resync=self._settings.resync, settle=self._metrics.ran)

    # ------------------------------------------------------------ always

    async def _look(self) -> None:
        """Watches tell at once; what they miss, sweeps find, and then the watches begin anew."""
        await self._sweep()
        watching = asyncio.get_running_loop().create_task(self._watch(), name="watches")
        try:
            while True:
                await asyncio.sleep(GRACE)
                if untold := self._intake.untold():
                    self._watch_anew("deaf", f"no watch told of {len(untold)} changed objects, such as {untold[0][0]} {untold[0][1]}")
                if await self._is_back_before(self._settings.sweep):
                    self._watch_anew("outage", "the API server is back")
                self._metrics.missed(await self._sweep())
        finally:
            await _end((watching,))

    async def _watch(self) -> None:
        while True:
            self._watch_again.clear()
            watches = Watches(self._intake.observe, self._settings.target)
            watches.start()
            loop = asyncio.get_running_loop()
            waits = (loop.create_task(watches.ended()), loop.create_task(self._watch_again.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end(waits)
                await watches.stop()
            self._intake.forget_untold()
            await asyncio.sleep(AGAIN_AFTER)

    def _watch_anew(self, reason: str, why: str) -> None:
        _log.warning("watches begin anew: %s", why)
        self._metrics.restarted_watches(reason)
        self._watch_again.set()

    async def _is_back_before(self, limit: Seconds) -> bool:
        """The API server was away and answers again."""
        try:
            async with asyncio.timeout(limit):
                await self._elector.returned.wait()
        except TimeoutError:
            return False
        self._elector.returned.clear()
        return True

    async def _sweep(self) -> int:
        """Waits for a server that is away."""
        while True:
            try:
                n_changed = await self._intake.sweep()
                self._why_blind = None
                return n_changed
            except TemporaryError as error:
                _log.warning("cannot list what there is (again in %g s): %s", AGAIN_AFTER, error)
            except PermanentError as error:
                if not self._mirror.is_synced:
                    raise
                self._why_blind = str(error)
                _log.error("cannot list what there is (again in %g s): %s", AGAIN_AFTER, error)
            await asyncio.sleep(AGAIN_AFTER)

    # ------------------------------------------------------------ how it is

    def why_sick(self) -> str | None:
        """None: well. What a restart may cure."""
        since = self._reconciler.busy_since if self._reconciler is not None else None
        seconds = self._clock.monotonic() - since if since is not None else 0.0
        return f"one run has been going on for {seconds:.0f} s" if seconds > STUCK_AFTER else None

    def why_not_ready(self) -> str | None:
        """None: it works, or stands by for the replica that does."""
        if self._is_stopping:
            return "stopping"
        if not self._mirror.is_synced:
            return "what the cluster holds has not been read yet"
        heard_at = self._elector.heard_at
        if heard_at is None or (silence := self._clock.monotonic() - heard_at) > self._settings.timing.duration:
            return "the API server has not answered yet" if heard_at is None else f"the API server has not answered for {silence:.0f} s"
        return self._why_blind

    def _shown(self) -> CollectorRegistry:
        self._metrics.show(now=self._clock.wall(), queue_depth=len(self._queue), is_leading=self._elector.remaining() > 0)
        return self._metrics.registry


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
