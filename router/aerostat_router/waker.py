"""Has a model opened, once for all the calls that wait for it.

The model's wake owner, the first healthy instance in rendezvous order, settles where: its agent fixes the first proposal and tells it
to every router that asks meanwhile. If that place belongs to another agent, the model is asked for there too.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from aerostat.v1 import telemetry_pb2 as pb
from aerostat_core.clock import Clock
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_router.background import Background
from aerostat_router.fleet import Fleet
from aerostat_router.metrics import Metrics
from aerostat_router.policy.views import Candidate
from aerostat_router.policy.wake_owner import wake_order
from aerostat_router.telemetry_client import AgentLink, AgentUnreachableError
from aerostat_router.wire import wake_request

logger = logging.getLogger(__name__)

ASK_AGAIN_AFTER: Final[Seconds] = 1.0  # the agent may have been replaced meanwhile; asking again changes nothing otherwise
REFUSALS_UNTIL_NEWS: Final = 2  # one may meet an agent that is just starting


class _Answer(NamedTuple):
    is_under_way: bool
    message: str = ""


class Waker:
    """`is_wanted` says whether anyone still waits for a model; `on_refused` hears why nobody opens it."""

    def __init__(
        self,
        *,
        router: str,
        fleet: Fleet,
        clock: Clock,
        link: Callable[[str], AgentLink | None],
        is_wanted: Callable[[NamespacedName], bool],
        on_refused: Callable[[NamespacedName, str], None],
        background: Background,
        metrics: Metrics,
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._clock = clock
        self._link = link
        self._is_wanted = is_wanted
        self._on_refused = on_refused
        self._background = background
        self._metrics = metrics
        self._proposals: dict[NamespacedName, Sequence[Candidate]] = {}

    def want(self, model: NamespacedName, proposals: Sequence[Candidate]) -> None:
        """Best place first. A wake that is under way takes the new proposals when it next asks."""
        is_new = model not in self._proposals
        self._proposals[model] = proposals
        if is_new:
            self._background.start(self._wake(model), name=f"wake {model}")

    def is_under_way(self, model: NamespacedName) -> bool:
        return model in self._proposals

    async def _wake(self, model: NamespacedName) -> None:
        n_refusals = 0
        try:
            while self._is_wanted(model):
                answer = await self._ask(model, self._proposals[model])
                n_refusals = 0 if answer.is_under_way else n_refusals + 1
                if n_refusals >= REFUSALS_UNTIL_NEWS:
                    self._on_refused(model, answer.message)
                await asyncio.sleep(ASK_AGAIN_AFTER)
        finally:
            del self._proposals[model]

    async def _ask(self, model: NamespacedName, proposals: Sequence[Candidate]) -> _Answer:
        now = self._clock.monotonic()
        places = [c for c in self._fleet.candidates(model) if self._fleet.is_fresh(c.source.address, now)]
        owners = wake_order(model, (c.engine.instance for c in places))
        refusal = "no agent that may hold it answers"
        for proposal in proposals:
            answer = await self._propose(model, owners, proposal.engine.instance)
            if answer is not None and answer.is_under_way:
                self._metrics.woke(model, "under_way")
                return answer
            refusal = answer.message if answer is not None else refusal
        self._metrics.woke(model, "refused")
        return _Answer(is_under_way=False, message=refusal)

    async def _propose(self, model: NamespacedName, owners: Sequence[NamespacedName], instance: NamespacedName) -> _Answer | None:
        """None: no owner can be reached."""
        for owner in owners:
            address = self._address(owner, model)
            reply = await self._call(address, model, instance)
            if reply is None:
                continue
            own = self._address(instance, model)
            if reply.refused and own != address:  # an agent that knows its own instances only
                reply = await self._call(own, model, instance) or reply
            if reply.refused:
                return _Answer(is_under_way=False, message=f"{instance.name}: {reply.message or reply.refused}")
            settled = instance.sibling(reply.instance) if reply.instance else instance
            there = self._address(settled, model)
            if there is not None and there != address:
                reply = await self._call(there, model, settled) or reply
            return _Answer(is_under_way=not reply.refused, message=reply.message)
        return None

    async def _call(self, address: str | None, model: NamespacedName, instance: NamespacedName) -> pb.WakeReply | None:
        link = self._link(address) if address is not None else None
        if link is None:
            return None
        try:
            return await link.wake(wake_request(self._router, instance, model))
        except AgentUnreachableError as error:
            logger.info("wake of %s: %s", model, error.message)
            return None

    def _address(self, instance: NamespacedName, model: NamespacedName) -> str | None:
        candidate = self._fleet.candidate(instance, model)
        return candidate.source.address if candidate is not None else None
