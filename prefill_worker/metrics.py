"""Metrics of prefill workers only."""

from worker.metrics import WorkerMetrics
from worker.scheduler import Scheduler


class PrefillMetrics(WorkerMetrics):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.offers_sent = self.counter("offers_sent", "Offers made to decode workers")
        self.queue_seconds = self.histogram(
            "request_queue_time_seconds", "From the Run call to the first step with its prompt"
        )
        self.prefill_seconds = self.histogram("request_prefill_time_seconds", "From the first step to the last")
