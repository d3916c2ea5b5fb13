"""Lists of prompts with several answers each, some abandoned by their clients: no page leaks. Row 23 of the fault list.

TEST_MANY_CHOICES is the number of choices requested.
"""

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.live import HTTP, Live
from tests.support.oracle import random_prompt
from tests.support.surface import MODEL, VOCAB

NUM_CHOICES = int(os.environ.get("TEST_MANY_CHOICES", "120"))
NUM_CLIENTS = 12
PROMPTS = [random_prompt(length, VOCAB, seed=length) for length in (1, 16, 17, 60, 130)]
NUM_TOKENS = 24


@pytest.mark.timeout(300 + NUM_CHOICES)
def test_no_page_is_left_after_many_choices_of_which_some_are_cancelled(demo: Live) -> None:
    num_cancelled = demo.metric("decode-0", "cancelled_total")
    whole = [_ask(demo, [prompt], 1, {}, None)[0] for prompt in PROMPTS]
    requests = list(_draw_requests(random.Random(NUM_CHOICES)))
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        num_whole = sum(clients.map(lambda one: _check(demo, whole, *one), requests))
    assert 0.3 < num_whole / len(requests) < 0.7
    demo.wait_until_unused()
    for gauge in ("num_requests_running", "num_requests_waiting"):
        for name in demo.metrics_urls:
            assert demo.metric(name, gauge) == 0, (name, gauge)
    assert demo.metric("decode-0", "cancelled_total") > num_cancelled


def _draw_requests(rng: random.Random) -> Iterator[tuple[list[int], int, bool, float | int | None]]:
    """Indices of prompts, n, whether one answer's end cuts the others short, and when the client leaves."""
    num_left = NUM_CHOICES
    while num_left > 0:
        indices = rng.choices(range(len(PROMPTS)), k=rng.randint(1, 4))
        n = rng.randint(1, 4)
        leaves: float | int | None = rng.choice([None, None, rng.random() / 10, rng.randint(1, 40)])
        num_left -= len(indices) * n
        yield indices, n, rng.random() < 0.3, leaves


def _check(
    live: Live, whole: list[str], indices: list[int], n: int, is_stopped: bool, leaves: float | int | None
) -> bool:
    """Returns whether the client stayed; if so, every choice must equal the answer to a single request."""
    cut = [text[len(text) // 2 :][:2] for text in whole]
    stop = cut[indices[0]] if is_stopped and cut[indices[0]] else None
    texts = _ask(live, [PROMPTS[index] for index in indices], n, {"stop": stop}, leaves)
    if leaves is None:
        expected = [
            whole[index] if stop is None else whole[index].split(stop)[0] for index in indices for _ in range(n)
        ]
        assert texts == expected
    return leaves is None


def _ask(
    live: Live, prompts: list[list[int]], n: int, fields: dict[str, object], leaves: float | int | None
) -> list[str]:
    """All choices' texts. `leaves`: the client leaves after so many seconds without an event, or so many events."""
    body = {
        "model": MODEL, "prompt": prompts, "n": n, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, **fields,
    }  # fmt: skip
    texts: defaultdict[int, str] = defaultdict(str)
    timeout = httpx.Timeout(100, read=leaves if isinstance(leaves, float) else 100)
    is_over = False
    try:
        with HTTP.stream("POST", f"{live.url}/v1/completions", json=body, timeout=timeout) as response:
            for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: ")):
                if number == leaves:
                    break
                is_over = line == "data: [DONE]"
                for choice in () if is_over else json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
    except httpx.ReadTimeout:
        assert isinstance(leaves, float)
    assert is_over or leaves is not None
    return [texts[index] for index in range(len(prompts) * n)]
