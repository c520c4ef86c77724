"""The operator's metrics: names of the conventions, bounded labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aerostat_core.ids import Seconds
from aerostat_operator.certificates import Checked
from aerostat_operator.reconcile import Outcome

_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """`registry` is this operator's own, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._errors = Counter("aerostat_reconcile_errors", "Writes that failed, by reason.", ["reason"], registry=registry)
        self._runs = Histogram("aerostat_reconcile_seconds", "Runs of the reconciler.", buckets=_DURATIONS, registry=registry)
        self._moves = Counter("aerostat_placement_moves", "Moves of a model between instances that were started.", registry=registry)
        self._kvpr = Gauge("aerostat_kvpr", "Demand over what weights leave to KV, by instance.", ["instance"], registry=registry)
        self._queue_depth = Gauge("aerostat_operator_queue_depth", "Changed objects that wait for a run.", registry=registry)
        self._leading = Gauge("aerostat_operator_leading", "1 while this replica writes.", registry=registry)
        self._missed = Counter("aerostat_operator_missed_events", "Objects that a sweep found changed unseen.", registry=registry)
        self._restarts = Counter("aerostat_operator_watch_restarts", "Times that all watches began anew.", ["reason"], registry=registry)
        self._remaining = Gauge("aerostat_certificate_remaining_seconds", "Until it expires.", ["certificate"], registry=registry)
        self._made = Counter("aerostat_certificates_made", "Certificates that were made.", ["certificate"], registry=registry)
        self._tls_errors = Counter(
            "aerostat_certificate_errors", "Failures to keep certificates, by reason.", ["reason"], registry=registry
        )
        self._ends: dict[str, Seconds] = {}

    def checked(self, checked: Checked) -> None:
        self._ends |= checked.ends  # a check that failed knows none
        for name in checked.made:
            self._made.labels(name).inc()
        for reason in checked.failed.values():
            self._tls_errors.labels(reason).inc()

    def ran(self, outcome: Outcome) -> None:
        self._runs.observe(outcome.seconds)
        for reason in outcome.failed:
            self._errors.labels(reason).inc()
        self._moves.inc(outcome.n_moves)
        self._kvpr.clear()
        for instance, pressure in outcome.pressures.items():
            self._kvpr.labels(str(instance)).set(pressure)

    def rested(self) -> None:
        """This replica writes no more: what it knew of instances and certificates is another one's to tell."""
        self._kvpr.clear()
        self._ends.clear()

    def show(self, *, now: Seconds, queue_depth: int, is_leading: bool) -> None:
        """What is true at this moment."""
        self._remaining.clear()
        for name, end in self._ends.items():
            self._remaining.labels(name).set(end - now)
        self._queue_depth.set(queue_depth)
        self._leading.set(is_leading)

    def missed(self, n: int) -> None:
        self._missed.inc(n)

    def restarted_watches(self, reason: str) -> None:
        self._restarts.labels(reason).inc()
