"""Checksums of pages over ranks of any number on both sides: in pools that are arrays, without transfers."""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer import checksums
from kvtransfer.checksums import check_checksums, compute_checksums, parts_of
from kvtransfer.layout import plan_all_runs
from kvtransfer.reader import PageStore, ReadError
from protos import kv_pb2
from tests.kvtransfer.test_layout import PAGE_PARTS, can_share
from tests.support.combinations import examples
from tests.support.pool_process import find_share
from wire.kv_layout import PagePart

PAGES, PAGE_TOKENS = [4, 0, 2], 16


@dataclass
class Pages:
    """The part of a PageStore that checksums use."""

    rows: NDArray[np.uint8]  # [pages, page_bytes]

    def load(self, pages: Sequence[int], begin: int, num_bytes: int) -> NDArray[np.uint8]:
        assert len(pages) == 1 or len(pages) * num_bytes <= checksums.LOAD_BYTES
        return self.rows[pages, begin : begin + num_bytes]


def split(parts: Sequence[PagePart], whole: NDArray[np.uint8], size: int) -> list[NDArray[np.uint8]]:
    """Each rank's share of whole pages, [pages, its bytes]."""
    return [np.stack([find_share(parts, page, rank, size) for page in whole]).astype(np.uint8) for rank in range(size)]


def sum_all(ranks: Sequence[NDArray[np.uint8]], places: Sequence[tuple[int, int, int]]) -> list[int]:
    """The checksums of PAGES at each place: (rank, begin, num_bytes)."""
    stores = [cast(PageStore, Pages(rows)) for rows in ranks]
    with patch.object(checksums, "LOAD_BYTES", 16):  # some pages at a time
        return [one for rank, *bytes_ in places for one in compute_checksums(stores[rank], PAGES, *bytes_)]


@settings(max_examples=examples(100))
@given(PAGE_PARTS, st.data())
def test_every_byte_is_checked_whatever_the_numbers_of_ranks(parts: list[PagePart], data: st.DataObject) -> None:
    sizes = st.sampled_from([size for size in (1, 2, 4, 8) if can_share(parts, size)])
    size, their_size = data.draw(sizes), data.draw(sizes)
    dice = random.Random(data.draw(st.integers(0, 99)))
    num_bytes = sum(part.num_heads * part.head_bytes for part in parts)
    whole = np.frombuffer(dice.randbytes(5 * num_bytes), np.uint8).reshape(5, -1)
    theirs, ours = split(parts, whole, their_size), split(parts, whole, size)
    runs = plan_all_runs(parts, size, their_size)
    offer = kv_pb2.OfferRequest(begin=32, end=32 + 2 * PAGE_TOKENS + 3, pages=[kv_pb2.PageRef(page=p) for p in PAGES])
    offer.checksums.extend(sum_all(theirs, [(run.rank, run.source, run.num_bytes) for _rank, run in runs]))
    here = [(rank, run.target, run.num_bytes) for rank, run in runs]
    check_checksums(offer, parts_of(offer)[0], PAGE_TOKENS, runs, sum_all(ours, here), "x")
    rank, index = dice.randrange(size), dice.randrange(len(PAGES))
    byte = dice.randrange(ours[rank].shape[1])
    ours[rank][PAGES[index], byte] ^= 1 << dice.randrange(8)
    with pytest.raises(ReadError) as error:
        check_checksums(offer, parts_of(offer)[0], PAGE_TOKENS, runs, sum_all(ours, here), "shm from p:1")
    last = [47, 63, 66][index]
    found = re.fullmatch(
        rf"page {PAGES[index]} \(positions {32 + 16 * index} to {last}; bytes (\d+) to (\d+) of rank (\d+), read by "
        rf"rank {rank}\) changed on its way by shm from p:1: checksum (\w{{8}}) offered, (\w{{8}}) landed; 1 of \d+ "
        r"checksums differ",
        error.value.detail,
    )
    assert found is not None and error.value.reason == "checksum"
    first, stop, their_rank = int(found[1]), int(found[2]) + 1, int(found[3])
    (run,) = [run for one, run in runs if one == rank and run.target <= byte < run.target + run.num_bytes]
    assert (run.rank, run.source, run.source + run.num_bytes) == (their_rank, first, stop)
    assert int(found[4], 16) == zlib.crc32(theirs[their_rank][PAGES[index], first:stop].tobytes())
