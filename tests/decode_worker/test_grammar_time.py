"""Grammars never take more than their share of an engine step, and divide it fairly.

Clocks are fake or limits are zero, so nothing depends on the machine's speed.
"""

import gc
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest

from decode_worker.grammar import matcher, step_thread
from decode_worker.grammar.constraints import Constraints
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.grammar.limits import MAX_BESIDE_CPU_S
from decode_worker.grammar.step_thread import NoThreadError, StepThread, StuckError, TurnEnd
from decode_worker.interfaces import Standing
from tests.support.grammars import compile_here, encode, vocabulary
from tests.support.real_workers import packed
from worker.kv_cache import KVCacheManager
from worker.params import SequenceParams
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence

STOP = 2
PATIENCE_S = 100.0
AMBIGUOUS = 'root ::= x\nx ::= "a" | x x | x x x | ""'

# -- one answer ------------------------------------------------------------------------------------------------------


class Clock:
    """CPU seconds: each reading adds one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(matcher, "thread_time", clock)
    monkeypatch.setattr(matcher, "MAX_TOKEN_CPU_S", 10.0)
    return clock


def test_a_token_that_takes_too_long_ends_its_answer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compile_here("ebnf", AMBIGUOUS, vocabulary())
    monkeypatch.setattr(matcher, "MAX_TOKEN_CPU_S", 0.5)
    with pytest.raises(GrammarMismatchError, match="too ambiguous"):
        grammar.new_matcher([STOP]).fill(())
    with pytest.raises(GrammarMismatchError, match="too ambiguous"):
        grammar.new_matcher([STOP]).accept(encode("a"))


# -- all answers of a step -------------------------------------------------------------------------------------------


def count_turns(
    costs: Sequence[float], budget: float, num_steps: int, times: list[float] | None = None, forward_s: float = 1.0
) -> Counter[int]:
    """Number of turns per answer if they take these CPU seconds and a step has `budget`, and `forward_s` besides.

    `times`: gets what the masks of each step took.
    """
    counts, now, taken = Counter[int](), 0.0, list[float]() if times is None else times

    def run(calls: Sequence[partial[Any]], cpu_s: float) -> list[TurnEnd[Any]]:
        left, done = min(budget, cpu_s), list[TurnEnd[Any]]()
        for call in calls:
            number = call.args[-2].params.handle
            if done and left <= 0:
                break
            left -= costs[number]
            taken[-1] += costs[number]
            counts[number] += 1
            done.append(TurnEnd(call(), costs[number]))
        return done

    here, grammar = Constraints(), compile_here("regex", "[a-z]+", vocabulary())
    here._thread.run = run  # type: ignore[method-assign, assignment]
    here._allowance.look = partial(lambda look, _: look(now), here._allowance.look)  # type: ignore[method-assign]
    cache = PrefixCache(2 * len(costs), [0] * 2 * len(costs))
    scheduler = Scheduler(KVCacheManager(cache, 16), max_running=len(costs), lease_s=1.0)
    params = [SequenceParams("", packed([1, 2]), 1, 8, handle=i, grammar=grammar) for i in range(len(costs))]
    planned = [ScheduledSequence(scheduler.admit(one, 0.0), 1, 1, wants_token=True) for one in params]
    for _step in range(num_steps):
        now += forward_s + sum(taken[-1:])
        taken.append(0.0)
        standings = here.constrain(planned)
        errors = [one for one in standings if isinstance(one, GrammarMismatchError)]
        assert all("for which other answers wait" in str(error) for error in errors)
        assert {*standings} - {*errors} <= {Standing.OPEN, Standing.LATE}
        planned = [step for step, one in zip(planned, standings, strict=True) if one not in errors]
    return counts


def test_the_cheap_do_not_wait_for_the_dear() -> None:
    counts = count_turns([0.09] * 60 + [0.0001] * 4, budget=0.15, num_steps=200)
    assert min(counts[number] for number in range(60, 64)) >= 160
    assert min(counts[number] for number in range(60)) > 0


def test_many_costly_answers_take_a_share_of_the_time_beside_others() -> None:
    """One answer with an honest grammar, 64 of an ambiguous one: the honest one keeps four fifths of its pace."""
    forward_s, times = 0.005, list[float]()
    counts = count_turns([0.02] * 64 + [0.0001], 0.15, 2000, times, forward_s)
    assert counts[64] >= 1980, "all are unknown at first"
    assert max(times[20:]) <= MAX_BESIDE_CPU_S + 0.02 + 0.0001
    assert sum(times[100:]) < 0.3 * (1900 * forward_s)
    assert min(counts[number] for number in range(64)) > 0 and sum(times) > 0.1 * 2000 * forward_s


def test_an_answer_that_costs_others_too_much_is_ended() -> None:
    """None of the others is: dear ones whose masks take less at the mean, however long they run, and cheap ones."""
    counts = count_turns([0.09, 0.019, 0.0001], 0.15, 1000)
    assert counts[0] == 1 + 12, "beside others from the second step on"
    assert counts[1] > 200 and counts[2] == 1000
    assert count_turns([0.09] * 2, 0.15, 100) == {0: 100, 1: 100}, "alone they may"


def test_costly_answers_alone_get_all_the_time() -> None:
    times = list[float]()
    count_turns([0.02] * 64, 0.15, 100, times, 0.005)
    assert min(times) >= 0.15


# -- the thread ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Event], None]]:
    """Acts like a call of xgrammar that takes minutes, until its event is set. All others seem to take no time."""
    gates, idents = list[Event](), set[int | None]()
    monkeypatch.setattr(step_thread._Thread, "cpu_s", lambda thread: math.inf if thread.ident in idents else -math.inf)

    def wait(gate: Event) -> None:
        gates.append(gate)
        idents.add(threading.get_ident())
        gate.wait(PATIENCE_S)

    yield wait
    for gate in gates:
        gate.set()


def test_calls_are_made_while_there_is_time() -> None:
    here = StepThread()

    def fail() -> int:
        raise ValueError("no")

    ran = here.run([lambda: 1, fail, lambda: 3], cpu_s=PATIENCE_S)
    assert [str(one.result) for one in ran] == ["1", "no", "3"]
    ran = here.run([lambda: 1, lambda: 2], cpu_s=0.0)
    assert [one.result for one in ran] == [1]  # enough time for one


@pytest.mark.parametrize("error", [None, ProcessLookupError, PermissionError])
def test_a_call_that_takes_too_long_is_left_behind(
    hang: Callable[[Event], None], monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None
) -> None:
    """`error`: of lowering its priority. Its call, and so the thread, may end at that very moment."""
    lowered = list[int]()

    def set_priority(_which: int, thread: int, priority: int) -> None:
        lowered.append(priority)
        if error is not None:
            raise error

    monkeypatch.setattr(os, "setpriority", set_priority)
    here, gate = StepThread(), Event()
    ran = here.run([lambda: None, lambda: hang(gate), lambda: None], cpu_s=PATIENCE_S)
    assert (len(ran), type(ran[1].result), lowered) == (2, StuckError, [19])
    (left,) = here._abandoned
    assert len(here.run([lambda: None] * 2, cpu_s=PATIENCE_S)) == 2  # on another thread
    gate.set()
    left.join(PATIENCE_S)
    assert not left.is_alive()
    assert (len(ran), len(left.done)) == (2, 1)  # late results are dropped


def test_a_system_without_a_further_thread_fails_the_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    here = StepThread()
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        with pytest.raises(NoThreadError, match="allow this process more threads"):
            here.run([lambda: None], cpu_s=PATIENCE_S)
    assert len(here.run([lambda: None], cpu_s=PATIENCE_S)) == 1


def test_the_thread_ends_with_its_owner() -> None:
    here = StepThread()
    (thread,) = [one.result for one in here.run([threading.current_thread], cpu_s=PATIENCE_S)]
    assert isinstance(thread, Thread)
    del here
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
