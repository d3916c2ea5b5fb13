"""Metrics of the queue and of the fleet, read at scrape time on the asyncio thread."""

import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.ring.advice import Goals, advise
from gateway.ring.queue import Queue


class FleetMetrics(Collector):
    """Registered once per registry."""

    def __init__(self, queue: Queue, goals: Goals) -> None:
        self._queue = queue
        self._goals = goals

    def collect(self) -> Iterable[Metric]:
        queue = self._queue
        views = queue.views(time.monotonic())
        num_queued, tokens_queued = queue.num_waiting, queue.num_tokens_waiting
        yield GaugeMetricFamily("baton:num_requests_running", "Requests placed on workers", queue.num_placed)
        yield GaugeMetricFamily("baton:num_requests_waiting", "Requests that wait for a worker", num_queued)
        yield GaugeMetricFamily("baton:prompt_tokens_waiting", "Tokens of requests in the queue", tokens_queued)
        text = "Prompts computed by decode workers as no prefill worker was alive"
        yield CounterMetricFamily("baton:local_prefill_fallbacks", text, queue.num_fallbacks)
        workers = GaugeMetricFamily("baton:workers", "Workers that take requests, or not", labels=("role", "state"))
        counts = Counter((view.role, "alive" if view.is_alive else "not_alive") for view in views)
        for role in ("prefill", "decode"):
            for state in ("alive", "not_alive"):
                workers.add_metric((role, state), counts[role, state])
        yield workers
        text = "Workers that the present load needs, by --goal-prefill-wait-s and --goal-kv-usage"
        desired = GaugeMetricFamily("baton:desired_workers", text, labels=("role",))
        for role, count in advise(views, num_queued, tokens_queued, self._goals, queue.router.expects_prefill).items():
            desired.add_metric((role,), count)
        yield desired
