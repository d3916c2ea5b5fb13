"""Models whose layers keep states: hand-off, checkpoints, replay and ends give transformers' tokens and leave no slot.

Real workers over real engines in this process, with pages of 4 tokens.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Sized
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.compose import FullEngine, build_engine
from protos import kv_pb2
from runtime.config_parts import Transport
from tests.support.checkpoints import write_checkpoint
from tests.support.fake_workers import Signal
from tests.support.families import FAMILIES
from tests.support.oracle import Oracle, random_prompt
from tests.support.real_workers import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    MAX_RUNNING,
    PAGE_TOKENS,
    DecodeWorker,
    Gateway,
    KvRunner,
    PrefillWorker,
    decode_worker,
    gateway,
    prefill_worker,
)
from tests.support.threads import one_thread
from tests.support.tiny_models import tiny_config, tiny_model
from worker import receiving
from worker.table import num_rows_for

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 128
# Model type |-> transports and tokens of a chunk. TEST_FAMILIES: also those of other families (`make nightly`).
WAYS: dict[str, tuple[tuple[Transport, int], ...]] = {
    "qwen3_5_text": (("shm", 1), ("grpc", 5), ("nixl", 16)),
    "lfm2": (("grpc", 5),),
}
if os.environ.get("TEST_FAMILIES"):
    WAYS |= {
        "lfm2": (("shm", 1), ("nixl", 16)), "qwen3_5_moe_text": (("shm", 1),),
        "granitemoehybrid": (("shm", 16), ("grpc", 5)), "olmo_hybrid": (("nixl", 16),),
    }  # fmt: skip
TYPES = tuple(WAYS)
PROMPTS = [random_prompt(length, VOCAB, seed=length) for length in (23, 20, 21, 5, 3, 1, 40)]
Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module", params=TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_type(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(TYPES[0], tmp_path_factory.mktemp("model"))


def write(kind: str, path: Path) -> Path:
    if kind in FAMILIES:
        return write_checkpoint(path, kind, vocab=VOCAB)
    tiny_model(tiny_config(kind, vocab_size=VOCAB)).save_pretrained(path)
    return path


def build(folder: Path, num_pages: int = 60, num_slots: int = 4 * MAX_RUNNING + 1) -> tuple[FullEngine, KvRunner]:
    """What `decode_worker` takes; nothing holds up these steps."""
    engine = build_engine(
        str(folder), "", "float32", "cpu", 1, PAGE_TOKENS, num_rows_for(MAX_RUNNING),
        lambda *_: (num_pages, num_slots), lambda done, total: None, CONTEXT_TOKENS,
    )  # fmt: skip
    cast(Any, engine.runner).may_run = type("Never", (), {"set": lambda self: None})()
    return engine, cast(KvRunner, engine.runner)


@asynccontextmanager
async def ring(
    folder: Path, transport: Transport = "shm", chunk_tokens: int = CHUNK_TOKENS, **sizes: int
) -> AsyncIterator[tuple[Gateway, PrefillWorker, DecodeWorker]]:
    """sizes: of decode's pools. At the end no page and no slot is held."""
    signal = Signal()
    async with (
        prefill_worker(signal, built=build(folder), chunk_tokens=chunk_tokens, transport=transport) as prefill,
        decode_worker(signal, transport, built=build(folder, **sizes), nixl_allow_tcp=True) as decode,
    ):
        async with gateway(decode, signal) as opened:
            yield opened, prefill, decode
        schedulers = (prefill.scheduler, decode.scheduler)
        await signal.until(lambda: all(one.kv.cache.num_held == 0 for one in schedulers))
        assert all(one.kv.states.cache.num_pages and one.kv.states.cache.num_held == 0 for one in schedulers)


async def ask(
    opened: Gateway, prefill: PrefillWorker, handle: int, prompt: list[int], count: int = 9, **others: Any
) -> tuple[list[int], int]:
    """The answer, and how many tokens prefill found cached; -1 if it was not asked."""
    reserved, found = await opened.ask(handle, prompt, count, **others), -1
    if reserved.needs_prefill:
        found = (await prefill.run(reserved.ticket, prompt)).cached_tokens
    assert await opened.end_of(handle) == ("length", "")
    return opened.tokens[handle], found


async def right(
    oracle: Oracle, prompt: list[int], num_cached: int, asked: Awaitable[tuple[list[int], int]]
) -> list[int]:
    """The answer, which is transformers', after so many cached tokens."""
    told, found = await asked
    assert told == oracle.answer(prompt, 9, guess=told) and found == num_cached
    return told


class Landed:
    """The pages and slots of offers, as they left prefill and as they are on decode."""

    def __init__(self, prefill: PrefillWorker, decode: DecodeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_slots = 0
        self._sent: dict[tuple[int, int], list[Bytes]] = {}  # session, end |-> bytes
        take, finish = decode.receiver._read, receiving.finish_read

        def load(worker: PrefillWorker | DecodeWorker, pages: list[int], slots: list[int]) -> list[Bytes]:
            assert worker.states is not None
            return [worker.pool.load(pages), *([worker.states.load(slots)] if slots else [])]

        async def read(offer: kv_pb2.OfferRequest, known: Any, targets: Any) -> kv_pb2.OfferResponse:
            slots = [ref.page for ref in offer.slots]
            self._sent[offer.ticket.session, offer.end] = load(prefill, [ref.page for ref in offer.pages], slots)
            self._targets = targets
            return await take(offer, known, targets)

        def note(session: int, end: int, now: float, num_slots: int = 0) -> None:
            landed = load(decode, *self._targets)
            for there, here in zip(self._sent.pop((session, end)), landed, strict=True):
                assert np.array_equal(there, here)
            self.num_slots += num_slots
            finish(decode.scheduler, session, end, now, num_slots)

        monkeypatch.setattr(decode.receiver, "_read", read)
        monkeypatch.setattr(receiving, "finish_read", lambda _, *args: note(*args))


@pytest.mark.parametrize(
    ("folder", "transport", "chunk_tokens"),
    [(kind, *way) for kind, ways in WAYS.items() for way in ways],
    indirect=["folder"],
)
async def test_tokens_are_transformers_and_bytes_are_prefills(
    folder: Path, transport: Transport, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(folder)
    async with ring(folder, transport, chunk_tokens) as (opened, prefill, decode):
        with monkeypatch.context() as patched:
            landed = Landed(prefill, decode, patched)
            for handle, prompt in enumerate(PROMPTS, 1):
                told, _ = await ask(opened, prefill, handle, prompt)
                assert told == oracle.answer(prompt, 9, guess=told), f"{len(prompt)} tokens, alone"
            # a checkpoint too behind whole pages, unless the prompt ends there; no hand-off of a single token
            assert landed.num_slots == 2 + 2 + 1 + 1 + 1 + 0 + 2
    async with ring(folder, transport, chunk_tokens) as (opened, prefill, decode):
        reserved = [await opened.ask(handle, prompt, 9) for handle, prompt in enumerate(PROMPTS, 1)]
        for answer, prompt in zip(reserved, PROMPTS, strict=True):
            if answer.needs_prefill:
                await prefill.run(answer.ticket, prompt)
        for handle, prompt in enumerate(PROMPTS, 1):
            assert await opened.end_of(handle) == ("length", "")
            assert opened.tokens[handle] == oracle.answer(prompt, 9), f"{len(prompt)} tokens, beside others"


async def test_equal_prompts_and_their_choices_continue_at_the_checkpoint(folder: Path) -> None:
    oracle = Oracle(folder)
    async with ring(folder) as (opened, prefill, decode):
        expected = await right(oracle, PROMPTS[0], 0, ask(opened, prefill, 1, PROMPTS[0]))
        again = [await opened.ask(handle, PROMPTS[0], 9) for handle in (2, 3)]
        assert not any(answer.needs_prefill for answer in again)
        for handle in (2, 3):
            assert await opened.end_of(handle) == ("length", "")
            assert opened.tokens[handle] == expected
        assert decode.scheduler.kv.num_hit == 2 * 20, "whole pages of 23 - 1 positions"
        longer = [*PROMPTS[0], *expected, *PROMPTS[1]]
        await right(oracle, longer, 20, ask(opened, prefill, 4, longer))
        branch = [*PROMPTS[0][:14], *PROMPTS[2]]  # its pages end at 12, where nothing keeps a state yet
        await right(oracle, branch, 0, ask(opened, prefill, 5, branch))
        other = [*PROMPTS[0][:14], *PROMPTS[3]]
        await right(oracle, other, 12, ask(opened, prefill, 6, other))  # two prompts branched off here


@pytest.mark.parametrize("local", [0, 1000])
async def test_a_conversation_computes_each_token_once_but_for_the_distance_to_its_checkpoint(
    one_type: Path, local: int
) -> None:
    oracle, tokens, computed, turns = Oracle(one_type), list[int](), 0, 8
    async with ring(one_type) as (opened, prefill, decode):
        for turn in range(1, turns + 1):
            tokens += random_prompt(5, VOCAB, seed=turn)
            count = 4 if turn % 2 else 3
            told, found = await ask(opened, prefill, turn, tokens, count, local=local)
            assert told == oracle.answer(tokens, count, guess=told), f"turn {turn}"
            assert (found < 0) == bool(local)
            computed += len(tokens) - 1 - max(found, 0)
            tokens += told
        metrics = decode.metrics if local else prefill.metrics
        computed = int(metrics.registry.get_sample_value("baton:prompt_tokens_total") or 0)
        assert computed < len(tokens) + turns * PAGE_TOKENS


async def test_few_pages_and_slots_cost_time_but_no_token(one_type: Path) -> None:
    """Preempted answers are computed again from their checkpoints; without slots to spare there are none."""
    oracle = Oracle(one_type)
    prompts = [random_prompt(9 + number, VOCAB, seed=50 + number) for number in range(5)]
    for num_pages, num_slots, preempts in ((16, 4 * MAX_RUNNING + 1, True), (60, 9, False), (60, 4, False)):
        async with ring(one_type, num_pages=num_pages, num_slots=num_slots) as (opened, _, decode):
            for handle, prompt in enumerate(prompts, 1):
                await admit(opened, handle, prompt)
            for handle, prompt in enumerate(prompts, 1):
                assert await opened.end_of(handle) == ("length", "")
                assert opened.tokens[handle] == oracle.answer(prompt, 17, guess=opened.tokens[handle])
            assert bool(decode.scheduler.num_preemptions) == preempts
            assert (
                decode.scheduler.kv.states.cache.num_pages and decode.scheduler.kv.states.cache.num_cached <= num_slots
            )


async def admit(opened: Gateway, handle: int, prompt: list[int]) -> None:
    """Ask again, whenever an answer ends, while there is no room."""
    while True:
        num_ended = len(opened.ends)
        try:
            await opened.ask(handle, prompt, 17, local=1000)
            return
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await opened.signal.until(partial(has_more, opened.ends, num_ended))


def has_more(values: Sized, count: int) -> bool:
    return len(values) > count


async def test_cancelled_sessions_and_runs_leave_no_slot(one_type: Path) -> None:
    async with ring(one_type) as (opened, prefill, _):
        ticket = await opened.reserve(1, PROMPTS[0], 40)
        await opened.ask(2, PROMPTS[1], 40, local=1000)
        await opened.signal.until(lambda: len(opened.tokens.get(2, ())) > 3)
        await opened.abort(1, 2)
        with pytest.raises(grpc.aio.AioRpcError, match="session"):
            await prefill.run(ticket, PROMPTS[0])
        told, _ = await ask(opened, prefill, 3, PROMPTS[0])
        assert told == Oracle(one_type).answer(PROMPTS[0], 9, guess=told)
