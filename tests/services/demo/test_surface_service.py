"""All that clients can request, through real processes: each answer equals transformers' or a simpler request's."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from demo.paths import TARGET_DIR
from gateway.text.tokenizer import Tokenizer
from tests.support.combinations import combination
from tests.support.live import HTTP, Live
from tests.support.oracle import Oracle, random_prompt
from tests.support.surface import CHUNK, MODEL, PAGE_TOKENS, VOCAB, Surface, Told, transferred_bytes

TOLERANCE = 1e-4
NUM_MIXED = 16


@pytest.fixture(scope="module")
def question() -> list[int]:
    """Its answer is short and ends with an end token."""
    tokenizer = Tokenizer(TARGET_DIR)
    text = tokenizer.render_chat([{"role": "user", "content": "What is 3 + 4?"}])
    return tokenizer.encode(text, add_special_tokens=False)


def read_bytes(live: Live) -> float:
    return live.metric("decode-0", "kv_transfer_bytes_total")


# -- several choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [combination(1), 17, combination(130)])
def test_choices_are_the_answers_of_single_requests_after_one_hand_off(
    demo: Live, surface: Surface, oracle: Oracle, length: int
) -> None:
    """The other choices find the first one's whole pages cached; each computes the last, partial page itself."""
    prompt = random_prompt(length, VOCAB, seed=length)
    moved = transferred_bytes(length)
    expected = [moved, *[moved if length <= PAGE_TOKENS else 0] * 2]
    for number in range(20):
        before = read_bytes(demo)
        choices = surface.ask(prompt, n=3, seed=7, max_tokens=30, temperature=1, cache_salt=str(number))
        assert read_bytes(demo) - before == sum(expected)
        if [choice.timing.transfer_bytes for choice in choices] == expected:
            break  # otherwise prefill's call would end after the answer
    else:
        raise AssertionError(f"{expected} bytes were never told")
    demo.wait_until_unused()
    for number, choice in enumerate(choices):
        assert choice.tokens == surface.answer(prompt, seed=7 + number, max_tokens=30, temperature=1), number
    assert len({tuple(choice.tokens) for choice in choices}) == 3
    greedy = surface.ask(prompt, n=3, max_tokens=20)
    assert [choice.tokens for choice in greedy] == [oracle.answer(prompt, 20, guess=greedy[0].tokens)] * 3


# -- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 150])
def test_logprobs_are_transformers_whatever_else_shapes_the_answer(
    surface: Surface, oracle: Oracle, length: int
) -> None:
    prompt = random_prompt(length, VOCAB, seed=length)
    shaped = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.5, "logit_bias": {40: 5.0}}
    for fields in ({}, shaped):
        choice = surface.ask_one(prompt, max_tokens=24, logprobs=5, **fields)
        wanted = oracle.logprobs([*prompt, *choice.tokens])[length - 1 : -1]
        assert [told.token_id for told in choice.logprobs] == choice.tokens
        for told, row in zip(choice.logprobs, wanted, strict=True):
            assert told.logprob == pytest.approx(float(row[told.token_id]), abs=TOLERANCE)
            assert [one.logprob for one in told.top] == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)
            assert [one.logprob for one in told.top] == pytest.approx(
                [float(row[one.token_id]) for one in told.top], abs=TOLERANCE
            )


def check_echo(live: Live, oracle: Oracle, prompt: Sequence[int], num_tokens: int) -> None:
    """Log-probabilities of prompt and answer; the greedy answer is the reference."""
    body = {
        "model": MODEL, "prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    response = HTTP.post(f"{live.url}/v1/completions", json=body, timeout=100)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    told, guess = choice["logprobs"], choice["token_ids"][-num_tokens:]
    tokens = [*prompt, *(oracle.answer(prompt, num_tokens, guess=guess) if num_tokens else ())]
    rows = oracle.logprobs(tokens)
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    wanted = rows[torch.arange(len(tokens) - 1), tokens[1:]].tolist()
    assert told["token_logprobs"][1:] == pytest.approx(wanted, abs=TOLERANCE)
    for top, row in zip(told["top_logprobs"][1:], rows[:-1], strict=True):
        likeliest = sorted(top.values(), reverse=True)[:3]
        assert likeliest == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize(("length", "num_tokens"), [(1, 0), (2, 12), (CHUNK + 1, 0), (300, 12)])
def test_an_echoed_prompt_has_transformers_logprobs(demo: Live, oracle: Oracle, length: int, num_tokens: int) -> None:
    before = demo.metric("decode-0", "prompt_tokens_total")
    check_echo(demo, oracle, random_prompt(length, VOCAB, seed=length), num_tokens)
    assert demo.metric("decode-0", "prompt_tokens_total") == before, "decode prefilled something by itself"


# -- what shapes answers ---------------------------------------------------------------------------------------------


class AnswerPenalties(LogitsProcessor):
    """Frequency and presence penalty as OpenAI defines them; transformers has none."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self._num_prompt, self._frequency, self._presence = num_prompt, frequency, presence

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


@pytest.mark.parametrize(
    ("fields", "processor"),
    [
        ({"repetition_penalty": 1.3}, RepetitionPenaltyLogitsProcessor(1.3)),
        ({"frequency_penalty": -0.4, "presence_penalty": 0.6}, AnswerPenalties(40, -0.4, 0.6)),
        ({"logit_bias": {37: -100.0, 70: 9.0}}, SequenceBiasLogitsProcessor([[[37], -100.0], [[70], 9.0]])),
    ],
    ids=["repetition", "frequency and presence", "bias"],
)
def test_penalties_and_biases_change_the_answer_as_they_should(
    surface: Surface, oracle: Oracle, fields: dict[str, Any], processor: LogitsProcessor
) -> None:
    prompt = random_prompt(40, VOCAB, seed=2)
    answer = surface.answer(prompt, max_tokens=24, speculation="draft", **fields)
    assert answer == oracle.answer_with(processor, prompt, 24, guess=answer)
    assert answer != oracle.answer(prompt, 24)


def test_ends_come_when_they_may(surface: Surface, oracle: Oracle, question: list[int]) -> None:
    short = surface.ask_one(question, max_tokens=60, ignore_eos=False)
    length, end = len(short.tokens), short.tokens[-1]
    assert short.finish_reason == "stop" and 3 < length < 30
    beyond = surface.ask_one(question, max_tokens=length + 10)
    assert beyond.tokens == oracle.answer(question, length + 10, guess=beyond.tokens)
    assert beyond.finish_reason == "length"
    assert beyond.tokens[:length] == short.tokens
    longer = surface.ask_one(question, max_tokens=length + 20, min_tokens=length + 10, ignore_eos=False)
    ends = sorted(Tokenizer(TARGET_DIR).eos_token_ids)
    forbids = MinNewTokensLengthLogitsProcessor(len(question), length + 10, ends, device="cpu")
    expected = oracle.answer_with(forbids, question, length + 20)
    stop = next((at for at, token in enumerate(expected) if token in ends), length + 19)
    assert end in ends and longer.tokens == expected[: stop + 1]
    stopped = surface.ask_one(question, max_tokens=60, stop_token_ids=[short.tokens[2]])
    assert stopped.tokens == short.tokens[: short.tokens.index(short.tokens[2]) + 1]
    assert stopped.finish_reason == "stop"


def test_a_worker_that_is_ready_has_its_grammar_compiler(demo: Live) -> None:
    pid = next(worker["pid"] for worker in demo.status() if worker["role"] == "decode")
    children = [pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    assert any("compiler_process" in command for command in commands), commands


# -- timing and speculation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_timing_is_plausible(surface: Surface, speculation: str) -> None:
    prompt = random_prompt(50, VOCAB, seed=5) * 10
    for number in range(20):
        started = time.monotonic()
        choice = surface.ask_one(prompt, max_tokens=100, speculation=speculation, cache_salt=f"{speculation} {number}")
        whole = time.monotonic() - started
        timing = choice.timing
        if timing.transport:
            break  # otherwise prefill's call would end after the answer, too late for its timing
    parts = [timing.queue_seconds, timing.prefill_seconds, timing.first_step_seconds, timing.decode_seconds]
    assert min(parts) >= 0 and timing.prefill_seconds > 0 and timing.decode_seconds > 0
    assert sum(parts) <= whole
    assert 0 < timing.transfer_seconds <= whole
    assert (timing.transport, timing.transfer_bytes) == ("shm", transferred_bytes(500))
    assert (timing.attempts, timing.cached_tokens) == (1, 0)
    assert 0 <= timing.accepted_tokens <= timing.draft_tokens
    assert speculation != "off" or not timing.draft_tokens


def mixed_requests() -> list[dict[str, Any]]:
    """NUM_MIXED requests: greedy and sampled, prompts random and repetitive, of one chunk and of several."""
    wanted = []
    for number in range(NUM_MIXED):
        prompt = random_prompt((1, 16, 33, 90)[number % 4], VOCAB, seed=number)
        fields: dict[str, Any] = {"prompt": prompt * (1 + number % 3), "max_tokens": 20 + number}
        if number % 2:
            fields |= {"temperature": 0.3 + number / NUM_MIXED, "seed": number, "top_p": 0.95}
        if number % 3 == 0:
            fields |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
        if number % 5 == 0:
            fields |= {"logprobs": 2}
        if number % 7 == 0:
            fields |= {"n": 2, "seed": number}
        wanted.append(fields)
    return wanted


def test_speculation_changes_no_token_of_a_mixed_batch(demo: Live, surface: Surface) -> None:
    with ThreadPoolExecutor(NUM_MIXED) as threads:

        def ask_all(speculation: str) -> list[list[Told]]:
            asked = [threads.submit(surface.ask, **fields, speculation=speculation) for fields in mixed_requests()]
            return [one.result() for one in asked]

        answers = {speculation: ask_all(speculation) for speculation in ("off", "ngram", "draft")}
    num_drafted = {}
    for speculation, given in answers.items():
        for number, (choices, expected) in enumerate(zip(given, answers["off"], strict=True)):
            assert [one.tokens for one in choices] == [one.tokens for one in expected], (speculation, number)
        num_drafted[speculation] = sum(one.timing.draft_tokens for choices in given for one in choices)
    demo.wait_until_unused()
    assert num_drafted["off"] == 0, num_drafted
    if not num_drafted["ngram"]:
        pytest.skip("nothing was drafted: on this machine, now, drafts seem to cost more than they bring")
