"""What else a reservation may ask for, on real workers: shared prompts, log-probabilities, shortest lengths, timing."""

from typing import Any

import grpc
import pytest

from protos import decode_pb2, prefill_pb2
from tests.fake_workers import PATIENCE_S
from tests.real_workers import PAGE_TOKENS, PLAIN, VOCAB, Gateway, PrefillWorker, expected_answer
from tests.test_offers import PROMPT, bounded, refusal, run, used, workers

LOCALLY = 1000


def likeliest_after(tokens: list[int]) -> int:
    return expected_answer(tokens, 1)[0]


def logprob(prompt: list[int], position: int) -> float:
    """Of the token at `position`, as the runner tells it."""
    return -abs(prompt[position] - likeliest_after(prompt[:position]))


async def hear(opened: Gateway, handle: int, count: int, prompt: list[int] = PROMPT) -> None:
    assert await opened.end_of(handle) == ("length", "")
    assert opened.tokens[handle] == expected_answer(prompt, count)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 23])  # KV that fills pages to their end, or not
def test_answers_to_one_prompt_share_its_pages(length: int) -> None:
    prompt = PROMPT[:length]

    @bounded
    async def scenario() -> None:
        async with workers() as (opened, prefill, decode):
            decode.runner.may_run.clear()
            ticket = await opened.reserve(1, prompt, count=9)
            for handle in (2, 3):
                await opened.reserve(handle, prompt, count=handle, share_with=1)
            pages = -(-length // PAGE_TOKENS)
            if length > 1:
                assert used(decode) == pages, "whoever waits holds nothing"
                await run(prefill, ticket, prompt)
            await opened.reserve(4, prompt, count=4, share_with=2)
            assert used(decode) == pages + 3, "each holds the page of its own first step"
            decode.runner.may_run.set()
            for handle, count in ((1, 9), (2, 2), (3, 3), (4, 4)):
                await hear(opened, handle, count, prompt)

    scenario()


@bounded
async def test_an_answer_joins_one_that_is_under_way() -> None:
    async with workers() as (opened, _prefill, decode):
        decode.runner.pauses_after_token = True
        await opened.reserve(1, PROMPT, count=30, local=LOCALLY)
        await opened.signal.until(lambda: bool(opened.tokens.get(1)))
        await opened.reserve(2, PROMPT, count=12, share_with=1)
        decode.runner.pauses_after_token = False
        decode.runner.may_run.set()
        await hear(opened, 2, 12)
        await hear(opened, 1, 30)
        assert decode.metrics.prompt_tokens._value.get() == len(PROMPT) - 1, "the prompt was computed once"


@bounded
async def test_who_shares_with_a_session_that_ends_hears_of_it() -> None:
    async with workers() as (opened, _prefill, decode):
        await opened.reserve(1, PROMPT)
        await opened.reserve(2, PROMPT, share_with=1)
        await opened.abort(1)
        reason, error = await opened.end_of(2)
        assert reason == "expired" and "the session whose prompt it shares ended" in error
        await opened.signal.until(lambda: used(decode) == 0)


@bounded
async def test_there_must_be_something_to_share() -> None:
    async with workers() as (opened, _prefill, _decode):
        await opened.reserve(1, PROMPT)
        for share_with, prompt in ((7, PROMPT), (1, PROMPT[:-1])):
            code, detail = await refusal(opened.reserve(2, prompt, share_with=share_with))
            assert code is grpc.StatusCode.NOT_FOUND
            assert f"share_with is {share_with}" in detail


@pytest.mark.parametrize("is_local", [False, True])
def test_a_prompt_is_scored_by_whoever_computes_it(is_local: bool) -> None:
    @bounded
    async def scenario() -> None:
        async with workers() as (opened, prefill, _decode):
            ticket = await opened.reserve(
                1, PROMPT, local=LOCALLY if is_local else 0, num_prompt_logprobs=2, num_logprobs=3
            )
            found = [] if is_local else (await _run_scored(prefill, ticket, 2)).prompt_logprobs
            await hear(opened, 1, 4)
            found = found or opened.told[1].prompt_logprobs
            assert [one.logprob for one in found] == [logprob(PROMPT, at) for at in range(1, len(PROMPT))]
            assert list(found[4].top_ids) == [likeliest_after(PROMPT[:5]), likeliest_after(PROMPT[:5]) + 1]
            assert bool(opened.told[1].prompt_logprobs) == is_local
            answer = opened.told[1]
            assert [one.top_ids[0] for one in answer.logprobs] == list(answer.token_ids)
            assert all(len(one.top_logprobs) == 3 for one in answer.logprobs)

    scenario()


async def _run_scored(prefill: PrefillWorker, ticket: Any, count: int) -> prefill_pb2.RunResponse:
    request = prefill_pb2.RunRequest(prompt_ids=PROMPT, ticket=ticket, num_prompt_logprobs=count)
    response: prefill_pb2.RunResponse = await prefill.stub.Run(request, timeout=PATIENCE_S)
    return response


@bounded
async def test_an_answer_cannot_stop_before_min_tokens() -> None:
    async with workers() as (opened, _prefill, _decode):
        stop = likeliest_after(PROMPT)
        await opened.reserve(1, PROMPT, local=LOCALLY, stop_token_ids=[stop])
        assert await opened.end_of(1) == ("stop", "")
        await opened.reserve(2, PROMPT, local=LOCALLY, stop_token_ids=[stop], min_tokens=1)
        await opened.end_of(2)
        assert opened.tokens[2][0] == stop + 1
        await opened.reserve(3, PROMPT, local=LOCALLY, stop_token_ids=[stop], min_tokens=3, num_emitted=3)
        assert await opened.end_of(3) == ("stop", ""), "what was emitted before counts"


@bounded
async def test_the_last_news_tell_where_the_time_went() -> None:
    async with workers() as (opened, prefill, _decode):
        await run(prefill, await opened.reserve(1, PROMPT), PROMPT)
        await opened.end_of(1)
        timing = opened.told[1].timing
        assert timing.kv_seconds > 0 and timing.first_step_seconds > 0 and timing.decode_seconds > 0
        assert (timing.steps, timing.preemptions) == (4, 0)


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"num_logprobs": 21}, "num_logprobs is 21, expected at most 20"),
        ({"num_prompt_logprobs": 21}, "num_prompt_logprobs is 21, expected at most 20"),
        ({"min_tokens": 5}, "min_tokens is 5, but the answer has at most 4 tokens"),
        ({"num_emitted": len(PROMPT)}, "num_emitted is 23, expected less than 23 prompt_ids"),
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids names token {VOCAB}; the model has the tokens 0 to {VOCAB - 1}"),
        ({"share_with": 3, "num_prompt_logprobs": 0}, "share_with is 3 and num_prompt_logprobs 0"),
    ],
)
def test_a_bad_value_is_refused_by_name(change: dict[str, Any], detail: str) -> None:
    @bounded
    async def scenario() -> None:
        async with workers() as (opened, _prefill, _decode):
            code, found = await refusal(opened.reserve(1, PROMPT, **change))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert detail in found

    scenario()


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan, expected a finite number"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf, expected a finite number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected a finite number > 0"),
        ({"logit_bias": [decode_pb2.TokenBias(token_id=VOCAB)]}, f"logit_bias names token {VOCAB}"),
        ({"logit_bias": [decode_pb2.TokenBias(token_id=1, bias=float("nan"))]}, "logit_bias adds nan to token 1"),
    ],
)
def test_a_bad_sampling_value_is_refused_by_name(change: dict[str, Any], detail: str) -> None:
    @bounded
    async def scenario() -> None:
        async with workers() as (opened, _prefill, _decode):
            sampling = decode_pb2.SamplingParams()
            sampling.CopyFrom(PLAIN)
            sampling.MergeFrom(decode_pb2.SamplingParams(**change))
            if "repetition_penalty" in change:
                sampling.repetition_penalty = change["repetition_penalty"]
            request = decode_pb2.ReserveRequest(
                gateway="g", handle=1, prompt_ids=PROMPT, max_tokens=4, sampling=sampling
            )
            code, found = await refusal(opened.stub.Reserve(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert detail in found

    scenario()
