"""Our part of a scheduler process: reads its state at batch boundaries, reports to the agent, takes its mail. Called by `hooks`.

Everything here runs on the scheduler's thread, between two batches, and never waits.
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from sglang.srt.managers.utils import is_health_check_generate_req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import attention_backends, get_device, get_parallel

from aerostat_core.engine_launch import EngineLaunch
from aerostat_core.ids import Seconds
from aerostat_engine.agent_link import AgentLink
from aerostat_engine.reports import Boundary, EngineFacts, Finished, Missing, Phase, Prefix, Step, Tokens
from aerostat_engine.sessions import DeviceSessions
from aerostat_engine.stall_watch import StallWatch
from aerostat_engine.step_profile import StepProfile
from aerostat_engine.wire import Identity, Word, hello_frame

BOUNDARY_EVERY: Final[Seconds] = 0.05
CHECKS_PER_BOUNDARY: Final = 16
CHECKS_PER_IDLE: Final = 256
STALL_POLL_MS: Final = 5
STALL_SHARE: Final = 0.5  # of the time after which SGLang's watchdog kills the engine without a word to the agent


class Attachment:
    """Of rank 0 reports everything; the other ranks only say hello, since all of them see the same batches."""

    def __init__(self, scheduler: Any, launch: EngineLaunch) -> None:
        self._scheduler = scheduler
        self._rank = int(get_parallel().tp_rank)
        self._sessions = DeviceSessions()
        self._profile = StepProfile()
        self._stall = StallWatch(limit=STALL_SHARE * float(get_device().watchdog_timeout))
        self._reported: Boundary | None = None
        self._reported_at: Seconds = 0.0
        self._last_token_at: Seconds = time.monotonic()
        identity = Identity(instance=launch.instance, model=launch.model, engine_epoch=launch.epoch, rank=self._rank)
        facts = engine_facts(scheduler)
        self._link = AgentLink(
            launch.agent_socket,
            identity,
            hello=lambda: hello_frame(identity, facts, self._sessions.snapshot()),
            refused=_end_engine,
            trouble=lambda: self._stall.trouble(time.monotonic()),
        )
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self._link.mail_fd, _POLLIN)
        self._link.start()

    def boundary(self) -> None:
        """Between two batches, before the next one is chosen."""
        if self._rank:
            return
        now = time.monotonic()
        self._stall.ended()
        point = self._profile.ended(now)
        if point is not None:
            self._link.send(point)
        self._check_sessions(CHECKS_PER_BOUNDARY)

    def chosen(self, plan: Any) -> None:
        """The next batch is chosen and about to run."""
        if self._rank:
            return
        now = time.monotonic()
        batch = plan.batch_to_run
        if batch is not None:
            self._last_token_at = now
            self._stall.began(len(batch.reqs), now)
        self._profile.began(_step(batch), now)
        self._report(plan.running_batch, batch, now)

    def idle(self) -> None:
        """No batch runs and none could be formed."""
        if self._rank:
            return
        self._check_sessions(CHECKS_PER_IDLE)
        self._report(self._scheduler.running_batch, None, time.monotonic(), at_once=True)
        if not self._scheduler.is_fully_idle():
            # requests that cannot run now (no room, a grammar that compiles): SGLang would spin
            self._scheduler.idle_sleeper.poller.poll(STALL_POLL_MS)

    def released(self, request: Any, tokens: Tokens[int]) -> None:
        """A finished request gave its KV to the prefix cache, which holds what is reported and perhaps more."""
        if self._rank or is_health_check_generate_req(request):
            return
        page_size = self._scheduler.page_size
        whole = self._matched(tokens, request.extra_key) // page_size * page_size
        prefix = Prefix(tokens=tokens[:whole], page_size=page_size)
        session = request.routing_key or ""
        times = turn_times(request, time.perf_counter())
        self._link.send(
            Finished(
                session=session,
                request_id=str(request.rid),
                prefix=prefix,
                n_prompt_tokens=len(request.origin_input_ids),
                n_output_tokens=len(request.output_ids),
                n_cached_tokens=int(request.cached_tokens),
                reason=str(request.finished_reason.to_json()["type"]),
                first_token_seconds=times.first_token,
                seconds=times.total,
            )
        )
        if session and request.extra_key is None:
            self._missing(self._sessions.finished(session, prefix))

    def evicted(self) -> None:
        self._sessions.evicted()

    def _matched(self, tokens: Tokens[int], extra_key: str | None = None) -> int:
        """Leading tokens that lie on the device now; only looks."""
        n_tokens, _, _ = self._scheduler.tree_cache.tree_core.match_full_device_prefix(RadixKey(tokens, extra_key))
        return int(n_tokens)

    def _check_sessions(self, at_most: int) -> None:
        if self._sessions.is_in_doubt():
            self._missing(self._sessions.check(self._matched, at_most))

    def _missing(self, sessions: tuple[str, ...]) -> None:
        if sessions:
            self._link.send(Missing(sessions=sessions))

    def _report(self, running_batch: Any, batch: Any, now: Seconds, *, at_once: bool = False) -> None:
        """On change, at most every 50 ms while batches run, at once for a probe or when the last batch is done."""
        is_asked = Word.PROBE in self._link.take()
        if not is_asked and not at_once and now - self._reported_at < BOUNDARY_EVERY:
            return
        boundary = self._boundary(running_batch, batch)
        if is_asked or boundary != self._reported:
            self._reported, self._reported_at = boundary, now
            self._link.send(boundary)

    def _boundary(self, running_batch: Any, batch: Any) -> Boundary:
        scheduler = self._scheduler
        running = {id(request) for request in running_batch.reqs}
        if batch is not None:
            running |= {id(request) for request in batch.reqs}
        if scheduler.chunked_req is not None:
            running.add(id(scheduler.chunked_req))
        waiting = [request for request in scheduler.waiting_queue if not is_health_check_generate_req(request)]
        evictable = int(scheduler.tree_cache.full_evictable_size())
        free = int(scheduler.token_to_kv_pool_allocator.available_size())
        return Boundary(
            running=len(running),
            waiting=len(waiting),
            waiting_tokens=sum(len(request.origin_input_ids) for request in waiting),
            kv_used_tokens=int(scheduler.max_total_num_tokens) - free - evictable,
            kv_evictable_tokens=evictable,
            last_token_at=self._last_token_at,
        )


_POLLIN: Final = 1  # zmq.POLLIN, which is select.POLLIN for plain descriptors too


def turn_of(request: Any) -> Tokens[int] | None:
    """Tokens that a finished request's KV covers; None for one that is only paused, or holds nothing."""
    if not request.finished() or not request.kv.holds_kv or not request.sampling_params.max_new_tokens:
        return None  # without new tokens: SGLang warms the cache for n > 1
    return (array("q", request.origin_input_ids) + array("q", request.output_ids))[: request.owned_kv_len()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """From the request's arrival at the scheduler."""

    first_token: Seconds | None
    total: Seconds


def turn_times(request: Any, now: Seconds) -> TurnTimes:
    """SGLang's own stamps. `now` is on their clock, time.perf_counter; a request that was retracted keeps its first first token."""
    stats = request.time_stats
    has_first = stats.prefill_finished_time > 0 and len(request.output_ids) > 0
    first = stats.prefill_finished_time - stats.scheduler_recv_time if has_first else None
    return TurnTimes(first_token=first, total=now - stats.scheduler_recv_time)


def engine_facts(scheduler: Any) -> EngineFacts:
    runner = scheduler.tp_worker.model_runner
    sizes = runner.token_to_kv_pool.get_kv_size_bytes()
    kv_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in runner.model.parameters()}
    return EngineFacts(
        pid=os.getpid(),
        tensor_parallel=int(get_parallel().tp_size),
        plugin_version=version("aerostat"),
        sglang_version=version("sglang"),
        attention_backend=attention_backends()[1],
        page_size=int(scheduler.page_size),
        kv_capacity_tokens=int(scheduler.max_total_num_tokens),
        kv_bytes_per_token=int(kv_bytes // (scheduler.max_total_num_tokens + scheduler.page_size)),
        weights_bytes=sum(storages.values()),
        max_context_tokens=int(scheduler.model_config.context_len),
        max_running=int(scheduler.max_running_requests),
    )


def _step(batch: Any) -> Step | None:
    """What the batch says about a phase; mixed batches and health checks say nothing."""
    if batch is None or batch.forward_mode.is_mixed() or any(map(is_health_check_generate_req, batch.reqs)):
        return None
    if batch.forward_mode.is_extend():
        return Step(phase=Phase.PREFILL, n_new=int(batch.extend_num_tokens), n_context=sum(batch.prefix_lens))
    if batch.forward_mode.is_decode():
        return Step(phase=Phase.DECODE, n_new=len(batch.reqs), n_context=sum(request.seqlen for request in batch.reqs))
    return None


def _end_engine(reason: str) -> None:
    """The agent does not want this engine: end its server, which takes all its processes along."""
    import logging

    logging.getLogger(__name__).error("the agent refused this engine, which ends itself: %s", reason)
    os.kill(os.getppid(), signal.SIGTERM)
