"""The prefix cache through whole services: a prompt that was seen, and conversations on two and two workers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from bench.live import Live
from demo.paths import TARGET_DIR
from protos import inference_pb2, inference_pb2_grpc
from tests.calm import serve_calmly
from tests.oracle import random_prompt

VOCAB, PAGE_TOKENS = 1024, 16
NUM_TURNS, NUM_CONVERSATIONS = 8, 4
NEW_TOKENS, ANSWER_TOKENS = 60, 24  # a turn


@contextmanager
def client(live: Live) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(live.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def ask(
    stub: inference_pb2_grpc.InferenceStub, prompt: list[int], num_tokens: int, salt: str = ""
) -> list[inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=num_tokens, temperature=0, ignore_eos=True,
        include_timing=True, cache_salt=salt,
    )  # fmt: skip
    return list(stub.Generate(request, timeout=120))


def num_prefilled(live: Live) -> float:
    """Prompt positions computed by all workers."""
    return sum(live.metric(name, "prompt_tokens_total") for name in live.metrics_urls if name != "gateway")


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    prompt = random_prompt(1500, VOCAB, seed=1)
    with serve_calmly(TARGET_DIR) as live, client(live) as stub:
        ask(stub, prompt, 8)
        before = num_prefilled(live)
        steps_before = live.metric("decode-0", "engine_step_seconds_count")
        (last,) = ask(stub, prompt, 1)
        assert last.usage.cached_tokens == 1499 // PAGE_TOKENS * PAGE_TOKENS
        assert last.timing.cached_tokens == last.usage.cached_tokens
        assert num_prefilled(live) - before < PAGE_TOKENS
        assert live.metric("decode-0", "engine_step_seconds_count") - steps_before <= 2  # steps until the first token
        assert live.metric("decode-0", "prefix_cache_hits_total") == last.usage.cached_tokens
        ask(stub, prompt, 1, salt="another")
        assert num_prefilled(live) - before > 1400


@pytest.mark.parametrize("routing", ["--cache-routing", "--no-cache-routing"])
def test_conversations_are_prefilled_once(routing: str, counted: dict[str, float]) -> None:
    """Several at once, so that load alone would send a turn now here, now there."""
    with serve_calmly(TARGET_DIR, "--prefill-workers=2", "--decode-workers=2", routing) as live, client(live) as stub:

        def converse(number: int) -> int:
            prompt: list[int] = []
            for turn in range(NUM_TURNS):
                prompt += random_prompt(NEW_TOKENS + 7 * number, VOCAB, seed=100 * number + turn)
                last_prompt = len(prompt)
                for response in ask(stub, prompt, ANSWER_TOKENS):
                    prompt += response.token_ids
            return last_prompt

        if routing == "--cache-routing":  # alone; what a turn leaves in part of a page is computed again
            num_tokens = converse(0)
            assert num_prefilled(live) <= num_tokens + NUM_TURNS * PAGE_TOKENS
        before = num_prefilled(live)
        with ThreadPoolExecutor(NUM_CONVERSATIONS) as threads:
            num_tokens = sum(threads.map(converse, range(1, NUM_CONVERSATIONS + 1)))
        counted[routing] = (num_prefilled(live) - before) / num_tokens
    if routing == "--no-cache-routing":
        assert counted[routing] > 1.2 * counted["--cache-routing"]


@pytest.fixture(scope="module")
def counted() -> dict[str, float]:
    """routing |-> prompt positions computed for each token of the last prompts."""
    return {}
