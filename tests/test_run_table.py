"""Prompts on a prefill worker: random lives of runs, with the table's own check after each change."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from engine.choice import TokenLogprobs
from engine.kvcache.allocator import NeverFitsError, NoRoomError, PageAllocator, num_pages_for
from prefill_worker.batching import MAX_SCORED, Planned, plan_step
from prefill_worker.run_table import PrefillRun, RunTable


class RunTableMachine(RuleBasedStateMachine):
    """Calls and the engine interleave as two threads would, a step being two moments: planned and finished."""

    runs = Bundle("runs")

    @initialize(num_pages=st.integers(2, 10), page_tokens=st.integers(1, 4), max_running=st.integers(1, 4))
    def create(self, num_pages: int, page_tokens: int, max_running: int) -> None:
        self.generations = [0] * num_pages
        self.table = RunTable(PageAllocator(num_pages, self.generations), page_tokens, max_running)
        self.step: list[Planned] = []
        self.born: dict[int, list[int]] = {}  # run id |-> generations of its pages when it began
        self.offered: dict[int, int] = {}  # run id |-> positions offered so far

    @rule(target=runs, end=st.integers(1, 40))
    def start(self, end: int) -> PrefillRun | None:
        table, needed = self.table, num_pages_for(end, self.table.page_tokens)
        free, running = table.allocator.num_free, len(table)
        try:
            run = table.start("r", list(range(end + 1)), end)
        except NeverFitsError:
            assert needed > table.allocator.num_pages
            return None
        except NoRoomError:
            assert running == table.max_running or needed > free
            return None
        assert len(run.pages) == needed
        self.born[run.id] = [self.generations[page] for page in run.pages]
        self.offered[run.id] = 0
        return run

    @precondition(lambda self: not self.step)
    @rule(chunk=st.integers(1, 12))
    def plan(self, chunk: int) -> None:
        self.step = plan_step(self.table, chunk)
        assert sum(step.count for step in self.step) <= chunk
        waiting = [run for run in self.table if run.num_missing and not run.is_ended and not run.is_failed]
        assert [step.run.id for step in self.step] == [run.id for run in waiting][: len(self.step)], "oldest first"
        assert bool(waiting) == bool(self.step)
        assert all(step.run.is_stepped for step in self.step)

    @precondition(lambda self: self.step)
    @rule(is_failed=st.booleans())
    def finish(self, is_failed: bool) -> None:
        for planned in self.step:
            before = planned.run.computed
            if is_failed:
                self.table.fail_step(planned.run)
            else:
                self.table.finish_step(planned.run, planned.count)
            assert planned.run.computed == before + (0 if is_failed else planned.count) <= planned.run.end
        self.step = []

    @rule(run=runs)
    def offer(self, run: PrefillRun | None) -> None:
        """Whole pages, in order, each position once; a part of a page only at the very end."""
        if run is None or run.is_ended:
            return
        positions = self.table.next_offer(run, self.offered[run.id])
        if positions is None:
            return
        assert positions.start == self.offered[run.id] < positions.stop <= run.computed
        assert positions.stop % self.table.page_tokens == 0 or positions.stop == run.end
        pages = self.table.pages_of(run, positions)
        first = positions.start // self.table.page_tokens
        assert pages == run.pages[first : first + num_pages_for(len(positions), self.table.page_tokens)]
        self.offered[run.id] = positions.stop

    @rule(run=consumes(runs))
    def end(self, run: PrefillRun | None) -> None:
        if run is not None:
            self.table.end(run)
            assert (run in list(self.table)) == run.is_stepped
            self.table.end(run)  # idempotent

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        for run in [*self.table, *(step.run for step in self.step)]:
            assert [self.generations[page] for page in run.pages] == self.born[run.id], "pages changed hands early"
        for run in self.table:
            positions = self.table.next_offer(run, self.offered[run.id])
            stop = self.offered[run.id] if positions is None else positions.stop
            assert run.computed - self.table.page_tokens < stop <= run.computed
            assert stop % self.table.page_tokens == 0 or stop == run.end, "half a page is still being written"

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for run in self.table:
            self.table.end(run)
        for planned in self.step:
            self.table.finish_step(planned.run, planned.count)
        assert len(self.table) == 0
        assert self.table.allocator.num_used == 0


RunTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRunTableMachine = RunTableMachine.TestCase


def test_prompts_to_be_scored_take_a_part_of_a_step() -> None:
    table = RunTable(PageAllocator(200, [0] * 200), page_tokens=4, max_running=4)
    scored = [table.start(name, list(range(101)), 100, num_prompt_logprobs=2) for name in ("a", "b")]
    plain = table.start("c", list(range(301)), 300)
    counts = []
    while step := plan_step(table, chunk_tokens=250):
        counts.append([(planned.run.request_id, planned.count) for planned in step])
        for planned in step:
            begin = planned.run.computed + 1
            told = [TokenLogprobs(float(begin + at), (), ()) for at in range(planned.count)]
            table.finish_step(planned.run, planned.count, [] if planned.run is plain else told)
    assert counts == [[("a", 100), ("b", MAX_SCORED - 100), ("c", 122)], [("b", 200 - MAX_SCORED), ("c", 178)]]
    assert [[one.logprob for one in run.prompt_logprobs] for run in scored] == [list(range(1, 101))] * 2


def test_short_prompts_share_a_step_with_the_end_of_a_long_one() -> None:
    table = RunTable(PageAllocator(20, [0] * 20), page_tokens=4, max_running=4)
    ends = [10, 3, 2]
    runs = [table.start(str(end), list(range(end + 1)), end) for end in ends]
    counts = []
    while step := plan_step(table, chunk_tokens=8):
        counts.append([(planned.run.request_id, planned.count) for planned in step])
        for planned in step:
            table.finish_step(planned.run, planned.count)
    assert counts == [[("10", 8)], [("10", 2), ("3", 3), ("2", 2)]]
    assert [table.next_offer(run, 0) for run in runs] == [range(10), range(3), range(2)]


def test_offers_are_of_so_many_pages_at_most() -> None:
    table = RunTable(PageAllocator(20, [0] * 20), page_tokens=4, max_running=1, max_offer_pages=2)
    run = table.start("r", list(range(23)), 22)
    table.finish_step(run, 11)
    assert [table.next_offer(run, begin) for begin in (0, 8)] == [range(8), None]
    table.finish_step(run, 11)
    assert [table.next_offer(run, begin) for begin in (8, 16, 22)] == [range(8, 16), range(16, 22), None]


def test_refusals_name_numbers_and_settings() -> None:
    table = RunTable(PageAllocator(4, [0] * 4), page_tokens=4, max_running=1)
    with pytest.raises(NeverFitsError, match="17 tokens needs 5 pages; this worker has 4: raise --kv-memory-mib"):
        table.start("r", list(range(18)), 17)
    table.start("r", [1, 2], 1)
    with pytest.raises(NoRoomError, match="1 prompts are in work, the most allowed by --max-running"):
        table.start("r", [1, 2], 1)
