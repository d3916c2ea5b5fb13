"""A decode worker that launches a step before the last one is collected gives the same answers as step by step."""

import random

import numpy as np
import pytest

from engine.engine import Engine
from tests.support.batches import SAMPLINGS
from tests.support.checkpoints import write_checkpoint
from tests.support.decode_bench import NUM_PAGES, build, build_requests, make_late, run, speculators
from tests.support.decoding import Answers
from tests.support.grammars import DEMO_SIZE, compile_here, vocabulary
from worker.sequences import SequenceParams

H100_STEP_S = 5e-3  # of an 8B model


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """One computes at once; one is late and has graphs. Each has a draft model that is sometimes right."""
    model, draft = (
        write_checkpoint(
            tmp_path_factory.mktemp(name), "llama", vocab=DEMO_SIZE, hidden=64, head_dim=16, layers=layers, tied=True
        )
        for name, layers in (("model", 2), ("draft", 1))
    )  # fmt: skip
    return build(model, draft), make_late(build(model, draft), model, draft)


@pytest.fixture(scope="module")
def expected(engines: tuple[Engine, Engine]) -> Answers:
    """Step by step, without drafts, with enough pages."""
    return run(engines[0], build_requests("off"))


@pytest.mark.parametrize("drafter", ["off", "ngram", "draft"])
@pytest.mark.parametrize("num_pages", [NUM_PAGES, 26], ids=["room", "preemption"])
@pytest.mark.parametrize("aborted", [{}, {2: 1, 3: 1, 14: 2, 20: 1, 30: 1, 33: 3}], ids=["", "aborts"])
def test_answers_are_those_of_step_by_step(
    engines: tuple[Engine, Engine], expected: Answers, drafter: str, num_pages: int, aborted: dict[int, int]
) -> None:
    requests = build_requests(drafter)
    answers = run(engines[1], requests, speculators(engines[1], is_ahead=True)[drafter], 1, num_pages, aborted)
    if num_pages == NUM_PAGES:
        assert answers.scheduler.kv.num_hit and not answers.scheduler.num_preemptions
    else:
        assert answers.scheduler.num_preemptions
    timings = [end.timing for end in answers.ends.values() if end.timing is not None]
    assert any(one.accepted_tokens for one in timings) == (drafter != "off")
    assert {params.handle for params in requests} - aborted.keys() <= answers.ends.keys()
    for handle, tokens in answers.tokens.items():
        is_aborted = handle in aborted and handle not in answers.ends
        size = len(tokens) if is_aborted else None
        assert tokens == expected.tokens[handle][:size], handle
        if is_aborted:
            continue
        assert answers.ends[handle].finish_reason == expected.ends[handle].finish_reason
        assert answers.ends[handle].error == expected.ends[handle].error
        for told, known in (
            (answers.logprobs, expected.logprobs), (answers.prompt_logprobs, expected.prompt_logprobs)
        ):  # fmt: skip
            assert [one.top_ids for one in told[handle]] == [one.top_ids for one in known[handle]]
            here, there = ([one.logprob for one in side[handle]] for side in (told, known))
            assert here == pytest.approx(there, abs=1e-4)


def build_streams(drafter: str, has_json: bool) -> list[SequenceParams]:
    """Eight long answers; one matches a grammar if `has_json`."""
    grammar = compile_here("ebnf", 'root ::= "{" [a-z]* "}"', vocabulary())
    draw = random.Random(1)
    return [
        SequenceParams(
            str(handle), np.array([draw.randrange(2, DEMO_SIZE) for _ in range(12)], np.int32).tobytes(), 11, 120,
            gateway="g", handle=handle, sampling=SAMPLINGS[handle % 4], drafter=drafter,
            max_draft_tokens=0 if drafter == "off" else 4, grammar=grammar if has_json and handle == 3 else None,
        )
        for handle in range(1, 9)
    ]  # fmt: skip


@pytest.mark.parametrize("has_json", [False, True], ids=["", "json"])
@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_the_device_seldom_waits_for_the_host(engines: tuple[Engine, Engine], drafter: str, has_json: bool) -> None:
    """Neither for drafts nor for masks, whatever the tokens are."""
    plain = run(engines[0], build_streams("off", has_json))
    speculator = speculators(engines[1], is_ahead=True, step_s=H100_STEP_S)[drafter]
    answers = run(engines[1], build_streams(drafter, has_json), speculator, 1)
    assert answers.tokens == plain.tokens
    assert sum(end.timing.draft_tokens for end in answers.ends.values() if end.timing is not None) > 50
    drained = answers.num_drained, answers.num_launched
    assert answers.num_launched > 50 and answers.num_drained <= 0.05 * answers.num_launched, drained
