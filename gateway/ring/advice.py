"""How many workers of each role the work at hand wants, for an autoscaler to read. Pure; nothing scales by itself.

load [workers] = work at hand / what one worker should have of it
prefill: seconds of prompts that wait / --goal-prefill-wait-s
decode:  share of pages or of places in use, the larger, over all workers / --goal-kv-usage
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from gateway.ring.policy import WorkerView
from gateway.ring.request_steps import Role

CALM = 0.75  # of the goal, which those that stay may reach when others go: fewer would come and go


@dataclass(frozen=True, slots=True)
class Goals:
    """What one worker should have to do at most."""

    prefill_wait_s: float = 1.0  # seconds of its own work that wait
    kv_usage: float = 0.8  # share of its pages, and of its places


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for places at this gateway."""

    num_requests: int = 0
    num_tokens: int = 0  # whose KV is needed


DEFAULT_GOALS = Goals()


def advise(workers: Sequence[WorkerView], backlog: Backlog, goals: Goals) -> dict[Role, int]:
    """The wanted number of workers of each role. Workers that do not answer count as missing.

    While decode lacks workers, prefill gets no more: it would compute prompts that nothing takes.
    """
    prefills, decodes = ([view for view in workers if view.role == role] for role in ("prefill", "decode"))
    alive_prefills, alive_decodes = ([view for view in some if view.is_alive] for some in (prefills, decodes))
    decode = _wanted(len(alive_decodes), _decode_load(alive_decodes, backlog) / goals.kv_usage)
    prefill = _wanted(len(alive_prefills), _prefill_seconds(alive_prefills, backlog) / goals.prefill_wait_s)
    if decode > len(alive_decodes):
        prefill = min(prefill, max(len(alive_prefills), 1))
    return {"prefill": prefill if prefills else 0, "decode": decode}


def _wanted(num_alive: int, load: float) -> int:
    """At least one. Fewer than there are only if the load stays well within the goal of those left."""
    up, down = ceil(load), ceil(load / CALM)
    return max(up if up >= num_alive else min(num_alive, down), 1)


def _prefill_seconds(workers: Sequence[WorkerView], backlog: Backlog) -> float:
    """Seconds that one worker would need for all prompts that wait; 0 while no worker knows its speed."""
    speeds = [view.tokens_per_s for view in workers if view.tokens_per_s]
    if not speeds:
        return 0.0
    return (sum(view.tokens_waiting for view in workers) + backlog.num_tokens) * len(speeds) / sum(speeds)


def _decode_load(workers: Sequence[WorkerView], backlog: Backlog) -> float:
    """Workers' worth of pages or places in use, the larger, with what waits."""
    if not workers:
        return 0.0
    pages = sum(1 - view.free_pages / max(view.num_pages, 1) for view in workers)
    places = sum(view.num_running / view.max_running for view in workers)
    one = workers[0]
    pages += backlog.num_tokens / max(one.num_pages * one.page_tokens, 1)
    return max(pages, places + backlog.num_requests / one.max_running)
