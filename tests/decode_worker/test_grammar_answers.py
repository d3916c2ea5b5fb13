"""Answers of the demo model constrained by grammars: whole, with drafts, taken over by another worker, refused."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import grpc
import jsonschema
import pytest

from bench.decoding import NO_SPECULATION, Answers, build_eager_speculator, decode
from decode_worker import service
from decode_worker.grammar.matcher import Grammar
from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from demo.paths import TARGET_DIR
from engine.engine import Engine, build_engine
from gateway.text.tokenizer import Tokenizer
from protos import decode_pb2
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.grammars import compile_here, vocabulary
from tests.support.real_workers import PLAIN, decode_worker, gateway, packed, taken_over
from wire.sampling import SamplingParams
from worker.sequences import SequenceParams

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
TEXTS = [("json_schema", json.dumps(PLACE)), ("regex", DATE), ("ebnf", 'root ::= [a-z]+ ("," [a-z]+)* "."')]
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(temperature=1.8, seed=2)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(
        str(TARGET_DIR), str(TARGET_DIR), "float32", "cpu", 1, 16, 128, lambda *_: (400, 0),
        lambda _done, _total: None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TARGET_DIR)


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[SequenceParams]:
    """Each grammar with each sampling, with and without stop tokens."""
    grammars = [compile_here(kind, text, vocabulary()) for kind, text in TEXTS]
    cases = [
        (grammar, sampling, stops)
        for grammar in grammars
        for sampling in SAMPLINGS
        for stops in (tokenizer.eos_token_ids, frozenset[int]())
    ]
    return [
        ask(tokenizer, handle, grammar, sampling, stops)
        for handle, (grammar, sampling, stops) in enumerate(cases, start=1)
    ]


def ask(
    tokenizer: Tokenizer, handle: int, grammar: Grammar, sampling: SamplingParams, stops: frozenset[int]
) -> SequenceParams:
    prompt = tokenizer.encode("Where is the sun?", add_special_tokens=True)
    return SequenceParams(
        str(handle), packed(prompt), len(prompt) - 1, 150, handle=handle, sampling=sampling, stop_token_ids=stops,
        grammar=grammar,
    )  # fmt: skip


@pytest.fixture(scope="module")
def answers(engine: Engine, requests: Sequence[SequenceParams]) -> Answers:
    return decode(engine, NO_SPECULATION, requests)


def test_answers_fit_their_grammars_and_end_with_them(
    answers: Answers, requests: Sequence[SequenceParams], tokenizer: Tokenizer
) -> None:
    num_whole = 0
    for wanted in requests:
        kind = TEXTS[(wanted.handle - 1) // (2 * len(SAMPLINGS))][0]
        tokens, end = answers.tokens[wanted.handle], answers.ends[wanted.handle]
        assert end.finish_reason in ("stop", "length"), end.error
        if end.finish_reason == "length":
            assert len(tokens) == 150
            continue
        num_whole += 1
        text = tokenizer.decode(tokens)
        if kind == "json_schema":
            jsonschema.validate(json.loads(text), PLACE)
        else:
            assert re.fullmatch(DATE if kind == "regex" else r"[a-z]+(,[a-z]+)*\.", text)
        assert not set(tokens) & set(wanted.stop_token_ids)  # only the end could follow: no token is spent on it
    assert num_whole > len(requests) / 2


@pytest.mark.parametrize("name", ["ngram", "draft"])
def test_drafts_change_no_token(
    engine: Engine, requests: Sequence[SequenceParams], answers: Answers, name: str
) -> None:
    assert engine.draft_runner is not None
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(),
        "draft": ModelDrafter(engine.draft_runner, CostMeter(), 64),  # ignores the grammar: often refused
    }
    drafting = [replace(one, drafter=name, max_draft_tokens=1 + one.handle % 8) for one in requests]
    drafted = decode(engine, build_eager_speculator({name: drafters[name]}), drafting)
    assert drafted.tokens == answers.tokens
    assert {handle: end.finish_reason for handle, end in drafted.ends.items()} == {
        handle: end.finish_reason for handle, end in answers.ends.items()
    }


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_another_worker_takes_an_answer_over(
    engine: Engine, requests: Sequence[SequenceParams], answers: Answers, share: float
) -> None:
    whole = [one for one in requests if answers.ends[one.handle].finish_reason == "stop"]
    moved, expected = [], {}
    for one in whole:
        emitted = answers.tokens[one.handle][: int(share * len(answers.tokens[one.handle]))]
        moved.append(taken_over(one, emitted))
        expected[one.handle] = answers.tokens[one.handle][len(emitted) :]
    taken = decode(engine, NO_SPECULATION, moved)
    assert taken.tokens == expected
    assert {end.finish_reason for end in taken.ends.values()} == {"stop"}


def test_a_short_answer_may_not_be_shorter_than_its_grammar_but_than_min_tokens(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    grammar = compile_here("regex", "[0-9]{2}", vocabulary())
    wanted = replace(ask(tokenizer, 1, grammar, SAMPLINGS[0], tokenizer.eos_token_ids), min_tokens=20)
    answer = decode(engine, NO_SPECULATION, [wanted])
    assert len(answer.tokens[1]) == 2
    assert answer.ends[1].finish_reason == "stop"


def test_an_answer_that_does_not_fit_ends_alone(engine: Engine, tokenizer: Tokenizer) -> None:
    grammar = compile_here("regex", "[0-9]{4}", vocabulary())
    fine = ask(tokenizer, 1, grammar, SAMPLINGS[0], tokenizer.eos_token_ids)
    wrong = replace(taken_over(fine, tokenizer.encode("x", add_special_tokens=False)), handle=2)
    answer = decode(engine, NO_SPECULATION, [fine, wrong])
    assert answer.ends[1].finish_reason == "stop"
    assert answer.ends[2].finish_reason == "grammar_error"
    assert "does not fit the grammar" in answer.ends[2].error


def test_reserve_refuses_what_cannot_be_compiled_and_answers_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reserve_all() -> None:
        signal = Signal()
        async with decode_worker(signal) as worker, gateway(worker, signal) as opened:

            async def code_of(kind: str, text: str) -> tuple[grpc.StatusCode, str]:
                request = decode_pb2.ReserveRequest(
                    gateway=opened.name, handle=1, attempt=1, prompt=packed([1, 2]), max_tokens=4,
                    grammar=decode_pb2.Grammar(kind=kind, text=text),
                    sampling=PLAIN,
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
                patch.setattr(service, "GRAMMAR_WAIT_S", 0.05)
                code, why = await code_of("regex", "a")  # the compiler is not even loaded
            assert (code, why) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the grammar is still being compiled")
            assert await lasting_code_of("regex", "a") == (grpc.StatusCode.OK, "")
            for kind, text, expected in [("regex", "a(", "not closed"), ("verse", "a", "no kind of grammar")]:
                code, why = await lasting_code_of(kind, text)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert expected in why

    asyncio.run(reserve_all())
