"""A decode worker is killed while answers of every shape run: they continue as if nothing had happened. Row 3."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.support.fault_answers import VOCAB, is_alive
from tests.support.fleet import ProcessFleet
from tests.support.live import wait_until
from tests.support.oracle import random_prompt
from tests.support.surface import Surface, Told, take

PROMPT = random_prompt(150, VOCAB, seed=3)
NUM_TOKENS = 400
SHAPES: dict[str, dict[str, Any]] = {
    "draft": {"speculation": "draft", "max_draft_tokens": 4},
    "repeats": {"speculation": "ngram", "max_draft_tokens": 4},
    "penalties": {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.6, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 1, "seed": 6, "logprobs": 3},
    "min_tokens": {"ignore_eos": False, "min_tokens": 300, "temperature": 1, "seed": 7},
    "all": {
        "temperature": 0.9, "seed": 8, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {40: 2.0}, "logprobs": 1,
        "ignore_eos": False, "min_tokens": 300,
    },
    "several": {"n": 4, "temperature": 1, "seed": 9, "logprobs": 0},
}  # fmt: skip


Undisturbed = dict[str, list[Told]]


@pytest.fixture(scope="module")
def undisturbed(running_quad: ProcessFleet) -> Undisturbed:
    """The undisturbed answer of each shape."""
    told = _nothing_told()
    with grpc.insecure_channel(running_quad.grpc_address) as channel, ThreadPoolExecutor(len(SHAPES)) as threads:
        _listen_all(threads, told, _start_all(Surface(channel)))
    return told


def _nothing_told() -> Undisturbed:
    return {name: [Told() for _ in range(fields.get("n", 1))] for name, fields in SHAPES.items()}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("after", [1, 40])
def test_row_03_answers_of_every_shape_go_on_elsewhere(
    quad: ProcessFleet, undisturbed: Undisturbed, after: int
) -> None:
    """All begin on one worker while the other is stopped; the other takes them over when it resumes."""
    victim, heir = quad["decode-0"], quad["decode-1"]
    heir.stop()
    wait_until(lambda: not is_alive(quad, heir))
    told = _nothing_told()
    with grpc.insecure_channel(quad.grpc_address) as channel, ThreadPoolExecutor(len(SHAPES)) as threads:
        calls = _start_all(Surface(channel))
        for name, call in calls.items():
            while min(len(choice.tokens) for choice in told[name]) < after:
                take(told[name], next(call))
        victim.kill()
        heir.resume()  # before the gateway gives up on a fleet that cannot serve
        _listen_all(threads, told, calls)
    for name, choices in told.items():
        for choice, expected in zip(choices, undisturbed[name], strict=True):
            assert choice.tokens == expected.tokens, name
            assert choice.finish_reason == expected.finish_reason
            assert [one.token_id for one in choice.logprobs] == [one.token_id for one in expected.logprobs]
            given = [one.logprob for one in choice.logprobs]
            assert given == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4), name
    attempts = {name: [choice.timing.attempts for choice in choices] for name, choices in told.items()}
    assert all(count > 1 for counts in attempts.values() for count in counts), attempts


def _start_all(surface: Surface) -> dict[str, Any]:
    return {name: surface.start(PROMPT, max_tokens=NUM_TOKENS, **fields) for name, fields in SHAPES.items()}


def _listen_all(threads: ThreadPoolExecutor, told: dict[str, list[Told]], calls: dict[str, Any]) -> None:
    for ended in [threads.submit(_listen, told[name], call) for name, call in calls.items()]:
        ended.result()


def _listen(choices: list[Told], call: Any) -> None:
    for response in call:
        take(choices, response)
