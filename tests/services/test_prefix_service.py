"""The prefix cache through a whole service: conversations on two and two workers."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import grpc
import pytest

from bench.live import Live
from bench.plain_http import HTTP
from demo.paths import TARGET_DIR
from tests.support.calm import serve_calmly
from tests.support.oracle import Oracle, random_prompt
from tests.support.surface import MODEL, PAGE_TOKENS, VOCAB, Surface, Told, num_prefilled, take, transferred_bytes

NUM_TURNS = 8
NEW_TOKENS, ANSWER_TOKENS = 60, 24  # a turn


def wait_until_idle(live: Live) -> None:
    deadline = time.monotonic() + 20
    while live.metric("gateway", "num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def two_and_two() -> Iterator[tuple[Live, Surface]]:
    with (
        serve_calmly("demo", "--dtype=float32", "--prefill-workers=2", "--decode-workers=2") as live,
        grpc.insecure_channel(live.grpc_address) as channel,
    ):
        yield live, Surface(channel, 240)


def test_a_conversation_is_prefilled_once(two_and_two: tuple[Live, Surface]) -> None:
    live, surface = two_and_two
    before, prompt = num_prefilled(live), list[int]()
    for turn in range(NUM_TURNS):
        prompt += random_prompt(NEW_TOKENS, VOCAB, seed=turn)
        num_tokens = len(prompt)
        prompt += surface.answer(prompt, max_tokens=ANSWER_TOKENS)
        wait_until_idle(live)  # a place that is given back late counts as load
    # what a turn leaves in part of a page is computed again
    assert num_prefilled(live) - before <= num_tokens + NUM_TURNS * PAGE_TOKENS


def test_routing_keeps_conversations_where_their_pages_are(two_and_two: tuple[Live, Surface]) -> None:
    """Of two conversations now one, now the other is under way when the other's turn comes: load alone swaps them."""
    live, surface = two_and_two
    before = num_read(live)
    prompts: list[list[int]] = [[], []]
    for turn in range(NUM_TURNS):
        first, second = prompts if turn % 2 else prompts[::-1]
        for number, prompt in enumerate(prompts):
            prompt += random_prompt(NEW_TOKENS, VOCAB, seed=1000 * (number + 1) + turn)
        slow, told = surface.start(first, max_tokens=8 * ANSWER_TOKENS), Told()
        begun = next(slow)
        second += surface.answer(second, max_tokens=ANSWER_TOKENS)
        for response in chain([begun], slow):
            take([told], response)
        first += told.tokens
    # of each turn what is new: moved to the other worker, a conversation would be read whole
    most = transferred_bytes(NEW_TOKENS + PAGE_TOKENS)
    assert 0 < num_read(live) - before <= 2 * NUM_TURNS * most


def num_read(live: Live) -> float:
    """Bytes of KV."""
    return sum(live.metric(f"decode-{rank}", "kv_transfer_bytes_total") for rank in range(2))


def test_200_requests(two_and_two: tuple[Live, Surface]) -> None:
    """Mixed prompts, answers, streams and transports of request; no error, every pool empty afterwards."""
    (live, surface), oracle = two_and_two, Oracle(TARGET_DIR)
    probes = {length: oracle.answer(random_prompt(length, VOCAB, seed=length), 12) for length in (1, 30, 300)}
    everyone = threading.Barrier(200, timeout=60)

    def ask(index: int) -> None:
        everyone.wait()
        if index % 2:
            length = (1, 30, 300)[index % 3]
            assert surface.answer(random_prompt(length, VOCAB, seed=length), max_tokens=12) == probes[length]
        else:
            messages = [{"role": "user", "content": "Hello! What is 3 + 4?"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 1 + index, "stream": index % 4 == 0}
            response = HTTP.post(f"{live.url}/v1/chat/completions", json=body, timeout=240)
            assert response.status_code == 200, response.text

    with ThreadPoolExecutor(200) as threads:
        list(threads.map(ask, range(200)))
    live.wait_until_unused()
    workers = [f"{role}-{index}" for role in ("prefill", "decode") for index in (0, 1)]
    shares = {name: live.metric(name, "engine_step_seconds_count") for name in workers}
    assert all(shares.values()), f"a worker did nothing: {shares}"
