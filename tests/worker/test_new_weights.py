"""Weights that change under a worker: what is refused, what it waits for, and that nothing of the old set is used."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtransfer.layout import process_of
from protos import worker_pb2
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.handover import OTHER, PROMPT, answer, refusal, used
from tests.support.real_workers import (
    DecodeWorker,
    Gateway,
    PrefillWorker,
    decode_worker,
    expected_answer,
    gateway,
    prefill_worker,
)
from worker import new_weights
from worker.peers.kv_peers import HandshakeRefusedError
from worker.peers.other_ranks import OtherRanks

NEW = "n" * 64


class Reads:
    """Stands for the engine's part."""

    def __init__(self) -> None:
        self.taken = 0
        self.begun = threading.Event()
        self.failure: Exception | None = None  # of the next one
        self.take_failure: Exception | None = None

    def check(self, _engine: object, folder: Path) -> str:
        return NEW if folder.name == "new" else "other"

    def read(self, _engine: object, _folder: Path, _weights: str) -> Any:
        if self.failure is not None:
            raise self.failure
        self.begun.set()
        return self.take

    def take(self) -> None:
        if self.take_failure is not None:
            raise self.take_failure
        self.taken += 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reads:
    reads = Reads()
    monkeypatch.setattr(new_weights, "check_new_weights", reads.check)
    monkeypatch.setattr(new_weights, "read_new_weights", reads.read)
    monkeypatch.setattr(new_weights, "list_shards", lambda _folder: [])
    (tmp_path / "new").mkdir()
    return reads


@asynccontextmanager
async def pair(root: Path) -> AsyncIterator[tuple[Gateway, PrefillWorker, DecodeWorker]]:
    signal = Signal()
    async with (
        prefill_worker(signal, weights_dir=str(root)) as prefill,
        decode_worker(signal, weights_dir=str(root)) as decode,
        gateway(decode, signal) as opened,
    ):
        yield opened, prefill, decode


def change(worker: Any, path: Path, weights: str = NEW, wait_s: float = PATIENCE_S) -> Any:
    request = worker_pb2.SetWeightsRequest(path=str(path), weights=weights, wait_s=wait_s)
    return worker.SetWeights(request, timeout=PATIENCE_S)


async def test_nothing_of_the_old_weights_is_used_after_a_change(reads: Reads, tmp_path: Path) -> None:
    async with pair(tmp_path) as (opened, prefill, decode):
        assert await answer(opened, prefill, 1) == expected_answer(PROMPT, 4)
        cache, old = decode.scheduler.kv.cache, decode.peer.incarnation
        keys = list(cache._page)
        assert keys and decode.peers.find(prefill.peer.incarnation)
        generations = [int(cache.generations[page]) for page in range(cache.num_pages)]
        looked = await change(opened.worker, tmp_path / "new", weights="")
        assert looked.weights == NEW and decode.peer.incarnation == old, "it was only looked at"
        await change(opened.worker, tmp_path / "new")
        assert reads.taken == 1 and not cache.find(keys) and not cache.num_cached
        assert all(int(cache.generations[page]) > before for page, before in enumerate(generations))
        assert decode.peer.incarnation == f"{old}+1" and process_of(decode.peer.incarnation) == old
        assert decode.peer.layout.weights == decode.scheduler.kv.model == NEW and decode.peer.revision == NEW[-12:]
        await opened.signal.until(lambda: not opened.is_open)  # the gateway opens another stream, and learns of it
        assert decode.peers.find(prefill.peer.incarnation) is None, "accepted before, with the old weights"
        with pytest.raises(HandshakeRefusedError, match="weights differs"):
            await decode.peers.shake_hands(prefill.peer)
        assert await refusal(opened.ask(2, OTHER)) == (
            grpc.StatusCode.FAILED_PRECONDITION, "gateway g has no Steps stream open here",
        )  # fmt: skip
        async with gateway(decode, opened.signal, "h") as again:
            ticket = await again.reserve(3, OTHER)
            assert "weights differs" in (await refusal(prefill.run(ticket, OTHER)))[1]
            await again.abort(3)
            await change(prefill.worker, tmp_path / "new")
            assert await answer(again, prefill, 4) == expected_answer(PROMPT, 4)


async def test_a_change_waits_for_what_runs_and_lets_nothing_in(reads: Reads, tmp_path: Path) -> None:
    async with pair(tmp_path) as (opened, prefill, _decode):
        ticket = await opened.reserve(1, PROMPT)
        changing = asyncio.ensure_future(change(opened.worker, tmp_path / "new"))
        assert await asyncio.to_thread(reads.begun.wait, PATIENCE_S)
        status = await opened.worker.Status(worker_pb2.StatusRequest(), timeout=PATIENCE_S)
        assert status.pause == "gets new weights"
        code, said = await refusal(opened.ask(2, OTHER))
        assert code is grpc.StatusCode.UNAVAILABLE and said == "this worker gets new weights"
        assert (await refusal(change(opened.worker, tmp_path / "new", "x")))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert not changing.done()
        await prefill.run(ticket, PROMPT)
        assert await opened.end_of(1) == ("length", "") and opened.tokens[1] == expected_answer(PROMPT, 4)
        assert (await changing).weights == NEW and reads.taken


async def test_a_change_that_fails_leaves_all_as_it_was(reads: Reads, tmp_path: Path) -> None:
    async with pair(tmp_path) as (opened, prefill, decode):
        before = decode.peer.SerializeToString()
        await opened.reserve(1, PROMPT)
        code, said = await refusal(change(opened.worker, tmp_path / "new", wait_s=0.05))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "1 sequences were still running" in said
        await opened.abort(1)
        reads.failure = ValueError("the file is damaged")
        assert await refusal(change(opened.worker, tmp_path / "new")) == (
            grpc.StatusCode.INVALID_ARGUMENT, "the file is damaged",
        )  # fmt: skip
        assert not reads.taken and decode.peer.SerializeToString() == before
        assert await answer(opened, prefill, 2) == expected_answer(PROMPT, 4)


async def test_a_set_that_is_taken_in_part_ends_the_process(
    reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(OtherRanks, "end_process", lambda _self: ended.append(True))
    async with pair(tmp_path) as (opened, _prefill, _decode):
        reads.take_failure = RuntimeError("half-way")
        await refusal(change(opened.worker, tmp_path / "new"))
        assert ended == [True]


@pytest.mark.parametrize(
    ("path", "said"),
    [("nothing", "is no folder"), ("..", "is not below --weights-dir"), ("../x", "is not below"), ("out", "not below")],
)
async def test_paths_lead_below_the_folder_for_them(reads: Reads, tmp_path: Path, path: str, said: str) -> None:
    root = tmp_path / "new"
    (root / "out").symlink_to(tmp_path)
    async with pair(root) as (opened, _prefill, _decode):
        code, detail = await refusal(change(opened.worker, root / path))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and said in detail, detail
        request = worker_pb2.SetWeightsRequest(path="relative", weights=NEW)
        code, detail = await refusal(opened.worker.SetWeights(request, timeout=PATIENCE_S))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "is not below" in detail


async def test_without_a_folder_for_them_none_are_taken(reads: Reads, tmp_path: Path) -> None:
    signal = Signal()
    async with decode_worker(signal) as decode, gateway(decode, signal) as opened:
        code, said = await refusal(change(opened.worker, tmp_path / "new"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "set --weights-dir" in said


async def test_a_pause_ends_by_itself_and_can_end_what_runs(tmp_path: Path) -> None:
    async with pair(tmp_path) as (opened, _prefill, decode):
        await opened.reserve(1, PROMPT)
        paused = await opened.worker.Pause(worker_pb2.PauseRequest(for_s=60), timeout=PATIENCE_S)
        assert paused.num_left == 1 and opened.is_open
        assert (await refusal(opened.ask(2, OTHER)))[1] == "this worker is paused"
        await opened.worker.Pause(worker_pb2.PauseRequest(for_s=0.05, ends=True), timeout=PATIENCE_S)
        await opened.signal.until(lambda: not opened.is_open and not used(decode))
        await asyncio.sleep(0.06)
        async with gateway(decode, opened.signal, "h") as again:
            assert (await again.reserve(1, PROMPT)).incarnation == decode.peer.incarnation
