"""Prometheus metrics: requests, errors of predictions, readiness and fits of the store."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from moetune.app.planner import ServicePlanner
from moetune.domain.errors import MoetuneError
from moetune.domain.records import Observation
from moetune.service.quotas import KINDS, Kind, Quotas

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_RELATIVE_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NUM_FITS = 200
_SOURCES = frozenset({"training", "verify", "quickstart", "search"})


class Metrics:
    """Metrics of one application, in a registry of their own."""

    def __init__(self, planner: ServicePlanner, quotas: Quotas) -> None:
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
        self._errors = Histogram(
            "moetune_prediction_error_ratio",
            "Relative difference of the median observed step from the predicted one.",
            ("source",),
            buckets=_RELATIVE_ERRORS,
            registry=self._registry,
        )
        self._refused = Counter(
            "moetune_quota_refused",
            "Rows that were refused, as a client had added its hour's, or the store was full.",
            ("kind",),
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(_StoreState(planner, quotas))

    def answered(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            route: pattern of the matched route; "" for none.
        """
        self._requests.labels(
            method if method in _METHODS else "other", route or "none", status
        ).inc()
        self._seconds.labels(route or "none").observe(seconds)

    def observed(self, observations: Sequence[Observation]) -> None:
        """Count the errors of the predictions of stored observations."""
        for step in observations:
            if step.error is not None:
                source = step.source if step.source in _SOURCES else "other"
                self._errors.labels(source).observe(abs(step.error))

    def refused(self, kind: Kind, count: int) -> None:
        """Count rows that a client may not add."""
        self._refused.labels(kind).inc(count)

    def text(self) -> bytes:
        """Return the exposition; it reads the store."""
        return generate_latest(self._registry)


class _StoreState(Collector):
    """Gauges that are read at each scrape: readiness, sizes, limits, time of the newest fits."""

    def __init__(self, planner: ServicePlanner, quotas: Quotas) -> None:
        self._planner, self._quotas = planner, quotas

    def describe(self) -> Iterable[Metric]:
        """Return no names: registering must not read the store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Return the gauges."""
        is_ready, limits = not self._planner.problems(), self._quotas.limits
        yield GaugeMetricFamily("moetune_ready", "Whether the database can be used.", is_ready)
        if is_ready:
            with suppress(MoetuneError):
                size = self._quotas.size_bytes()
                yield GaugeMetricFamily("moetune_store_bytes", "Size of the rows.", size)
        yield GaugeMetricFamily(
            "moetune_store_limit_bytes", "Size that they may have.", limits.store_bytes
        )
        yield _labelled(
            "moetune_quota_per_hour",
            "Rows that one client may add in an hour.",
            "kind",
            {kind: limits.of(kind) for kind in KINDS},
        )
        yield _labelled(
            "moetune_profile_fitted_timestamp_seconds",
            "When the newest fit of a profile was stored.", "profile",
            self._fitted_at() if is_ready else {},
        )  # fmt: skip

    def _fitted_at(self) -> Mapping[str, float]:
        times: dict[str, float] = {}
        with suppress(MoetuneError):
            for fit in self._planner.reading.fits(limit=_NUM_FITS):
                times.setdefault(fit.profile, datetime.fromisoformat(fit.created_at).timestamp())
        return times


def _labelled(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(name, words, labels=(label,))
    for text, value in values.items():
        gauge.add_metric((text,), value)
    return gauge
