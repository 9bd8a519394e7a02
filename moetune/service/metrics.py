"""Prometheus metrics: requests, errors of predictions, readiness and fits of the store."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from moetune.app.planner import ServicePlanner
from moetune.domain.errors import MoetuneError
from moetune.domain.records import FitInfo, Observation
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
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
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
        count, times = self._children_of(method, route, status)
        count.inc()
        times.observe(seconds)

    def _children_of(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        """Return the two series of such requests, cached: prometheus_client's look-up is slow."""
        known = method if method in _METHODS else "other"
        key = known, route or "none", status
        if key not in self._children:
            self._children[key] = self._requests.labels(*key), self._seconds.labels(key[1])
        return self._children[key]

    def observed(self, observations: Sequence[Observation]) -> None:
        """Count the errors of the predictions of stored observations."""
        for one in observations:
            if one.error is not None:
                source = one.source if one.source in _SOURCES else "other"
                self._errors.labels(source).observe(abs(one.error))

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
        is_ready = not self._planner.problems()
        yield GaugeMetricFamily(
            "moetune_ready", "Whether the database can be used.", value=float(is_ready)
        )
        yield from self._limits(is_ready=is_ready)
        fitted = GaugeMetricFamily(
            "moetune_profile_fitted_timestamp_seconds",
            "When the newest fit of a profile was stored.",
            labels=("profile",),
        )
        for fit in self._newest_fits() if is_ready else ():
            fitted.add_metric((fit.profile,), datetime.fromisoformat(fit.created_at).timestamp())
        yield fitted

    def _limits(self, *, is_ready: bool) -> Iterator[Metric]:
        limits = self._quotas.limits
        if is_ready:
            with suppress(MoetuneError):
                size = float(self._quotas.size_bytes())
                yield GaugeMetricFamily("moetune_store_bytes", "Size of the rows.", value=size)
        most = float(limits.store_bytes)
        yield GaugeMetricFamily("moetune_store_limit_bytes", "Size that they may have.", value=most)
        hourly = GaugeMetricFamily(
            "moetune_quota_per_hour", "Rows that one client may add in an hour.", labels=("kind",)
        )
        for kind in KINDS:
            hourly.add_metric((kind,), float(limits.of(kind)))
        yield hourly

    def _newest_fits(self) -> Iterable[FitInfo]:
        newest: dict[str, FitInfo] = {}
        try:
            for fit in self._planner.reading.fits(limit=_NUM_FITS):
                newest.setdefault(fit.profile, fit)
        except MoetuneError:
            return ()
        return newest.values()
