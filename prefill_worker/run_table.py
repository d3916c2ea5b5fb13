"""Prompts in work on a prefill worker and the pages they hold. Pure: ints; the caller serialises calls.

One run's life, and what frees its pages:

    start ──► computing, chunk by chunk ──► computed ──last offer acknowledged──► gone
                  └─ cancelled, refused, failed: ended; gone when no engine step touches its pages
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.choice import TokenLogprobs
from engine.kvcache.allocator import NeverFitsError, NoRoomError, PageAllocator, num_pages_for

ANY_NUMBER = 2**32


@dataclass(slots=True)
class PrefillRun:
    """One prompt. Changed only by RunTable."""

    id: int
    request_id: str
    prompt_ids: Sequence[int]
    end: int  # positions [0, end) are to be computed
    pages: list[int]
    num_prompt_logprobs: int | None = None  # tell the prompt's log-probabilities, and so many likely tokens'; None: no
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt_ids[1 : computed + 1], if asked for
    computed: int = 0  # KV of positions [0, computed) is in `pages`
    is_stepped: bool = False  # an engine step works on `pages`
    is_failed: bool = False  # a step failed: it is in no further one
    is_ended: bool = False

    @property
    def num_missing(self) -> int:
        return self.end - self.computed


@dataclass(slots=True)
class RunTable:
    """All runs of a worker, and the pages of its pool."""

    allocator: PageAllocator
    page_tokens: int
    max_running: int
    max_offer_pages: int = ANY_NUMBER  # so that none takes too long to read
    on_empty: Callable[[], None] = lambda: None  # called when the last run is gone
    _runs: dict[int, PrefillRun] = field(default_factory=dict)  # id |-> run, oldest first
    _next_id: int = 1

    def __iter__(self) -> Iterator[PrefillRun]:
        return iter(list(self._runs.values()))  # a copy: metrics read from another thread, loops end runs

    def __len__(self) -> int:
        return len(self._runs)

    def start(
        self, request_id: str, prompt_ids: Sequence[int], end: int, num_prompt_logprobs: int | None = None
    ) -> PrefillRun:
        """Lease pages for positions [0, end). Raises NeverFitsError or NoRoomError."""
        needed = num_pages_for(end, self.page_tokens)
        if needed > self.allocator.num_pages:
            raise NeverFitsError(
                f"a prompt of {end} tokens needs {needed} pages; this worker has {self.allocator.num_pages}: "
                "raise --kv-memory-mib"
            )
        if len(self._runs) >= self.max_running:
            raise NoRoomError(f"{len(self._runs)} prompts are in work, the most allowed by --max-running")
        pages = self.allocator.allocate(needed)
        run = PrefillRun(self._next_id, request_id, prompt_ids, end, pages, num_prompt_logprobs)
        self._next_id += 1
        self._runs[run.id] = run
        return run

    def begin_step(self, runs: Iterable[PrefillRun]) -> None:
        """An engine step will work on these runs' pages: they stay leased until `finish_step` or `fail_step`."""
        for run in runs:
            run.is_stepped = True

    def finish_step(self, run: PrefillRun, count: int, logprobs: Iterable[TokenLogprobs] = ()) -> None:
        """A step computed `count` more positions, and the `logprobs` of the tokens after them if asked for."""
        run.is_stepped = False
        run.computed += count
        run.prompt_logprobs.extend(logprobs)
        self._remove_if_over(run)

    def fail_step(self, run: PrefillRun) -> None:
        """A step went wrong. The run keeps its pages, which may be on offer, until its caller ends it."""
        run.is_failed = True
        self.finish_step(run, 0)

    def end(self, run: PrefillRun) -> None:
        """Nobody needs this run any more. Idempotent."""
        run.is_ended = True
        self._remove_if_over(run)

    def _remove_if_over(self, run: PrefillRun) -> None:
        if run.is_ended and not run.is_stepped and self._runs.pop(run.id, None) is not None:
            self.allocator.free(run.pages)
            if not self._runs:
                self.on_empty()

    def next_offer(self, run: PrefillRun, begin: int) -> range | None:
        """Positions from `begin` on that can be offered now: whole pages, and the last part once all is computed."""
        whole = run.computed if run.computed == run.end else run.computed // self.page_tokens * self.page_tokens
        end = min(whole, begin + self.max_offer_pages * self.page_tokens)
        return range(begin, end) if end > begin else None

    def pages_of(self, run: PrefillRun, positions: range) -> list[int]:
        """The pages that hold `positions`, whose start lies on a page border."""
        return run.pages[positions.start // self.page_tokens : num_pages_for(positions.stop, self.page_tokens)]

    def check(self) -> None:
        """No page has two holders and none is held by nobody."""
        held = [page for run in self for page in run.pages]
        if len(held) != len(set(held)):
            raise AssertionError("a page belongs to two runs")
        self.allocator.check(held)
