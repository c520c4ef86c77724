"""The agent's Prometheus metrics, read from the node's state when they are scraped, so nothing is counted twice."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from aerostat_agent.model_cache import NodeCache
from aerostat_agent.node import Node
from aerostat_agent.policy.tracks import EngineKey
from aerostat_agent.publisher import Publisher
from aerostat_core.specs import EngineState

_MODEL_LABELS = ("instance", "model")


def registry_of(node: Node, publisher: Publisher, cache: NodeCache) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_NodeCollector(node, publisher, cache))
    return registry


class _NodeCollector(Collector):
    def __init__(self, node: Node, publisher: Publisher, cache: NodeCache) -> None:
        self._node = node
        self._publisher = publisher
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        yield from self._instances()
        yield from self._models()
        yield from self._engines()
        leases = CounterMetricFamily("aerostat_agent_leases", "Leases by what became of them", labels=["outcome"])
        for outcome, n in sorted(self._node.lease_counts.items()):
            leases.add_metric([outcome], n)
        yield leases
        yield _gauge("aerostat_agent_leases_held", "Leases that are live now", len(self._node.leases))
        yield _gauge("aerostat_agent_sessions", "Sessions that are known", len(self._node.sessions))
        yield _gauge("aerostat_agent_telemetry_subscribers", "Routers that subscribe now", self._publisher.n_subscribers)
        yield _gauge("aerostat_agent_model_cache_bytes", "Models on disk, when they were last counted", self._cache.n_bytes)
        if self._cache.limit is not None:
            yield _gauge("aerostat_agent_model_cache_limit_bytes", "What they may take", self._cache.limit)
        evicted = CounterMetricFamily("aerostat_agent_model_cache_evictions", "Models that left the disk for others")
        evicted.add_metric([], self._cache.n_evicted)
        yield evicted

    def _instances(self) -> Iterator[Metric]:
        capacity = GaugeMetricFamily("aerostat_agent_device_bytes", "Memory of the instance's devices", labels=["instance"])
        used = GaugeMetricFamily("aerostat_agent_device_used_bytes", "What its engines hold, reserves included", labels=["instance"])
        for name in sorted(self._node.specs):
            capacity.add_metric([str(name)], self._node.capacity(name))
            used.add_metric([str(name)], self._node.used(name))
        yield from (capacity, used)

    def _models(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("aerostat_agent_model_state", "1 for the state that the model is in", labels=[*_MODEL_LABELS, "state"])
        opened = CounterMetricFamily("aerostat_agent_opens", "Engines that became ready", labels=_MODEL_LABELS)
        failed = CounterMetricFamily("aerostat_agent_engine_failures", "Engines that failed", labels=_MODEL_LABELS)
        seconds = GaugeMetricFamily("aerostat_agent_open_seconds", "Cost of opening it from nothing (EWMA)", labels=_MODEL_LABELS)
        tokens = GaugeMetricFamily("aerostat_agent_tokens_per_second", "Tokens computed, over the last minute", labels=_MODEL_LABELS)
        requests = GaugeMetricFamily("aerostat_agent_requests_per_second", "Calls that ended, over the last minute", labels=_MODEL_LABELS)
        ttft = GaugeMetricFamily("aerostat_agent_ttft_p95_seconds", "First token inside the engine, last 10 minutes", labels=_MODEL_LABELS)
        attained = GaugeMetricFamily("aerostat_agent_attainment_ratio", "Calls that met their SLO, last 10 minutes", labels=_MODEL_LABELS)
        now = self._node.clock.monotonic()
        for key, verdict in sorted(self._node.verdicts.items()):
            for possible in EngineState:
                state.add_metric([*_labels(key), possible.value], float(possible is verdict.state))
            figures = self._node.figures_of(key)
            opened.add_metric(_labels(key), figures.n_opened)
            failed.add_metric(_labels(key), figures.n_failed)
            seconds.add_metric(_labels(key), figures.open_seconds)
            tokens.add_metric(_labels(key), figures.tokens.per_second(now))
            requests.add_metric(_labels(key), figures.requests.per_second(now))
            if (p95 := figures.calls.ttft_p95(now)) is not None:
                ttft.add_metric(_labels(key), p95)
            slo = self._node.slo_of(key)
            if slo is not None and (share := figures.calls.attainment(slo, now)) is not None:
                attained.add_metric(_labels(key), share)
        yield from (state, opened, failed, seconds, tokens, requests, ttft, attained)

    def _engines(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("aerostat_agent_running", "Sequences that run", labels=_MODEL_LABELS)
        waiting = GaugeMetricFamily("aerostat_agent_waiting", "Calls that wait in the engine", labels=_MODEL_LABELS)
        kv_used = GaugeMetricFamily("aerostat_agent_kv_used_tokens", "KV of running sequences", labels=_MODEL_LABELS)
        for key, engine in sorted(self._node.engines.items()):
            running.add_metric(_labels(key), engine.boundary.running)
            waiting.add_metric(_labels(key), engine.boundary.waiting)
            kv_used.add_metric(_labels(key), engine.boundary.kv_used_tokens)
        yield from (running, waiting, kv_used)


def _labels(key: EngineKey) -> list[str]:
    return [str(key.instance), key.model]


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)
