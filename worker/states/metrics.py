"""Metrics of slots."""

from worker.metrics import WorkerMetrics
from worker.prefix_cache import PrefixCache


def add_gauges(slots: PrefixCache, metrics: WorkerMetrics) -> None:
    metrics.gauge("state_slots_used", "Slots of recurrent state that sequences hold", lambda: slots.num_held)
    metrics.gauge("state_slots_cached", "Slots with checkpoints that prompts may find", lambda: slots.num_cached)
