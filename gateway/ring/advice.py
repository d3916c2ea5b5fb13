"""How many workers of each role the present load needs, for an autoscaler to read. Pure; nothing scales by itself.

    desired = load / goal for one worker, rounded up
    load of prefill: seconds of prompts that wait, at the workers' measured speed
    load of decode:  share of pages or of places in use, the larger, over all workers

What waits in the gateway's queue belongs to decode while no decode worker has room, else to prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from gateway.ring.policy import WorkerView
from gateway.ring.request_steps import Role

CALM = 0.75  # of the goal: fewer workers only if those left stay below it, so that the number does not oscillate
MAX_GROWTH = 2  # times those alive: a burst, or a speed measured on small prompts, asks for no more at once


@dataclass(frozen=True, slots=True)
class Goals:
    """What one worker should have to do at most."""

    prefill_wait_s: float  # seconds of its own work that wait
    kv_usage: float  # share of its pages, and of its places


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
    """At least one; while the load is not known, as many as there are."""
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
