"""How many workers of each role the present load needs, for an autoscaler to read; nothing scales by itself.

    desired = load / goal for one worker, rounded up
    load of prefill: seconds of prompts that wait, at the workers' measured speed
    load of decode:  share of pages or of places in use, the larger, over all workers

What waits in the gateway's queue belongs to decode while no decode worker has room, else to prefill.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.router.queue import Queue
from gateway.router.worker_view import Role, WorkerView

CALM = 0.75  # of the goal: fewer workers only if those left stay below it, so that the number does not oscillate
MAX_GROWTH = 2  # times those alive: a burst, or a speed measured on small prompts, asks for no more at once


@dataclass(frozen=True, slots=True)
class Goals:
    """The most that one worker should have to do."""

    prefill_wait_s: float  # seconds of its own work that wait
    kv_usage: float  # share of its pages, and of its places
    itl_s: float = 0.0  # between an answer's tokens; 0: none


def advise(
    workers: Sequence[WorkerView], num_queued: int, tokens_queued: int, goals: Goals, expects_prefill: bool
) -> dict[Role, int]:
    """The desired number of workers of each role.

    `num_queued`, `tokens_queued`: requests in this gateway's queue, and tokens whose KV they need. `expects_prefill`:
    whether there are to be prefill workers. While no decode worker has room, prefill gets no more workers.
    """
    prefills, decodes = ([view for view in workers if view.role == role] for role in ("prefill", "decode"))
    alive_prefills, alive_decodes = ([view for view in some if view.is_alive] for some in (prefills, decodes))
    is_decode_full = not any(view.num_running < view.max_running and not view.is_full for view in alive_decodes)
    waiting = (num_queued, tokens_queued) if is_decode_full else (0, 0)
    decode = _desired(decodes, alive_decodes, _decode_load(alive_decodes, *waiting), goals.kv_usage)
    seconds = _prefill_seconds(alive_prefills, 0 if is_decode_full else tokens_queued)
    prefill = _desired(prefills, alive_prefills, seconds, goals.prefill_wait_s)
    if is_decode_full:
        prefill = min(prefill, max(len(alive_prefills), 1))
    return {"prefill": prefill if expects_prefill else 0, "decode": decode}


def _desired(known: Sequence[WorkerView], alive: Sequence[WorkerView], load: float | None, goal: float) -> int:
    """The number of workers wanted: at least one; while the load is not known, as many as there are."""
    if load is None:
        return max(len(known), 1)
    up, down = ceil(load / goal), ceil(load / (CALM * goal))
    return max(min(up, MAX_GROWTH * len(alive)) if up >= len(alive) else min(down, len(alive)), 1)


def _prefill_seconds(workers: Sequence[WorkerView], tokens_queued: int) -> float | None:
    """Seconds that one worker would need for all prompts that wait. None: some wait, and no speed is known."""
    num_tokens = sum(view.tokens_waiting for view in workers) + tokens_queued
    speeds = [view.tokens_per_s for view in workers if view.tokens_per_s]
    if not speeds:
        return None if num_tokens or not workers else 0.0
    return num_tokens * len(speeds) / sum(speeds)


def _decode_load(workers: Sequence[WorkerView], num_queued: int, tokens_queued: int) -> float | None:
    """Workers' worth of pages or places in use, the larger, with what waits. None without a worker."""
    if not workers:
        return None
    one = workers[0]
    pages = sum(1 - view.free_pages / max(view.num_pages, 1) for view in workers)
    places = sum(view.num_running / view.max_running for view in workers)
    return max(pages + tokens_queued / max(one.num_pages * one.page_tokens, 1), places + num_queued / one.max_running)


def describe_revisions(views: Sequence[WorkerView]) -> Iterable[Metric]:
    """Which revisions serve, and how much of the work each has."""
    text = "Workers of a revision that take requests"
    workers = GaugeMetricFamily("baton:revision_workers", text, labels=("revision", "role"))
    text = "Requests placed on decode workers of a revision"
    running = GaugeMetricFamily("baton:revision_requests_running", text, labels=("revision",))
    for revision in sorted({view.revision for view in views}):
        alike = [view for view in views if view.revision == revision]
        for role in ("prefill", "decode"):
            workers.add_metric((revision, role), sum(view.role == role and view.is_alive for view in alike))
        running.add_metric((revision,), sum(view.num_mine for view in alike if view.role == "decode"))
    return workers, running


class FleetMetrics(Collector):
    """Metrics of the queue and of the fleet, read at scrape time on the asyncio thread."""

    def __init__(self, queue: Queue, count_waiting: Callable[[], int], goals: Goals) -> None:
        self._queue = queue
        self._count_waiting = count_waiting
        self._goals = goals

    def collect(self) -> Iterable[Metric]:
        queue = self._queue
        views = queue.views()
        num_queued, tokens_queued = self._count_waiting(), queue.num_tokens_waiting
        yield GaugeMetricFamily("baton:num_requests_running", "Requests placed on workers", queue.num_placed)
        yield GaugeMetricFamily("baton:num_requests_waiting", "Requests that wait for a worker", num_queued)
        yield GaugeMetricFamily("baton:prompt_tokens_waiting", "Tokens of requests in the queue", tokens_queued)
        text = "Prompts computed by decode workers as no prefill worker was alive"
        yield CounterMetricFamily("baton:local_prefill_fallbacks", text, queue.num_fallbacks)
        workers = GaugeMetricFamily("baton:workers", "Workers that take requests, or not", labels=("role", "state"))
        counts = Counter((view.role, "alive" if view.is_alive else "not_alive") for view in views if not view.is_closed)
        for role in ("prefill", "decode"):
            for state in ("alive", "not_alive"):
                workers.add_metric((role, state), counts[role, state])
        yield workers
        yield from describe_revisions([view for view in views if view.revision])
        text = "Workers that the present load needs, by --goal-prefill-wait-s and --goal-kv-usage"
        desired = GaugeMetricFamily("baton:desired_workers", text, labels=("role",))
        for role, count in advise(views, num_queued, tokens_queued, self._goals, queue.placer.expects_prefill).items():
            desired.add_metric((role,), count)
        yield desired
