"""KV that comes into the pool from elsewhere before a prompt is admitted, which then finds it as if it had been cached.

Runs on the asyncio thread.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Seq

import structlog

from wire.timing import KVOrigin, ReadTokens
from worker.kv_cache import Restore
from worker.metrics import PromptSpeed, WorkerMetrics
from worker.prefix_cache import Generations
from worker.scheduler import Scheduler
from worker.thread import EngineThread
from worker.tiers.plans import RestorePlan, begin_restore, end_restore

RECHECK_S = 60.0  # nothing bad is believed for longer: neither that a place is slow nor that a lender failed
BELIEVED = 10.0  # a low speed is believed for so many times as long as its last read took: trying again costs a tenth
SHORT_S = 0.05  # a read of so long is preferred anyway: what it saves is there for others
log = structlog.get_logger()


def prefers_reading(num_tokens: int, num_waiting: int, read_per_s: float, computed_per_s: float) -> bool:
    """Whether to read these tokens' KV, and not to compute it behind `num_waiting` others. A speed of 0: not known."""
    if not read_per_s or not computed_per_s:
        return True
    return num_tokens / read_per_s < max((num_tokens + num_waiting) / computed_per_s, SHORT_S)


class Fresh:
    """Pages read for prompts that are not admitted yet: page |-> (generation, where it was)."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._pages: dict[int, tuple[int, KVOrigin]] = {}

    def add(self, pages: Iterable[int], place: KVOrigin) -> None:
        self._pages.update((page, (int(self._generations[page]), place)) for page in pages)

    def take(self, pages: Iterable[int], page_tokens: int) -> ReadTokens:
        """Tokens of a new sequence's cached pages, by where they came from; each page counts for one sequence."""
        found = ((page, self._pages.pop(page, None)) for page in pages)
        num: Counter[str] = Counter(entry[1] for page, entry in found if entry and entry[0] == self._generations[page])
        return ReadTokens(*(num[origin] * page_tokens for origin in ReadTokens._fields))


class Reading:
    """Reads from one kind of place, and knows how fast that is."""

    def __init__(
        self, place: KVOrigin, scheduler: Scheduler, thread: EngineThread, metrics: WorkerMetrics, fresh: Fresh
    ) -> None:
        self.num_tokens = 0  # that came
        self._place = place
        self._scheduler = scheduler
        self._thread = thread
        self._computing = metrics.prompt_speed
        self._counter = metrics.tokens_read.labels(place)
        self._fresh = fresh
        self._speed = PromptSpeed()  # after SHORT_S of each read: a small one is mostly waiting, large ones are not
        self._believed_until = 0.0  # time.monotonic() from which on a low speed is forgotten

    def is_preferred(self, num_tokens: int) -> bool:
        """Whether to read the KV of so many tokens now, by what was measured."""
        num_waiting, computed_per_s = self._scheduler.num_tokens_waiting, self._computing.tokens_per_s
        if prefers_reading(num_tokens, num_waiting, self._speed.tokens_per_s, computed_per_s):
            return True
        if time.monotonic() < self._believed_until:
            return False
        self._speed = PromptSpeed()
        return True

    async def fill(self, plan: RestorePlan, read: Callable[[Restore], Awaitable[tuple[Seq[bool], int]]]) -> None:
        """Make the plan's pages and slot cached ones. Raises NoRoomError, and what `read` raises: none is then.

        `read` fills them and returns, for each leading page that is there, whether the draft model's KV is too, and
        how many slots are. They are held until it ends.
        """
        started, drafts, num_slots = time.monotonic(), list[bool](), 0
        with self._thread.lock:
            restore = begin_restore(self._scheduler, *plan)
        try:
            drafts[:], num_slots = await read(restore)
        finally:
            with self._thread.lock:
                end_restore(self._scheduler.kv, restore, drafts, num_slots)
                self._fresh.add(restore.pages[: len(drafts)], self._place)
                self._thread.wake()
        if drafts:
            num_tokens, ended = len(drafts) * self._scheduler.kv.page_tokens, time.monotonic()
            seconds = ended - started
            self._speed.count(num_tokens, max(seconds - SHORT_S, 0.0))
            self._believed_until = ended + min(BELIEVED * seconds, RECHECK_S)
            self.num_tokens += num_tokens
            self._counter.inc(num_tokens)
            log.info("KV was read", source=self._place, tokens=num_tokens, seconds=round(seconds, 3))
