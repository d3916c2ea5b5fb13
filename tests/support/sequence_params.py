"""Schedulers for tests, requests for them, and a tiny model that computes their steps."""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from wire.logprobs import TokenLogprobs
from worker.kv_cache import KVCacheManager, num_pages_for
from worker.params import ANY_NUMBER, SequenceParams
from worker.plan import TokenBudget, schedule
from worker.prefix_cache import PrefixCache
from worker.receiving import begin_read, finish_read
from worker.scheduler import Scheduler
from worker.sequences import Phase, ScheduledSequence, Sequence, Update

LEASE_S = 10.0


def pack(tokens: Seq[int]) -> bytes:
    return array("i", tokens).tobytes()


def answer(handle: int, num_prompt: int, max_tokens: int, *, first: int | None = None, **others: Any) -> SequenceParams:
    """A decode worker's params, computed locally unless `others` say otherwise. Its prompt begins with `first`."""
    values: dict[str, Any] = {
        "request_id": f"r{handle}",
        "prompt": pack([10_000 + handle if first is None else first, *range(1, num_prompt)]),
        "end": num_prompt - 1,
        "max_tokens": max_tokens,
        "gateway": "g",
        "handle": handle,
        "attempt": handle % 3 + 1,
    }
    return SequenceParams(**{**values, **others})


def prompt(number: int, num_prompt: int, **others: Any) -> SequenceParams:
    """A prefill worker's params: all KV but the last token's."""
    return replace(answer(number, num_prompt, 0, **others), gateway="", handle=0)


def token_at(position: int) -> int:
    """Replaces the model: the token names its own position."""
    return 1000 + position


def finish(
    scheduler: Scheduler, step: Seq[ScheduledSequence], now: float = 0.0,
    scores: Callable[[ScheduledSequence], Seq[TokenLogprobs]] = lambda planned: (),
) -> list[Update]:  # fmt: skip
    """Collect a launched step: every sequence gets its next token."""
    updates = []
    for planned in step:
        tokens = [token_at(planned.begin + planned.count)] if planned.wants_token else []
        updates.append(scheduler.finish_step(planned, tokens, now, prompt_logprobs=scores(planned)))
    return [update for update in updates if update is not None]


def build_scheduler(
    num_pages: int, page_tokens: int, max_running: int = 8, max_offer_pages: int = ANY_NUMBER
) -> Scheduler:
    cache = PrefixCache(num_pages, [0] * num_pages)
    kv = KVCacheManager(cache, page_tokens, "model", max_offer_pages=max_offer_pages)
    return Scheduler(kv, max_running, LEASE_S)


def plan(scheduler: Scheduler, prompt_tokens: int) -> list[ScheduledSequence]:
    return schedule(scheduler, TokenBudget(prompt_tokens, "--chunk"))


def step(scheduler: Scheduler, prompt_tokens: int = 99, now: float = 0.0) -> list[Update]:
    return finish(scheduler, plan(scheduler, prompt_tokens), now)


def run(scheduler: Scheduler, prompt_tokens: int = 99, steps_ahead: int = 0) -> None:
    """Run until all answers are whole."""
    flights: deque[list[ScheduledSequence]] = deque()
    while flights or any(
        sequence.num_missing for phase in (Phase.ACTIVE, Phase.PREEMPTED) for sequence in scheduler.in_phase(phase)
    ):
        planned = plan(scheduler, prompt_tokens)
        assert planned or flights, "no step is planned although tokens are missing"
        flights += [planned] if planned else []
        while len(flights) > (steps_ahead if planned else 0):
            finish(scheduler, flights.popleft())
        scheduler.check()


def awaited(handle: int, num_prompt: int, max_tokens: int, **others: Any) -> SequenceParams:
    """An answer whose KV another worker computes."""
    return answer(handle, num_prompt, max_tokens, **{"local_prefill_max_tokens": 0, **others})


def receive(scheduler: Scheduler, sequence: Sequence, now: float = 0.0, num_slots: int = 0) -> None:
    """Receive all the KV it waits for, in one offer, with so many slots of state."""
    begin, end = sequence.computed, sequence.params.end
    num_pages = num_pages_for(end - begin, scheduler.kv.page_tokens)
    begin_read(scheduler, sequence.id, sequence.params.attempt, begin, end, num_pages, num_slots)
    finish_read(scheduler, sequence.id, end, now, num_slots)
