"""The router's metrics: names of the conventions, bounded labels, children resolved once (a lookup costs more than an addition)."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aerostat_core.ids import NamespacedName, Seconds
from aerostat_router.calls import Target, Usage
from aerostat_router.fleet import Fleet
from aerostat_router.policy.views import Tier

_LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SESSION: Final = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14_400)
_PER_TOKEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _OfModel(NamedTuple):
    ttft: Histogram
    tpot: Histogram
    duration: Histogram
    queue: Histogram
    hold: Histogram
    session: Histogram
    n_prompt: Counter
    n_output: Counter
    n_cached: dict[Tier, Counter]


class Metrics:
    """`registry` is this router's own, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter("aerostat_requests", "Calls that ended, by outcome.", ["model", "outcome"], registry=registry)
        self._routes = Counter("aerostat_routes", "Calls sent to an engine, by route.", ["model", "instance", "route"], registry=registry)
        self._cached = Counter("aerostat_cached_tokens", "Prompt tokens not computed, by tier.", ["model", "tier"], registry=registry)
        self._prompt = Counter("aerostat_prompt_tokens", "Prompt tokens of finished calls.", ["model"], registry=registry)
        self._output = Counter("aerostat_output_tokens", "Tokens that engines answered with.", ["model"], registry=registry)
        self._retries = Counter("aerostat_retries", "Tries that failed before the first byte.", ["model", "reason"], registry=registry)
        self._wakes = Counter("aerostat_wakes", "Wakes asked for, by what the agent said.", ["model", "outcome"], registry=registry)
        self._ttft = Histogram("aerostat_ttft_seconds", "Arrival to first byte.", ["model"], buckets=_LATENCY, registry=registry)
        self._tpot = Histogram("aerostat_tpot_seconds", "Per token after the first.", ["model"], buckets=_PER_TOKEN, registry=registry)
        self._e2e = Histogram("aerostat_request_duration_seconds", "Arrival to end.", ["model"], buckets=_LATENCY, registry=registry)
        self._hold = Histogram("aerostat_hold_seconds", "Time that a call was held here.", ["model"], buckets=_LATENCY, registry=registry)
        self._queue = Histogram(
            "aerostat_queue_seconds", "Arrival to an engine, whatever for.", ["model"], buckets=_LATENCY, registry=registry
        )
        self._session = Histogram(
            "aerostat_session_completion_seconds",
            "First call to the end of the one that says it is the last, of sessions that this router saw begin.",
            ["model"],
            buckets=_SESSION,
            registry=registry,
        )
        self._avoidable = Counter(
            "aerostat_avoidable_opens",
            "Opens still under way when no call waited for them any more: it went elsewhere, or its client left.",
            ["model"],
            registry=registry,
        )
        self.in_flight = Gauge("aerostat_in_flight_requests", "Calls that have not ended.", registry=registry)
        self.held = Gauge("aerostat_held_requests", "Calls that wait for a model or for room.", registry=registry)
        self._of_model = cache(self._resolve)
        self._requests_of = cache(self._requests.labels)
        self._routes_of = cache(self._routes.labels)

    def queued_for(self, model: NamespacedName, seconds: Seconds) -> None:
        self._of_model(model).queue.observe(seconds)

    def session_ended(self, model: NamespacedName, seconds: Seconds) -> None:
        self._of_model(model).session.observe(seconds)

    def opened_in_vain(self, model: NamespacedName) -> None:
        self._avoidable.labels(str(model)).inc()

    def sent(self, target: Target) -> None:
        self._routes_of(str(target.model.name), target.instance.name, target.route.value).inc()

    def held_for(self, model: NamespacedName, seconds: Seconds) -> None:
        self._of_model(model).hold.observe(seconds)

    def first_byte(self, model: NamespacedName, seconds: Seconds) -> None:
        self._of_model(model).ttft.observe(seconds)

    def ended(self, model: NamespacedName, outcome: str, seconds: Seconds) -> None:
        self._requests_of(str(model), outcome).inc()
        self._of_model(model).duration.observe(seconds)

    def rejected(self, outcome: str) -> None:
        """A request that never became a call."""
        self._requests_of("", outcome).inc()

    def used(self, model: NamespacedName, tier: Tier, usage: Usage, decode_seconds: Seconds | None) -> None:
        of_model = self._of_model(model)
        of_model.n_prompt.inc(usage.n_prompt)
        of_model.n_output.inc(usage.n_output)
        if usage.n_cached:
            of_model.n_cached[tier].inc(usage.n_cached)
        if decode_seconds is not None and usage.n_output > 1:
            of_model.tpot.observe(decode_seconds / (usage.n_output - 1))

    def retried(self, model: NamespacedName, reason: str) -> None:
        self._retries.labels(str(model), reason).inc()

    def woke(self, model: NamespacedName, outcome: str) -> None:
        self._wakes.labels(str(model), outcome).inc()

    def _resolve(self, model: NamespacedName) -> _OfModel:
        name = str(model)
        on_device, on_host = (self._cached.labels(name, tier.name.lower()) for tier in (Tier.DEVICE, Tier.HOST))
        return _OfModel(
            ttft=self._ttft.labels(name),
            tpot=self._tpot.labels(name),
            duration=self._e2e.labels(name),
            queue=self._queue.labels(name),
            hold=self._hold.labels(name),
            session=self._session.labels(name),
            n_prompt=self._prompt.labels(name),
            n_output=self._output.labels(name),
            # What no prefix of the session explains was found in the engine's own cache: on the device.
            n_cached={Tier.DEVICE: on_device, Tier.HOST: on_host, Tier.MISSING: on_device},
        )


class FleetCollector(Collector):
    """Read at scrape time: leases by what became of them, and how old each agent's last word is."""

    def __init__(self, fleet: Fleet, now: Callable[[], Seconds]) -> None:
        self._fleet = fleet
        self._now = now

    def collect(self) -> Iterator[Metric]:
        events = self._fleet.leases.counts
        for event in ("installed", "consumed", "expired", "discarded"):
            family = CounterMetricFamily(f"aerostat_leases_{event}", f"Leases {event}.", labels=["reason"])
            for (kind, reason), n in sorted(events.items()):
                if kind == event:
                    family.add_metric([reason], n)
            yield family
        yield GaugeMetricFamily("aerostat_leases_live", "Leases that are live now.", value=len(self._fleet.leases))
        age = GaugeMetricFamily("aerostat_snapshot_age_seconds", "Since an agent last spoke.", labels=["agent"])
        now = self._now()
        for source, _, _ in self._fleet.agents():
            age.add_metric([source.address], now - source.heard_at)
        yield age
