"""A call's way through the router: decide, then forward, hold or refuse; account for its end; try elsewhere before the first byte.

Decisions are `policy`'s, memory of the world is `fleet`'s, bytes are the carrier's. Nothing here awaits: what takes time (an agent's
answer, an engine's health) runs in the background and comes back as a call of a method.
"""

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from aerostat_core import api_errors
from aerostat_core.api_errors import ApiError
from aerostat_core.clock import Clock
from aerostat_core.ids import NamespacedName, Seconds
from aerostat_core.specs import Model
from aerostat_router.background import Background
from aerostat_router.calls import Call, Result, Target
from aerostat_router.catalog import Catalog
from aerostat_router.engine_errors import engine_error
from aerostat_router.fleet import Fleet
from aerostat_router.held import HeldCalls
from aerostat_router.http.exchange import Outcome
from aerostat_router.http.stream_call import Endpoint, Failure, FailureKind
from aerostat_router.lease_desk import LeaseDesk
from aerostat_router.metrics import Metrics
from aerostat_router.policy.cost import Holdings
from aerostat_router.policy.demand import DemandWindow, Sight
from aerostat_router.policy.estimates import TokenEstimates
from aerostat_router.policy.overload import Shedding, on_overload
from aerostat_router.policy.placement import Discard, Excluded, Lack, Nothing, Route, Send, Situation, Wake, honour, judge_lease, place
from aerostat_router.policy.session_spans import SessionSpans
from aerostat_router.policy.views import CallView, Candidate, LeaseView
from aerostat_router.telemetry_client import AgentLink
from aerostat_router.waker import Waker

logger = logging.getLogger(__name__)

MAX_TRIES: Final = 3
AVOID_FOR: Final[Seconds] = 1.0  # an engine that failed a call before its first byte
PATIENCE: Final = 8  # held calls in a row that found no place, after which the rest is not asked
UNPLACED_RETRY: Final[Seconds] = 30.0  # until somebody changed what is declared, or the operator found a place
IsHealthy = Callable[[Endpoint, str], Awaitable[bool]]


class Dispatcher:
    """Mutable; lives in one event loop. `submit` a call, then report `first_byte` and `end` of each try, or `abandon` it while held."""

    def __init__(
        self,
        *,
        router: str,
        clock: Clock,
        catalog: Catalog,
        fleet: Fleet,
        link: Callable[[str], AgentLink | None],
        is_healthy: IsHealthy,
        metrics: Metrics,
        background: Background,
    ) -> None:
        self.catalog = catalog
        self.fleet = fleet
        self.metrics = metrics
        self.demand = DemandWindow()
        self.estimates = TokenEstimates()
        self.clock = clock
        self.is_draining = False
        self._is_healthy = is_healthy
        self._background = background
        self._leases = LeaseDesk(router=router, catalog=catalog, fleet=fleet, link=link, clock=clock, background=background)
        self._active: set[Call] = set()
        self._spans = SessionSpans()
        self._held = HeldCalls(self._tick)
        self._waker = Waker(
            router=router,
            fleet=fleet,
            clock=clock,
            link=link,
            is_wanted=self.is_wanted,
            on_refused=self.refuse_held,
            background=background,
            metrics=metrics,
        )

    @property
    def n_active(self) -> int:
        return len(self._active)

    @property
    def n_held(self) -> int:
        return len(self._held)

    def is_wanted(self, model: NamespacedName) -> bool:
        """Some call waits for this model to be opened."""
        return any(call.was_held_over_wake for call in self._held.of(model))

    # What carriers tell.

    def submit(self, call: Call) -> None:
        """Ends in a forward or a refusal of the call's carrier, now or later."""
        if self.is_draining:
            call.carrier.refuse(api_errors.shutting_down(retry_after=1))
            return
        now = self.clock.monotonic()
        self._active.add(call)
        self.demand.note(call.model.name, Sight.ARRIVAL, now)
        if call.session is not None:
            self._spans.note(call.session, call.received_at)
        self._place(call, now)

    def first_byte(self, call: Call) -> None:
        call.first_byte_at = now = self.clock.monotonic()
        self.metrics.first_byte(call.model.name, now - call.received_at)

    def end(self, call: Call, result: Result) -> None:
        """One try is over. It is the one place where its counters go down; a try that reached nobody may be followed by another."""
        ticket, target = call.ticket, call.target
        if ticket is None or target is None:
            raise RuntimeError("the end of a try that was never begun")
        call.ticket = None
        ticket.close()
        now = self.clock.monotonic()
        if result.outcome is Outcome.DONE:
            self._finish(call, "completed", now)
            self._account(call, target, result, now)
        elif result.outcome is Outcome.BROKEN:
            self._finish(call, "upstream_disconnected", now)
        elif result.outcome is Outcome.ABANDONED:
            self._finish(call, "client_disconnected", now)
        else:
            self._try_elsewhere(call, target, result, now)
        self.pump((target.model.name,))

    def abandon(self, call: Call) -> None:
        """The client left while its call was held or being checked."""
        if not call.is_over:
            self._unhold(call)
            self._finish(call, "client_disconnected", self.clock.monotonic())

    # What the world tells.

    def pump(self, models: Collection[NamespacedName]) -> None:
        """Something changed that may let held calls of these models go."""
        for model in models:
            n_stuck = 0
            for call in self._held.of(model):
                if call in self._held:
                    self._place(call, self.clock.monotonic())
                    n_stuck = n_stuck + 1 if call in self._held else 0
                if n_stuck >= PATIENCE:
                    break

    def pump_all(self) -> None:
        self.pump(self._held.models())

    def refuse_held(self, model: NamespacedName, why: str) -> None:
        """Nobody opens the model."""
        for call in self._held.of(model):
            self._refuse(call, api_errors.no_capacity(call.model.served_name, why, retry_after=10))

    def drain(self) -> None:
        """Refuses what is held and what comes; tries under way go on."""
        self.is_draining = True
        for call in self._held.all():
            self._refuse(call, api_errors.shutting_down(retry_after=1))

    def check_integrity(self) -> None:
        """Each call that has not ended is held, or checked, or has one ticket; nothing else is counted."""
        held = self._held.all()
        for call in held:
            if call.ticket is not None or call.is_over or call not in self._active:
                raise AssertionError("a held call is under way, or over")
        for call in self._active:
            if (call.ticket is not None) == (call in held or call.is_checking):
                raise AssertionError("a call is neither held nor under way, or both")
        n_tickets = sum(call.ticket is not None for call in self._active)
        n_counted = sum(self.fleet.n_in_flight((c.engine.instance, c.engine.model)) for c in self._all_candidates())
        if n_counted > n_tickets:
            raise AssertionError(f"{n_counted} calls counted on engines, {n_tickets} under way")
        self._held.check_integrity()
        self.fleet.check_integrity()

    # Placing.

    def _place(self, call: Call, now: Seconds) -> None:
        model = call.model.name
        holdings = self.fleet.holdings(call.session, model)
        view = CallView(model=model, session=call.session, n_prompt_tokens=call.n_prompt_tokens, n_output_tokens=call.n_output_tokens)
        if call.session is not None:
            lease = self.fleet.leases.find(call.session, model, now)
            if lease is not None and self._use_lease(call, view, lease, holdings, now):
                return
        placement = place(view, self.fleet.candidates(model), holdings, self._situation(call, model, now))
        if isinstance(placement, Send):
            self._send(call, placement, call.model, now)
        elif isinstance(placement, Wake):
            call.was_held_over_wake = True
            self._hold(call, None, now)
            self._waker.want(model, placement.order)
        else:
            self._shed(call, view, placement, now)

    def _situation(self, call: Call, model: NamespacedName, now: Seconds) -> Situation:
        return Situation(
            now=now,
            ttft=call.ttft,
            replica_penalty=self.catalog.replica_penalty,
            n_calls=lambda: self._n_expected(model, now),
            was_held=call.was_held_over_wake,
            excluded=_excluded(call, now),
        )

    def _n_expected(self, model: NamespacedName, now: Seconds) -> int:
        """Arrivals of a window, as all routers saw them where telemetry says so, and likely returns."""
        total = self.fleet.demand(model)
        seen = self.demand.arrivals(model, now)
        return max(seen, total.arrivals if total is not None else 0) + self.fleet.leases.n_live(model)

    def _use_lease(self, call: Call, view: CallView, lease: LeaseView, holdings: Holdings, now: Seconds) -> bool:
        candidate = self.fleet.candidate(lease.instance, lease.model)
        discard = judge_lease(lease, candidate, holdings, _excluded(call, now))
        if candidate is None or discard is not None:
            self._leases.discard(lease, discard or Discard.EPOCH)
            return False
        send = honour(lease, view, candidate, holdings, now)
        if send.needs_check:
            self._check(call, lease, send)
            return True
        self._leases.consume(lease)
        self._send(call, send, call.model, now)
        return True

    def _check(self, call: Call, lease: LeaseView, send: Send) -> None:
        """The agent is silent: the lease is good if the engine itself answers."""
        self._unhold(call)
        call.is_checking = True
        engine = send.candidate.engine

        async def check() -> None:
            is_healthy = await self._is_healthy(Endpoint(engine.host, engine.port), engine.call_key)
            call.is_checking = False
            if call.is_over:
                return
            now = self.clock.monotonic()
            if is_healthy and send.candidate.engine.epoch == engine.epoch:
                self._leases.consume(lease)
                self._send(call, send, call.model, now)
            else:
                self._leases.discard(lease, Discard.UNHEALTHY)
                self._place(call, now)

        self._background.start(check(), name=f"health of {engine.instance}")

    def _send(self, call: Call, send: Send, model: Model, now: Seconds) -> None:
        self._unhold(call, now)
        candidate = send.candidate
        engine = candidate.engine
        n_new = call.n_prompt_tokens - send.n_reused_tokens
        call.ticket = self.fleet.enter(candidate, seconds=engine.timing.prefill.seconds(n_new), tokens=n_new)
        call.n_tries += 1
        if call.n_tries == 1:
            self.metrics.queued_for(call.model.name, now - call.received_at)
        route = Route.SPILL if model is not call.model else send.route
        endpoint = Endpoint(engine.host, engine.port)
        call.target = target = Target(engine.instance, engine.epoch, endpoint, engine.call_key, route, send.tier, model)
        self.metrics.sent(target)
        call.carrier.forward(target)

    def _shed(self, call: Call, view: CallView, nothing: Nothing, now: Seconds) -> None:
        model = call.model
        if nothing.lack is Lack.FAILED:
            self._refuse(call, api_errors.no_capacity(model.served_name, nothing.detail, retry_after=nothing.retry_after))
            return
        if nothing.lack in (Lack.NO_INSTANCE, Lack.LEAVING) and (why := self.catalog.why_unplaced(model)) is not None:
            self._refuse(call, api_errors.no_capacity(model.served_name, why, retry_after=UNPLACED_RETRY))
            return
        is_full = nothing.lack is Lack.FULL
        spilled = self._spill(call, view, now) if is_full else None
        verdict = on_overload(model.overload, is_running=is_full, can_spill=spilled is not None)
        if verdict.shedding is Shedding.REJECT:
            self._refuse(call, api_errors.saturated(model.served_name, retry_after=nothing.retry_after))
        elif verdict.shedding is Shedding.SPILL and spilled is not None:
            self.demand.note(model.name, Sight.SPILLED, now)
            self._send(call, *spilled, now)
        else:
            self._hold(call, nothing, now)

    def _spill(self, call: Call, view: CallView, now: Seconds) -> tuple[Send, Model] | None:
        """Where the model's spill target would take it now: spilling never opens, holds or spills on."""
        spill_to = call.model.overload.spill_to
        other = self.catalog.model_of(call.model.name.sibling(spill_to)) if spill_to is not None else None
        if other is None:
            return None
        holdings = self.fleet.holdings(call.session, other.name)
        placement = place(view, self.fleet.candidates(other.name), holdings, self._situation(call, other.name, now))
        return (placement, other) if isinstance(placement, Send) else None

    # Holding.

    def _hold(self, call: Call, why: Nothing | None, now: Seconds) -> None:
        if now >= call.hold_until:
            self._refuse(call, self._out_of_patience(call, why))
            return
        if call not in self._held:
            call.held_at = now
            self.demand.note(call.model.name, Sight.HELD, now)
            self.metrics.held.inc()
        self._held.put(call, why)

    def _unhold(self, call: Call, now: Seconds | None = None) -> None:
        if self._held.take(call) and call.held_at is not None:
            self.metrics.held.dec()
            self.metrics.held_for(call.model.name, (now or self.clock.monotonic()) - call.held_at)

    def _tick(self) -> None:
        """While calls are held: ends those whose budget is over, and looks again, since silence makes no event."""
        now = self.clock.monotonic()
        for call in self._held.all():
            if now >= call.hold_until:
                self._refuse(call, self._out_of_patience(call, self._held.why(call)))
        self.pump_all()

    def _out_of_patience(self, call: Call, why: Nothing | None) -> ApiError:
        name = call.model.served_name
        if why is not None and why.lack is Lack.FULL:
            return api_errors.saturated(name, retry_after=why.retry_after)
        if why is not None and why.lack in (Lack.STALE, Lack.NO_INSTANCE, Lack.LEAVING):
            return api_errors.no_capacity(name, why.detail, retry_after=why.retry_after)
        if (unplaced := self.catalog.why_unplaced(call.model)) is not None:
            return api_errors.no_capacity(name, unplaced, retry_after=UNPLACED_RETRY)
        opening = [c.engine.open_in_seconds or c.engine.open_seconds for c in self.fleet.candidates(call.model.name)]
        return api_errors.model_waking(name, retry_after=max(1.0, min(opening, default=1.0)))

    # Ends.

    def _refuse(self, call: Call, error: ApiError) -> None:
        self._unhold(call)
        self._finish(call, error.code, self.clock.monotonic())
        call.carrier.refuse(error)

    def _finish(self, call: Call, outcome: str, now: Seconds) -> None:
        call.is_over = True
        self._active.discard(call)
        self.metrics.ended(call.model.name, outcome, now - call.received_at)

    def _account(self, call: Call, target: Target, result: Result, now: Seconds) -> None:
        usage = result.usage
        if usage is not None:
            self.estimates.observe(target.model.name, n_bytes=call.n_body_bytes, n_prompt=usage.n_prompt, n_output=usage.n_output)
            decode = now - call.first_byte_at if call.first_byte_at is not None else None
            self.metrics.used(target.model.name, target.tier, usage, decode)
        if call.is_final:
            span = self._spans.end(call.session, now) if call.session is not None else None
            if span is not None:
                self.metrics.session_ended(call.model.name, span)
        elif call.wants_lease:
            self._leases.install(call, target, now)

    def _try_elsewhere(self, call: Call, target: Target, result: Result, now: Seconds) -> None:
        error = engine_error(target.model.served_name, result)
        reason = _retry_reason(result)
        if reason is None:
            self._finish(call, error.code, now)
            call.carrier.refuse(error)
            return
        self.metrics.retried(call.model.name, reason)
        detail = f"{reason}: {result.failure.detail}" if result.failure is not None else reason
        logger.info("a call to %s on %s failed before its first byte (%s)", call.model.name, target.instance.name, detail)
        call.failed[target.instance, target.epoch] = now
        if call.n_tries >= MAX_TRIES:
            self._finish(call, error.code, now)
            call.carrier.refuse(error)
            return
        self._place(call, now)

    def _all_candidates(self) -> list[Candidate]:
        return [c for model in self.catalog.models() for c in self.fleet.candidates(model.name)]


def _excluded(call: Call, now: Seconds) -> Excluded:
    """Engine runs that failed the call a moment ago. Later their agent has said what became of them."""
    return [run for run, at in call.failed.items() if now < at + AVOID_FOR] if call.failed else ()


def _retry_reason(result: Result) -> str | None:
    """Worth another engine? A time-out is not: the caller has waited for it once. 401 means that the engine is a new one."""
    failure: Failure | None = result.failure
    if failure is not None:
        return failure.kind.value if failure.kind not in (FailureKind.HEAD_TIMEOUT, FailureKind.IDLE_TIMEOUT) else None
    if result.status == 401:
        return "stale_key"
    return "unavailable" if result.status == 503 else None
