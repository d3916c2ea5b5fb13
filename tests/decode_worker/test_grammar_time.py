"""Grammars never take more than their share of an engine step, and divide it fairly.

Clocks are fake or limits are zero, so nothing depends on the machine's speed.
"""

import gc
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import Event, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.decoding import NO_SPECULATION, Answers, build_eager_speculator, decode
from decode_worker.grammar import constraints, matcher, step_thread
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.grammar.fair_share import UNKNOWN_S, FairShare
from decode_worker.grammar.limits import MAX_STUCK
from decode_worker.grammar.matcher import Grammar, Matcher
from decode_worker.grammar.step_thread import NoThreadError, StepThread
from decode_worker.speculation.drafters import NgramDrafter
from demo.paths import TARGET_DIR
from engine.engine import Engine, build_engine
from gateway.text.tokenizer import Tokenizer
from tests.support.grammars import compile_here, vocabulary
from tests.support.real_workers import packed, taken_over
from wire.sampling import SamplingParams
from worker.sequences import SequenceParams

STOP = 2
PATIENCE_S = 100.0
AMBIGUOUS = 'root ::= x\nx ::= "a" | x x | x x x | ""'
LIST = '{"type": "array", "items": {"enum": ["red", "blue", "red and blue"]}, "minItems": 3, "maxItems": 5}'


def encode(text: str) -> list[int]:
    return Tokenizer(TARGET_DIR).encode(text, add_special_tokens=False)


class Clock:
    """CPU seconds: each reading adds one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


# -- one answer ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(matcher, "thread_time", clock)
    monkeypatch.setattr(matcher, "MAX_TOKEN_CPU_S", 10.0)
    return clock


def test_drafts_are_cut_when_time_is_over(clock: Clock) -> None:
    state = compile_here("regex", "[0-9]{9}", vocabulary()).new_matcher([STOP])
    digits = encode("12345")
    assert len(state.fill(digits)) == len(digits) + 1
    assert len(state.fill(digits, until=clock.now + 12)) == 4  # five readings per draft
    assert len(state.fill(digits, until=clock.now)) == 1
    assert len(state.fill(digits)) == len(digits) + 1


def test_a_replay_stops_when_time_is_over_and_goes_on_from_there(clock: Clock) -> None:
    grammar = compile_here("regex", "[0-9]{9}", vocabulary())
    digits, state, turns = encode("12345678"), grammar.new_matcher([STOP]), 0
    while not state.accept(digits[state.num_tokens :], until=clock.now + 7):
        turns += 1
        assert state.num_tokens == 3 * turns
    assert (turns, state.num_tokens) == (2, len(digits))
    whole = grammar.new_matcher([STOP])
    assert whole.accept(digits)
    assert (state.fill(())[0] == whole.fill(())[0]).all()
    assert state.accept(encode("9"), until=-math.inf)  # enough time for one
    assert state.is_over


def test_a_token_that_takes_too_long_ends_its_answer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    state = compile_here("ebnf", AMBIGUOUS, vocabulary()).new_matcher([STOP])
    monkeypatch.setattr(matcher, "MAX_TOKEN_CPU_S", 0.5)
    with pytest.raises(GrammarMismatchError, match="too ambiguous"):
        state.fill(())


# -- all answers of a step -------------------------------------------------------------------------------------------


def count_turns(costs: Sequence[float], budget: float, num_steps: int) -> list[int]:
    """Number of turns per answer if they take these CPU seconds and a step has `budget`."""
    turns, answers = FairShare(), list(range(len(costs)))
    counts = [0] * len(costs)
    for _step in range(num_steps):
        left = budget
        for place, answer in enumerate(turns.order(answers)):
            if place and left <= 0:
                turns.waited(answer)
                continue
            left -= costs[answer]
            counts[answer] += 1
            turns.took(answer, costs[answer])
    return counts


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 0.04), min_size=1, max_size=12), st.floats(0.001, 0.2))
def test_all_have_their_turn(costs: list[float], budget: float) -> None:
    assert min(count_turns(costs, budget, num_steps=200)) > 0


def test_the_cheap_do_not_wait_for_the_dear() -> None:
    counts = count_turns([0.09] * 60 + [0.0001] * 4, budget=0.15, num_steps=200)
    assert min(counts[60:]) >= 160
    assert min(counts[:60]) > 0


def test_the_order_of_turns() -> None:
    turns = FairShare()
    assert turns.order([3, 1, 2]) == [3, 1, 2]  # no times are known yet
    turns.took(3, 8 * UNKNOWN_S)
    turns.took(2, UNKNOWN_S / 2)
    assert turns.order([3, 1, 2]) == [2, 1, 3]
    for _ in range(20):
        turns.waited(3)
    assert turns.order([3, 1, 2]) == [3, 2, 1]
    turns.order([1])
    assert turns.order([3, 1]) == [3, 1]  # its time is forgotten


@pytest.fixture
def gates() -> Iterator[Callable[[], Event]]:
    """Makes events; all are set at the end."""
    made: list[Event] = []

    def make() -> Event:
        made.append(Event())
        return made[-1]

    yield make
    for one in made:
        one.set()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """Its threads seem to have used much CPU time, all others none."""
    idents: set[int | None] = set()
    monkeypatch.setattr(step_thread._Thread, "cpu_s", lambda thread: math.inf if thread.ident in idents else -math.inf)
    return idents


def hang(stuck: set[int | None], gate: Event) -> None:
    """Acts like a call of xgrammar that takes minutes."""
    stuck.add(threading.get_ident())
    gate.wait(PATIENCE_S)


def test_calls_are_made_while_there_is_time() -> None:
    here = StepThread()

    def fail() -> int:
        raise ValueError("no")

    ran = here.run([lambda: 1, fail, lambda: 3], cpu_s=PATIENCE_S)
    assert [str(one.result) for one in ran.done] == ["1", "no", "3"]
    ran = here.run([lambda: 1, lambda: 2], cpu_s=0.0)
    assert [one.result for one in ran.done] == [1]  # enough time for one
    assert not ran.is_stuck


def test_a_call_that_takes_too_long_is_left_behind(gates: Callable[[], Event], stuck: set[int | None]) -> None:
    here, gate = StepThread(), gates()
    ran = here.run([lambda: None, lambda: hang(stuck, gate), lambda: None], cpu_s=PATIENCE_S)
    assert (len(ran.done), ran.is_stuck) == (1, True)
    (left,) = here._abandoned
    assert len(here.run([lambda: None] * 2, cpu_s=PATIENCE_S).done) == 2  # on another thread
    gate.set()
    left.join(PATIENCE_S)
    assert not left.is_alive()
    assert len(ran.done) == 1  # late results are dropped


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_thread_whose_priority_cannot_be_lowered_is_left_behind(
    gates: Callable[[], Event], stuck: set[int | None], monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Its call, and so the thread, may end at that very moment."""

    def refuse(*_args: int) -> None:
        raise error

    monkeypatch.setattr(os, "setpriority", refuse)
    here, gate = StepThread(), gates()
    assert here.run([lambda: hang(stuck, gate)], cpu_s=PATIENCE_S).is_stuck
    assert len(here.run([lambda: None], cpu_s=PATIENCE_S).done) == 1


def test_only_so_many_calls_are_left_behind(gates: Callable[[], Event], stuck: set[int | None]) -> None:
    here, all_gates = StepThread(), [gates() for _ in range(MAX_STUCK)]
    for gate in all_gates:
        assert here.run([partial(hang, stuck, gate)], cpu_s=PATIENCE_S).is_stuck
    with pytest.raises(NoThreadError):
        here.run([lambda: None], cpu_s=PATIENCE_S)
    all_gates[0].set()
    here._abandoned[0].join(PATIENCE_S)
    assert len(here.run([lambda: None], cpu_s=PATIENCE_S).done) == 1


def test_a_system_without_a_further_thread_fails_the_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    here = StepThread()
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        with pytest.raises(NoThreadError, match="allow this process more threads"):
            here.run([lambda: None], cpu_s=PATIENCE_S)
    assert len(here.run([lambda: None], cpu_s=PATIENCE_S).done) == 1


def test_the_thread_ends_with_its_owner() -> None:
    here = StepThread()
    (thread,) = [one.result for one in here.run([threading.current_thread], cpu_s=PATIENCE_S).done]
    assert isinstance(thread, Thread)
    del here
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


# -- in the loop -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(
        str(TARGET_DIR), "", "float32", "cpu", 1, 16, 128, lambda *_: (200, 0),
        lambda _done, _total: None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def requests() -> list[SequenceParams]:
    grammars = [compile_here("json_schema", LIST, vocabulary()), compile_here("regex", "[0-9]{20}", vocabulary())]
    return [ask(handle, grammars[handle % 2], SamplingParams(seed=handle)) for handle in range(1, 7)]


def ask(handle: int, grammar: Grammar | None, sampling: SamplingParams) -> SequenceParams:
    prompt = encode("Which colours are there?")
    return SequenceParams(
        str(handle), packed(prompt), len(prompt) - 1, 80, handle=handle, sampling=sampling,
        stop_token_ids=frozenset({STOP}), grammar=grammar,
    )  # fmt: skip


@pytest.fixture(scope="module")
def answers(engine: Engine, requests: Sequence[SequenceParams]) -> Answers:
    found = decode(engine, NO_SPECULATION, requests)
    assert {end.finish_reason for end in found.ends.values()} == {"stop"}
    return found


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn per step, which accepts one token and no draft."""
    monkeypatch.setattr(constraints, "MAX_STEP_CPU_S", 0.0)
    monkeypatch.setattr(constraints, "MAX_TURN_CPU_S", 0.0)


@pytest.mark.usefixtures("no_time")
def test_who_has_to_wait_gets_the_same_answer(
    engine: Engine, requests: Sequence[SequenceParams], answers: Answers
) -> None:
    drafting = [replace(one, drafter="ngram", max_draft_tokens=8) for one in requests]
    late = decode(engine, build_eager_speculator({"ngram": NgramDrafter()}), drafting)
    assert late.tokens == answers.tokens
    assert {end.finish_reason for end in late.ends.values()} == {"stop"}


@pytest.mark.usefixtures("no_time")
def test_an_answer_is_taken_over_a_bit_at_a_time(
    engine: Engine, requests: Sequence[SequenceParams], answers: Answers
) -> None:
    moved, expected = [], {}
    for one in requests:
        tokens = answers.tokens[one.handle]
        count = len(tokens) - one.handle % 3 * 4  # some are whole already
        moved.append(taken_over(one, tokens[:count]))
        expected[one.handle] = tokens[count:]
    taken = decode(engine, NO_SPECULATION, moved)
    assert taken.tokens == expected
    assert {end.finish_reason for end in taken.ends.values()} == {"stop"}


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], Grammar]:
    """A grammar for which `happen` runs before a method of its answers' matchers."""

    def make(method: str, happen: Callable[[], None]) -> Grammar:
        grammar, new_matcher, work = (
            compile_here("regex", "a+", vocabulary()),
            Grammar.new_matcher,
            getattr(Matcher, method),
        )
        matchers: list[Matcher] = []

        def remember(of: Grammar, stop_token_ids: Sequence[int]) -> Matcher:
            made = new_matcher(of, stop_token_ids)
            if of is grammar:
                matchers.append(made)
            return made

        def work_after(state: Matcher, tokens: Sequence[int], until: float) -> object:
            if state in matchers and (method == "fill" or tokens):
                happen()
            return work(state, tokens, until)

        monkeypatch.setattr(Grammar, "new_matcher", remember)
        monkeypatch.setattr(Matcher, method, work_after)
        return grammar

    return make


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_call_that_takes_too_long_ends_the_answers_of_its_grammar_alone(
    engine: Engine,
    requests: Sequence[SequenceParams],
    answers: Answers,
    bad: Callable[[str, Callable[[], None]], Grammar],
    method: str,
    gates: Callable[[], Event],
    stuck: set[int | None],
) -> None:
    gate = gates()
    grammar = bad(method, lambda: hang(stuck, gate))
    hostile = [ask(handle, grammar, SamplingParams(seed=handle)) for handle in (11, 12, 13)]
    plain = replace(hostile[0], handle=14, grammar=None, max_tokens=5)
    got = decode(engine, NO_SPECULATION, [*hostile, *requests, plain])
    assert {handle: got.tokens[handle] for handle in answers.tokens} == answers.tokens
    assert got.ends[14].finish_reason in ("length", "stop")
    for one in hostile:
        assert got.ends[one.handle].finish_reason == "grammar_error"
        assert "too ambiguous" in got.ends[one.handle].error
    assert grammar.is_too_slow.is_set()
    assert len(stuck) == 1  # not one thread each


@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("/src/earley_parser.cc:12 Check failed")])
def test_whatever_goes_wrong_ends_one_answer(
    engine: Engine,
    requests: Sequence[SequenceParams],
    answers: Answers,
    bad: Callable[[str, Callable[[], None]], Grammar],
    error: Exception,
    method: str,
) -> None:
    def fail() -> None:
        raise error

    wrong = ask(11, bad(method, fail), SamplingParams(seed=1))
    got = decode(engine, NO_SPECULATION, [wrong, *requests])
    assert got.ends[11].finish_reason == "error"
    assert got.ends[11].error == f"the grammar could not be followed: {type(error).__name__}"
    assert {handle: got.tokens[handle] for handle in answers.tokens} == answers.tokens


def test_nobody_gets_a_mask_while_too_many_calls_are_left_behind(
    engine: Engine, requests: Sequence[SequenceParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_thread, "MAX_STUCK", 0)
    plain = replace(ask(14, None, SamplingParams(seed=1)), max_tokens=5)
    got = decode(engine, NO_SPECULATION, [plain, *requests])
    assert got.ends[14].finish_reason in ("length", "stop")
    assert {got.ends[one.handle].error for one in requests} == {"no grammar can be followed now: 0 calls take too long"}
