"""A decode worker that is killed while answers have every shape: they go on as if nothing had happened. Row 3."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import grpc
import pytest

from bench.fleet import ProcessFleet
from tests.faults.answers import VOCAB, find_busy
from tests.oracle import random_prompt
from tests.surface import Surface, Told, take

PROMPT = random_prompt(150, VOCAB, seed=3)
NUM_TOKENS = 600
SHAPES: dict[str, dict[str, Any]] = {
    "draft": {"speculation": "draft", "max_draft_tokens": 8},
    "repeats": {"speculation": "ngram"},
    "penalties": {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.6, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 1, "seed": 6, "logprobs": 3},
    "min_tokens": {"ignore_eos": False, "min_tokens": 200, "temperature": 1, "seed": 7},
    "all": {
        "temperature": 0.9, "seed": 8, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {40: 2.0}, "logprobs": 1,
        "ignore_eos": False, "min_tokens": 200,
    },
    "several": {"n": 4, "temperature": 1, "seed": 9, "logprobs": 0},
}  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.parametrize("after", [1, 60])
def test_row_03_answers_of_every_shape_go_on_elsewhere(quad: ProcessFleet, after: int) -> None:
    with grpc.insecure_channel(quad.grpc_address) as channel, ThreadPoolExecutor(len(SHAPES)) as threads:
        surface = Surface(channel)
        undisturbed = {name: [Told() for _ in range(fields.get("n", 1))] for name, fields in SHAPES.items()}
        told = deepcopy(undisturbed)
        _listen_all(threads, undisturbed, _start_all(surface))
        calls = _start_all(surface)
        victim = find_busy(quad, "decode")
        for name, call in calls.items():
            while min(len(choice.tokens) for choice in told[name]) < after:
                take(told[name], next(call))
        victim.kill()
        _listen_all(threads, told, calls)
    for name, choices in told.items():
        for choice, expected in zip(choices, undisturbed[name], strict=True):
            assert choice.tokens == expected.tokens, name
            assert choice.finish_reason == expected.finish_reason
            assert [one.token_id for one in choice.logprobs] == [one.token_id for one in expected.logprobs]
            given = [one.logprob for one in choice.logprobs]
            assert given == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4), name
    attempts = [choice.timing.attempts for choices in told.values() for choice in choices]
    assert max(attempts) > 1, attempts


def _start_all(surface: Surface) -> dict[str, Any]:
    return {name: surface.start(PROMPT, max_tokens=NUM_TOKENS, **fields) for name, fields in SHAPES.items()}


def _listen_all(threads: ThreadPoolExecutor, told: dict[str, list[Told]], calls: dict[str, Any]) -> None:
    for ended in [threads.submit(_listen, told[name], call) for name, call in calls.items()]:
        ended.result()


def _listen(choices: list[Told], call: Any) -> None:
    for response in call:
        take(choices, response)
