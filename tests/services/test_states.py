"""Models whose layers keep states: hand-off, checkpoints, replay and ends give transformers' tokens and leave no slot.

Real workers over real engines in this process, with pages of 4 tokens.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.engine import Engine, build_engine
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
from worker.scheduler import num_rows_for

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 128
TYPES = ("qwen3_5_text", "lfm2", "qwen3_5_moe_text", "granitemoehybrid", "olmo_hybrid")
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


def build(folder: Path, num_pages: int = 60, num_slots: int = 4 * MAX_RUNNING + 1) -> tuple[Engine, KvRunner]:
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
        await signal.until(lambda: all(one.cache.num_held == 0 for one in schedulers))
        assert all(one.states is not None and one.states.cache.num_held == 0 for one in schedulers)


async def ask(
    opened: Gateway, prefill: PrefillWorker, handle: int, prompt: list[int], count: int = 9, **others: Any
) -> tuple[list[int], int]:
    """The answer, and how many tokens prefill found cached; -1 if it was not asked."""
    reserved, found = await opened.ask(handle, prompt, count, **others), -1
    if reserved.needs_prefill:
        found = (await prefill.run(reserved.ticket, prompt)).cached_tokens
    assert await opened.end_of(handle) == ("length", "")
    return opened.tokens[handle], found


class Landed:
    """The pages and slots of offers, as they left prefill and as they are on decode."""

    def __init__(self, prefill: PrefillWorker, decode: DecodeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_slots = 0
        self._sent: dict[tuple[int, int], list[Bytes]] = {}  # session, end |-> bytes
        take, finish = decode.receiver._read, decode.scheduler.finish_read

        def load(worker: PrefillWorker | DecodeWorker, pages: list[int], slots: list[int]) -> list[Bytes]:
            assert worker.states is not None
            return [worker.pool.load(pages), *([worker.states.load(slots)] if slots else [])]

        async def read(offer: kv_pb2.OfferRequest, known: Any, targets: Any) -> kv_pb2.OfferResponse:
            slots = [ref.page for ref in offer.slots]
            self._sent[offer.ticket.session, offer.end] = load(prefill, [ref.page for ref in offer.pages], slots)
            self._targets = targets
            return await take(offer, known, targets)

        def note(session: int, end: int, now: float, num_slots: int = 0) -> None:
            landed = load(decode, self._targets.pages, self._targets.slots)
            for there, here in zip(self._sent.pop((session, end)), landed, strict=True):
                assert np.array_equal(there, here)
            self.num_slots += num_slots
            finish(session, end, now, num_slots)

        monkeypatch.setattr(decode.receiver, "_read", read)
        monkeypatch.setattr(type(decode.scheduler), "finish_read", lambda _, *args: note(*args))


@pytest.mark.parametrize(("transport", "chunk_tokens"), [("shm", 1), ("grpc", 5), ("nixl", 16), ("shm", 16)])
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
