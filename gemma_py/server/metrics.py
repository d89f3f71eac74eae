"""The metrics that /metrics reports, in Prometheus' text format."""

from collections.abc import Iterator
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemma_py.generate.base_scheduler import BaseScheduler
from gemma_py.generate.events import Usage

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
CONTENT_TYPE = prometheus.CONTENT_TYPE_PLAIN_0_0_4
prometheus.disable_created_metrics()


class Metrics:
    def __init__(self, scheduler: BaseScheduler[Any, Any]) -> None:
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(_SchedulerCollector(scheduler))
        self.requests = prometheus.Counter(
            "gemma_py_requests", "HTTP requests answered.", ("path", "status"), registry=self._registry
        )
        self._tokens = prometheus.Counter(
            "gemma_py_tokens", "Tokens: prompt, cached or generated.", ("kind",), registry=self._registry
        )
        self._first = prometheus.Histogram(
            "gemma_py_first_token_seconds",
            "Time from a request to its first token.",
            buckets=_FIRST,
            registry=self._registry,
        )
        self.between = prometheus.Histogram(
            "gemma_py_between_tokens_seconds",
            "Time from one token of a response to the next.",
            buckets=_BETWEEN,
            registry=self._registry,
        )

    def ended(self, usage: Usage) -> None:
        for kind in ("prompt", "cached", "generated"):
            self._tokens.labels(kind).inc(getattr(usage, kind))
        if usage.generated:
            self._first.observe(usage.first_token_seconds)

    def text(self) -> bytes:
        return prometheus.generate_latest(self._registry)


class _SchedulerCollector(Collector):
    def __init__(self, scheduler: BaseScheduler[Any, Any]) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        stats = self._scheduler.stats()
        yield GaugeMetricFamily("gemma_py_requests_running", "Requests that are running.", stats.running)
        yield GaugeMetricFamily("gemma_py_requests_waiting", "Requests in the queue.", stats.waiting)
        yield GaugeMetricFamily(
            "gemma_py_kv_bytes", "Bytes reserved for the KV cache of running requests.", stats.kv_bytes
        )
        yield GaugeMetricFamily("gemma_py_prefix_bytes", "Bytes held by the prefix cache.", stats.prefix_bytes)
        yield CounterMetricFamily("gemma_py_prefix_hits", "Prompts with a cached prefix.", stats.prefix_hits)
        yield CounterMetricFamily("gemma_py_prefix_misses", "Prompts without a cached prefix.", stats.prefix_misses)
        yield CounterMetricFamily("gemma_py_passes", "Forward passes.", stats.passes)
        yield CounterMetricFamily(
            "gemma_py_failed_passes", "Forward passes that failed and were repeated.", stats.failed_passes
        )
        yield CounterMetricFamily("gemma_py_computed_tokens", "Tokens computed.", stats.computed_tokens)
        yield CounterMetricFamily(
            "gemma_py_guessed_tokens", "Draft tokens of speculative decoding.", stats.guessed_tokens
        )
        yield CounterMetricFamily(
            "gemma_py_accepted_tokens",
            "Draft tokens of speculative decoding that were accepted.",
            stats.accepted_tokens,
        )


class RequestCounter:
    """Middleware that counts requests by path and status. All unknown paths are counted as "other"."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = route.path if isinstance(route, Route) else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, send_counted)
