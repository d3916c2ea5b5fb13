"""Answers of the demo model with grammars: whole, with drafts, taken over by another worker, late, hostile, refused."""

import asyncio
import gc
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from threading import Event

import grpc
import jsonschema
import pytest

from decode_worker import service
from decode_worker.grammar import constraints, step_thread
from decode_worker.grammar.constraints import Constraints
from decode_worker.grammar.matcher import LoadedGrammar, Matcher
from decode_worker.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from decode_worker.speculation.lengths import CostMeter
from demo.paths import TARGET_DIR
from engine.compose import build_engine
from engine.engine import Engine
from gateway.text.tokenizer import Tokenizer
from protos import decode_pb2
from tests.support import decoding
from tests.support.combinations import combination
from tests.support.decoding import Answers, build_eager_speculator, decode
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.grammars import compile_here, encode, vocabulary
from tests.support.real_workers import PLAIN, decode_worker, gateway, packed, taken_over
from wire.sampling import SamplingParams
from worker.params import SequenceParams

STOPS = frozenset({2})
PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Bern", "Rio de Janeiro"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        "sunny": {"type": "boolean"},
    },
    "required": ["city", "days", "sunny"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"
BUDGET = 12  # tokens
THOUGHT = {"type": "tag", "begin": "", "content": {"type": "any_text", "max_tokens": BUDGET}, "end": "</think>"}
BEHIND = {"type": "sequence", "elements": [THOUGHT, {"type": "regex", "pattern": DATE}]}
TEXTS = [
    ("json_schema", json.dumps(PLACE)),
    ("regex", DATE),
    ("ebnf", 'root ::= [a-z]+ ("," [a-z]+)* "."'),
    ("structural_tag", json.dumps({"type": "structural_tag", "format": BEHIND})),
]
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(temperature=1.8, seed=2)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(
        str(TARGET_DIR), str(TARGET_DIR), "float32", "cpu", 1, 16, 128, lambda *_: (400, 0),
        lambda _done, _total: None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def requests() -> list[SequenceParams]:
    """Each grammar with each sampling, every other one with stop tokens."""
    cases = product([compile_here(kind, text, vocabulary()) for kind, text in TEXTS], SAMPLINGS)
    return [ask(handle, *case, STOPS if handle % 2 else ()) for handle, case in enumerate(cases, start=1)]


def ask(
    handle: int,
    grammar: LoadedGrammar | None,
    sampling: SamplingParams = SAMPLINGS[0],
    stops: Sequence[int] | frozenset[int] = STOPS,
) -> SequenceParams:
    prompt = Tokenizer(TARGET_DIR).encode("Where is the sun?", add_special_tokens=True)
    return SequenceParams(
        str(handle), packed(prompt), len(prompt) - 1, 150, handle=handle, sampling=sampling,
        stop_token_ids=frozenset(stops), grammar=grammar,
    )  # fmt: skip


@pytest.fixture(scope="module")
def answers(engine: Engine, requests: Sequence[SequenceParams]) -> Answers:
    return decode(engine, requests)


@pytest.fixture(scope="module")
def few(answers: Answers, requests: Sequence[SequenceParams]) -> list[SequenceParams]:
    """The shortest answer of each grammar."""
    shortest = sorted(requests, key=lambda one: len(answers.tokens[one.handle]))
    return list({(one.handle - 1) // len(SAMPLINGS): one for one in reversed(shortest)}.values())


def test_answers_fit_their_grammars_and_end_with_them(answers: Answers, requests: Sequence[SequenceParams]) -> None:
    num_whole = 0
    for wanted in requests:
        kind = TEXTS[(wanted.handle - 1) // len(SAMPLINGS)][0]
        tokens, end = answers.tokens[wanted.handle], answers.ends[wanted.handle]
        assert end.finish_reason in ("stop", "length"), end.error
        if end.finish_reason == "length":
            assert len(tokens) == 150
            continue
        num_whole += 1
        text = Tokenizer(TARGET_DIR).decode(tokens)
        if kind == "json_schema":
            jsonschema.validate(json.loads(text), PLACE)
        elif kind == "structural_tag":
            thought, _, answer = text.partition("</think>")
            assert re.fullmatch(DATE, answer)
            begun = [Tokenizer(TARGET_DIR).decode(tokens[:count]) for count in range(len(tokens))]
            assert next(count for count, text in enumerate(begun) if text.startswith(thought)) <= BUDGET
        else:
            assert re.fullmatch(DATE if kind == "regex" else r"[a-z]+(,[a-z]+)*\.", text)
        assert not set(tokens) & STOPS  # only the end could follow: no token is spent on it
    assert num_whole > len(requests) / 2


def reasons(answers: Answers) -> dict[int, str]:
    return {handle: end.finish_reason for handle, end in answers.ends.items()}


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn per step, which accepts one token and no draft."""
    monkeypatch.setattr(constraints, "MAX_STEP_CPU_S", 0.0)
    monkeypatch.setattr(constraints, "MAX_TURN_CPU_S", 0.0)


@pytest.mark.parametrize("has_time", [True, combination(False)])
def test_neither_drafts_nor_waiting_change_a_token(
    engine: Engine,
    requests: Sequence[SequenceParams],
    answers: Answers,
    has_time: bool,
    request: pytest.FixtureRequest,
) -> None:
    assert engine.draft_runner is not None
    drafter: Drafter = NgramDrafter()
    if has_time:
        drafter = ModelDrafter(engine.draft_runner, CostMeter(), 64)  # ignores the grammar: often refused
    else:
        request.getfixturevalue("no_time")
    asked = requests if has_time else requests[1::3]
    drafting = [replace(one, drafter="d", max_draft_tokens=1 + one.handle % 8) for one in asked]
    drafted = decode(engine, drafting, build_eager_speculator({"d": drafter}))
    assert drafted.tokens == {one.handle: answers.tokens[one.handle] for one in asked}
    assert reasons(drafted) == {one.handle: reasons(answers)[one.handle] for one in asked}


@pytest.mark.usefixtures("no_time")
def test_another_worker_takes_an_answer_over(
    engine: Engine, requests: Sequence[SequenceParams], answers: Answers
) -> None:
    moved, expected = [], {}
    for one in requests:
        if answers.ends[one.handle].finish_reason == "stop":
            tokens = answers.tokens[one.handle]
            count = len(tokens) * (one.handle % 3) // 2  # some are whole already, some not begun
            moved.append(taken_over(one, tokens[:count]))
            expected[one.handle] = tokens[count:]
    taken = decode(engine, moved)
    assert taken.tokens == expected
    assert set(reasons(taken).values()) == {"stop"}


def test_a_short_answer_may_not_be_shorter_than_its_grammar_but_than_min_tokens(engine: Engine) -> None:
    wanted = replace(ask(1, compile_here("regex", "[0-9]{2}", vocabulary())), min_tokens=20)
    answer = decode(engine, [wanted])
    assert len(answer.tokens[1]) == 2
    assert answer.ends[1].finish_reason == "stop"


def test_an_answer_that_does_not_fit_ends_alone(engine: Engine) -> None:
    fine = ask(1, compile_here("regex", "[0-9]{4}", vocabulary()))
    wrong = replace(taken_over(fine, encode("x")), handle=2)
    answer = decode(engine, [fine, wrong])
    assert reasons(answer) == {1: "stop", 2: "grammar_error"}
    assert "does not fit the grammar" in answer.ends[2].error


# -- grammars that take too long, or fail ----------------------------------------------------------------------------


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], LoadedGrammar]:
    """A grammar for which `happen` runs before a method of its answers' matchers."""

    def make(method: str, happen: Callable[[], None]) -> LoadedGrammar:
        grammar, work = compile_here("regex", "a+", vocabulary()), getattr(Matcher, method)
        new_matcher, matchers = LoadedGrammar.new_matcher, list[Matcher]()

        def remember(of: LoadedGrammar, stop_token_ids: Sequence[int]) -> Matcher:
            made = new_matcher(of, stop_token_ids)
            if of is grammar:
                matchers.append(made)
            return made

        def work_after(state: Matcher, tokens: Sequence[int], until: float = math.inf) -> object:
            if state in matchers and (method == "fill" or tokens):
                happen()
            return work(state, tokens, until)

        monkeypatch.setattr(LoadedGrammar, "new_matcher", remember)
        monkeypatch.setattr(Matcher, method, work_after)
        return grammar

    return make


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Acts like a call of xgrammar that takes minutes. Its threads seem to have used much CPU time, all others none."""
    gate, idents = Event(), set[int | None]()
    monkeypatch.setattr(step_thread._Thread, "cpu_s", lambda thread: math.inf if thread.ident in idents else -math.inf)

    def wait() -> None:
        idents.add(threading.get_ident())
        gate.wait(PATIENCE_S)

    yield wait
    gate.set()
    assert len(idents) == 1, "a hostile grammar costs one thread, not one for each answer"


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_call_that_takes_too_long_ends_the_answers_of_its_grammar_alone(
    engine: Engine,
    few: Sequence[SequenceParams],
    answers: Answers,
    bad: Callable[[str, Callable[[], None]], LoadedGrammar],
    method: str,
    hang: Callable[[], None],
) -> None:
    grammar = bad(method, hang)
    plain = replace(ask(99, None), max_tokens=5)
    got = decode(engine, [*(ask(handle, grammar) for handle in (91, 92, 93)), *few, plain])
    assert all(got.tokens[one.handle] == answers.tokens[one.handle] for one in few)
    assert got.ends[99].finish_reason in ("length", "stop")
    for handle in (91, 92, 93):
        assert got.ends[handle].finish_reason == "grammar_error"
        assert "too ambiguous" in got.ends[handle].error
    assert grammar.is_too_slow


@pytest.mark.parametrize(
    ("method", "error"),
    [("fill", MemoryError()), ("accept", RuntimeError("/src/earley_parser.cc:12 Check failed"))],
)
def test_whatever_goes_wrong_ends_one_answer(
    engine: Engine,
    few: Sequence[SequenceParams],
    answers: Answers,
    bad: Callable[[str, Callable[[], None]], LoadedGrammar],
    error: Exception,
    method: str,
) -> None:
    def fail() -> None:
        raise error

    got = decode(engine, [ask(91, bad(method, fail)), *few])
    assert got.ends[91].finish_reason == "error"
    assert got.ends[91].error == f"the grammar could not be followed: {type(error).__name__}"
    assert all(got.tokens[one.handle] == answers.tokens[one.handle] for one in few)


def test_nobody_gets_a_mask_while_too_many_calls_are_left_behind(
    engine: Engine, few: Sequence[SequenceParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_thread, "MAX_STUCK", 0)
    got = decode(engine, [replace(ask(99, None), max_tokens=5), *few])
    assert got.ends[99].finish_reason in ("length", "stop")
    assert {got.ends[one.handle].error for one in few} == {"no grammar can be followed now: 0 calls take too long"}


def test_what_is_kept_of_an_answer_goes_with_it(
    engine: Engine, few: Sequence[SequenceParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Constraints]()

    def make() -> Constraints:
        made.append(Constraints())
        return made[-1]

    monkeypatch.setattr(decoding, "Constraints", make)
    decode(engine, few)
    gc.collect()
    (constraints_of_all,) = made
    assert len(constraints_of_all._states) < len(few), "those of the last step at most"


# -- in a service ----------------------------------------------------------------------------------------------------


async def test_reserve_refuses_what_cannot_be_compiled_and_answers_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    signal = Signal()
    async with decode_worker(signal) as worker, gateway(worker, signal) as opened:

        async def code_of(kind: str, text: str) -> tuple[grpc.StatusCode, str]:
            request = decode_pb2.ReserveRequest(
                gateway=opened.name, handle=1, attempt=1, prompt=packed([1, 2]), max_tokens=4,
                grammar=decode_pb2.Grammar(kind=kind, text=text), sampling=PLAIN,
            )  # fmt: skip
            try:
                await opened.stub.Reserve(request, timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                return error.code(), str(error.details())
            return grpc.StatusCode.OK, ""

        async def lasting_code_of(kind: str, text: str) -> tuple[grpc.StatusCode, str]:
            async with asyncio.timeout(10 * PATIENCE_S):
                while (answer := await code_of(kind, text))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    pass
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(service, "MOST_WAIT_S", 0.05)
            code, why = await code_of("regex", "a")  # the compiler is not even loaded
        assert (code, why) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the grammar is still being compiled")
        assert await lasting_code_of("regex", "a") == (grpc.StatusCode.OK, "")
        for kind, text, expected in [("regex", "a(", "a '(' without a ')'"), ("verse", "a", "no kind of grammar")]:
            code, why = await lasting_code_of(kind, text)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert expected in why
