"""Has a model opened, once for all the calls that wait for it.

The model's wake owner, the first healthy instance in rendezvous order, settles where: its agent fixes the first proposal and tells it
to every router that asks meanwhile. If that place is another agent's, the router asks that one to open it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
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
    place: str = ""


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
        n_refusals, answer = 0, None
        try:
            while self._is_wanted(model):
                answer = await self._ask(model, self._proposals[model])
                n_refusals = 0 if answer.is_under_way else n_refusals + 1
                if n_refusals >= REFUSALS_UNTIL_NEWS:
                    self._on_refused(model, answer.message)
                await asyncio.sleep(ASK_AGAIN_AFTER)
            if answer is not None and answer.is_under_way and not self._is_open(model, answer.place):
                self._metrics.opened_in_vain(model)
        finally:
            del self._proposals[model]

    async def _ask(self, model: NamespacedName, proposals: Sequence[Candidate]) -> _Answer:
        now = self._clock.monotonic()
        candidates = self._fleet.candidates(model)
        owners = wake_order(model, (c.engine.instance for c in candidates if self._fleet.is_fresh(c.source.address, now)))
        ruled_out = {c.engine.place for c in candidates if c.engine.can_serve}
        answer = _Answer(is_under_way=False, message="no agent that may hold it answers")
        for proposal in proposals:
            if proposal.engine.place in ruled_out:
                continue
            settled = await self._settle(model, owners, proposal.engine.place, ruled_out)
            if settled is None:
                break
            place, answer = settled
            if answer.is_under_way:
                break
            ruled_out.add(place)
        self._metrics.woke(model, "under_way" if answer.is_under_way else "refused")
        return answer

    async def _settle(
        self, model: NamespacedName, owners: Sequence[NamespacedName], proposed: str, ruled_out: Collection[str]
    ) -> tuple[str, _Answer] | None:
        """Where the wake owner has it opened, and what comes of it there. None: no owner can be reached."""
        for owner in owners:
            address = self._address(owner, model)
            reply = await self._call(address, wake_request(self._router, model, proposed, ruled_out=ruled_out))
            if reply is None:
                continue
            place = reply.instance or proposed
            own = self._address(model.sibling(place), model)
            if own != address and not reply.refused:
                reply = await self._call(own, wake_request(self._router, model, place, is_settled=True))
                if reply is None:
                    return place, _Answer(is_under_way=False, message=f"{place}: its agent does not answer")
            return place, _Answer(is_under_way=not reply.refused, message=f"{place}: {reply.message or reply.refused}", place=place)
        return None

    async def _call(self, address: str | None, request: pb.WakeRequest) -> pb.WakeReply | None:
        link = self._link(address) if address is not None else None
        if link is None:
            return None
        try:
            return await link.wake(request)
        except AgentUnreachableError as error:
            logger.info("wake of %s: %s", request.model, error.message)
            return None

    def _is_open(self, model: NamespacedName, place: str) -> bool:
        candidate = self._fleet.candidate(model.sibling(place), model)
        return candidate is not None and candidate.engine.can_serve

    def _address(self, instance: NamespacedName, model: NamespacedName) -> str | None:
        candidate = self._fleet.candidate(instance, model)
        return candidate.source.address if candidate is not None else None
