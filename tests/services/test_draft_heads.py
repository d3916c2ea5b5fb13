"""Draft heads through the whole service: prefill computes their KV, decode drafts from it, no token depends on it."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.support.combinations import combination
from tests.support.draft_heads import write_medusa_oracle, write_mtp, write_oracle
from tests.support.live import Live, serve_calmly
from tests.support.oracle import Oracle, random_prompt
from tests.support.random_models import write_tokenizer
from tests.support.surface import Surface
from tests.support.tiny_models import VOCAB

NUM_TOKENS = 40
RANKS = ("--prefill-tp=2", "--decode-tp=1")  # the head's KV is put together from two ranks


KINDS = ["eagle3", combination("medusa"), *(["mtp"] if os.environ.get("TEST_FAMILIES") else [])]


@pytest.fixture(scope="module", params=KINDS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Live]]:
    """A head that always knows, on ranks; with `make families` a random one too."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle3":
        write_oracle(folder)
        flags: tuple[str, ...] = (f"--draft-model={folder / 'head'}", *RANKS)
    elif request.param == "medusa":
        write_medusa_oracle(folder)
        flags = (f"--draft-model={folder / 'head'}", "--prefill-tp=1", "--decode-tp=2")
    else:
        write_mtp(folder / "model", "glm4_moe")
        flags = ("--draft-model=mtp",)
    write_tokenizer(folder / "model", VOCAB)
    with serve_calmly(folder / "model", "--dtype=float32", "--page-tokens=8", "--chunk-tokens=16", *flags) as service:
        yield request.param, folder / "model", service
        service.wait_until_unused()


def test_drafts_change_no_token_and_a_head_that_knows_is_right(live: tuple[str, Path, Live]) -> None:
    kind, folder, service = live
    oracle = Oracle(folder)
    shared = random_prompt(40, VOCAB, seed=1)  # whole pages, which go on with different tokens
    prompts = [[*shared, *random_prompt(1 + 3 * index, VOCAB, seed=index)] for index in range(8)]

    def ask(speculation: str, temperature: float, index: int) -> tuple[list[int], int, int]:
        with grpc.insecure_channel(service.grpc_address) as channel:
            told = Surface(channel).ask_one(
                prompts[index], max_tokens=NUM_TOKENS, speculation=speculation,
                max_draft_tokens=8 if kind == "medusa" else 3,  # three heads, whose second choices fill a tree
                temperature=temperature, seed=index,
            )  # fmt: skip
        return told.tokens, told.timing.draft_tokens, told.timing.accepted_tokens

    for temperature in (0.0, 1.0):
        with ThreadPoolExecutor(8) as threads:
            drafted = list(threads.map(partial(ask, "draft", temperature), range(8)))
            plain = list(threads.map(partial(ask, "off", temperature), range(8)))
        assert [one[0] for one in drafted] == [one[0] for one in plain]
        if temperature == 0:
            for prompt, (tokens, *_) in zip(prompts, drafted, strict=True):
                assert tokens == oracle.answer(prompt, NUM_TOKENS, guess=tokens)
        num_drafted, num_accepted = sum(one[1] for one in drafted), sum(one[2] for one in drafted)
        assert num_drafted > 0 and not sum(one[1] for one in plain)
        assert kind != "eagle3" or num_accepted == num_drafted
        assert kind != "medusa" or num_accepted > num_drafted / 4
