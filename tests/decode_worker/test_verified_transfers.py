"""Hand-offs checked by bytes (--verify-transfers): real services and readers, a runner instead of a model."""

import re
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from kvtransfer.checksums import compute_checksums
from kvtransfer.reader import PageRef
from protos import decode_pb2, kv_pb2
from tests.support.handover import OTHER, PROMPT, answer, refusal, workers
from tests.support.real_workers import DecodeWorker, PrefillWorker, expected_answer
from worker.peers import pools as ranked_pool
from worker.peers.pools import RankedPool

CHANGED = r"refused the offer \(checksum\): page \d+ \(positions 0 to \d+; bytes 0 to 511 of rank 0, read by rank 0\) "


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages whose checksums were computed, on both workers."""
    pages = list[int]()

    def note(store: Any, some: Sequence[int], *where: int) -> list[int]:
        pages.extend(some)
        return compute_checksums(store, some, *where)

    monkeypatch.setattr(ranked_pool, "compute_checksums", note)
    return pages


@pytest.mark.parametrize("is_on", [True, False])
async def test_pages_are_summed_on_both_sides_and_only_if_that_is_asked_for(is_on: bool, computed: list[int]) -> None:
    sent: list[kv_pb2.OfferRequest] = []
    async with workers("shm", verify_transfers=is_on) as (opened, prefill, decode):
        take = decode.receiver.take

        async def take_noting(offer: kv_pb2.OfferRequest) -> kv_pb2.OfferResponse:
            sent.append(offer)
            return await take(offer)

        decode.receiver.take = take_noting  # type: ignore[method-assign]
        assert await answer(opened, prefill, 1) == expected_answer(PROMPT, 4)
    num_pages = sum(len(offer.pages) for offer in sent)
    assert num_pages == 6 and len(computed) == 2 * num_pages * is_on
    assert [len(offer.checksums) for offer in sent] == [len(offer.pages) * is_on for offer in sent]


def flip(worker: PrefillWorker | DecodeWorker, page: int) -> None:
    """Change one bit in the middle of a page."""
    (row,) = worker.pool.load([page])
    row[len(row) // 2] ^= 1
    worker.pool.store([page], [row])


async def test_a_bit_that_flips_after_it_landed_is_found_and_the_pages_are_not_used() -> None:
    """In decode's own pool: not in a buffer of the reader. For bits that flip on their way see test_rank_pairs.py."""
    async with workers("grpc", verify_transfers=True) as (opened, prefill, decode):
        assert await answer(opened, prefill, 1, [5, 6]) == expected_answer([5, 6], 4)
        ticket = await opened.reserve(2, PROMPT)
        reader = decode.peers._known[prefill.peer.address].readers[0]
        read = reader.read

        async def read_and_flip(sources: Sequence[PageRef], into: Sequence[int]) -> None:
            await read(sources, into)
            flip(decode, into[0])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "read", read_and_flip)
            code, detail = await refusal(prefill.run(ticket, PROMPT))
        way = f"changed on its way by grpc from {prefill.peer.address}: checksum "
        assert code is grpc.StatusCode.ABORTED
        assert re.search(CHANGED + way + r"[0-9a-f]{8} offered, [0-9a-f]{8} landed; 1 of \d checksums differ", detail)
        for worker in (prefill, decode):
            refused = worker.metrics.registry.get_sample_value("baton:offers_refused_total", {"reason": "checksum"})
            assert refused == 1
        (session,) = decode.scheduler
        assert session.computed == 0 and not session.is_read
        await opened.abort(2)
        assert await answer(opened, prefill, 3, OTHER) == expected_answer(OTHER, 4)


async def test_a_recycled_page_is_called_recycled_and_not_changed() -> None:
    async with workers("shm", verify_transfers=True) as (opened, prefill, _decode):
        compute = RankedPool.compute_checksums

        async def compute_and_recycle(ours: RankedPool, pages: Sequence[int], places: Any) -> list[int]:
            checksums = await compute(ours, pages, places)
            recycled.extend((page, generation_of(prefill, page)) for page in pages)
            ours.own.generations[pages] += 1
            flip(prefill, pages[0])
            return checksums

        recycled: list[tuple[int, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankedPool, "compute_checksums", compute_and_recycle)
            _code, detail = await refusal(prefill.run(await opened.reserve(1, PROMPT), PROMPT))
        page, generation = recycled[0]
        assert f"refused the offer (generation): page {page} was recycled: offered at generation {generation}" in detail
        await opened.abort(1)


def generation_of(prefill: PrefillWorker, page: int) -> int:
    return int(prefill.pool.generations[page])


async def test_offers_without_the_checksums_that_were_asked_for_are_refused() -> None:
    async with workers("shm", verify_transfers=True) as (opened, prefill, _decode):
        answered = await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=prefill.peer))
        assert answered.wants_checksums
        ticket = await opened.reserve(1, PROMPT)
        ref = kv_pb2.PageRef(page=0, generation=generation_of(prefill, 0))
        for count in (0, 2):
            offer = kv_pb2.OfferRequest(
                ticket=ticket, incarnation=prefill.peer.incarnation, end=4, pages=[ref], checksums=[1] * count
            )
            response = await opened.stub.Offer(offer)
            why = f"{count} checksums offered by {prefill.peer.address}, not 1"
            assert (response.accepted, response.reason, response.detail) == (False, "handshake", why)
        await opened.abort(1)


async def test_a_decode_worker_with_impossible_ranks_gets_no_checksums() -> None:
    async with workers("shm", verify_transfers=True) as (opened, prefill, decode):
        decode.peer.ranks[0].address = "elsewhere:1"
        code, detail = await refusal(prefill.run(await opened.reserve(1, PROMPT), PROMPT))
        assert code is grpc.StatusCode.ABORTED
        assert detail.startswith(f"decode worker {decode.peer.address}: rank 0 is process ")
        await opened.abort(1)
