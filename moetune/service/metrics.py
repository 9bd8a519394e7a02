"""Prometheus metrics: requests, and readiness of the store."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from moetune.app.planner import ServicePlanner

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Metrics of an application, in a separate registry."""

    def __init__(self, planner: ServicePlanner) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "moetune_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "moetune_request_seconds",
            "Time from a request's first byte to its answer's last.",
            ("route",),
            buckets=_REQUEST_SECONDS,
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)
        ready = Gauge("moetune_ready", "Whether the database can be used.", registry=self._registry)
        ready.set_function(lambda: not planner.problems())

    def answered(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request by its route's pattern, "" if no route matched."""
        self._requests.labels(
            method if method in _METHODS else "other", route or "none", status
        ).inc()
        self._seconds.labels(route or "none").observe(seconds)

    def text(self) -> bytes:
        """Return the text exposition format; this reads the store."""
        return generate_latest(self._registry)
