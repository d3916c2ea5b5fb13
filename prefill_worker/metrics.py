"""What a prefill worker counts."""

from prefill_worker.run_table import RunTable
from runtime.metrics import WorkerMetrics


class PrefillMetrics(WorkerMetrics):
    def __init__(self, table: RunTable) -> None:
        super().__init__()
        self.offers_sent = self.counter("offers_sent", "Offers made to decode workers")
        self.offers_accepted = self.counter("offers_accepted", "Offers acknowledged by decode workers")
        self.offers_refused = self.counter("offers_refused", "Offers refused by decode workers", ("reason",))
        self.queue_seconds = self.histogram(
            "request_queue_time_seconds", "From the Run call to the first step with its prompt"
        )
        self.prefill_seconds = self.histogram("request_prefill_time_seconds", "From the first step to the last")
        self.cancelled = self.counter("cancelled", "Prompts that nobody wants any more", ("phase",))
        self.add_pool_gauges(lambda: table.allocator.num_used, table.allocator.num_pages)
        self.gauge("num_requests_running", "Prompts begun", lambda: sum(run.computed > 0 for run in table))
        self.gauge("num_requests_waiting", "Prompts not begun", lambda: sum(run.computed == 0 for run in table))
        self.gauge("leases_open", "Prompts that hold pages", lambda: len(table))
