"""Metrics of the grading service for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kbx_env.outcome import Outcome

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800, 3600)
"""Upper bounds of the histograms' buckets, in seconds."""


class Metrics:
    """Counters of one service, and gauges that are read when they are asked for."""

    def __init__(self, numbers: Any) -> None:
        """Make the metrics.

        Args:
            numbers: the service; has ``queue``, ``connections``, ``screening`` and ``gpu_seconds``.
        """
        self._numbers, self._registry = numbers, (registry := CollectorRegistry())
        self._requests = Counter("kbx_http_requests", "Responses by status", ["status"], registry=registry)
        self._gradings = Counter(
            "kbx_gradings", "Gradings that ended, by verdict and backend", ["verdict", "backend"], registry=registry
        )
        latency = "Seconds from the acceptance of a request to its outcome"
        self._latency = Histogram("kbx_latency_seconds", latency, buckets=_SECONDS, registry=registry)
        grading = "Seconds of a grading in its worker"
        self._grading = Histogram("kbx_grading_seconds", grading, buckets=_SECONDS, registry=registry)
        self._registry.register(self)  # type: ignore[arg-type]

    def count_response(self, status: int) -> None:
        """Count a response."""
        self._requests.labels(str(status)).inc()

    def count_outcome(self, outcome: Outcome, seconds: float) -> None:
        """Count a grading that ended.

        Args:
            outcome: of the grading.
            seconds: from the acceptance of its request.
        """
        self._gradings.labels(str(outcome.verdict), outcome.backend).inc()
        self._latency.observe(seconds)
        if (total := outcome.seconds.get("total")) is not None:
            self._grading.observe(total)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the numbers that others keep; called by the registry."""
        n = self._numbers
        if n.queue is None:
            return
        yield GaugeMetricFamily("kbx_queue_waiting", "Requests that wait for a worker", n.queue.waiting)
        yield GaugeMetricFamily("kbx_queue_running", "Gradings that run", n.queue.running)
        yield GaugeMetricFamily("kbx_workers", "Gradings that can run at a time", n.queue.pool.width)
        yield CounterMetricFamily("kbx_reused", "Requests that were answered from the store", n.queue.reused)
        yield GaugeMetricFamily("kbx_connections_idle", "Connections without a request", len(n.connections.idle))
        yield CounterMetricFamily("kbx_connections_evicted", "Connections closed to make room", n.connections.evicted)
        if n.screening is not None:
            yield CounterMetricFamily("kbx_screened", "Submissions screened on the CPU tier", n.screening.screened)
            yield CounterMetricFamily("kbx_screened_survived", "Submissions that went on to the GPU", n.screening.survived)
        if n.gpu_seconds:
            busy = CounterMetricFamily("kbx_gpu_worker_seconds", "Seconds of work of each GPU's workers", labels=["gpu"])
            for gpu, seconds in n.gpu_seconds.items():
                busy.add_metric([str(gpu)], seconds)
            yield busy

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
