"""Checksums of pages: computed from a pool, and compared with those of an offer. Knows no ranks' processes.

CRC-32 notices every change confined to 32 consecutive bits, and misses others once in 2^32. Of the standard library's
checks it is the fastest (docs/BENCHMARKS.md#hand-off); NumPy's sums are faster, and miss pairs of flipped sign bits.
"""

import zlib
from collections.abc import Callable, Sequence

from kvtransfer.layout import Run
from kvtransfer.reader import PageStore, ReadError
from protos import kv_pb2

LOAD_BYTES = 2 << 20  # pages loaded at once: they stay in a core's cache; twice as fast as 16 MiB (measured on a CPU)


def compute_checksums(store: PageStore, pages: Sequence[int], begin: int, num_bytes: int) -> list[int]:
    """CRC-32 of `num_bytes` of each page from byte `begin` on. Takes milliseconds: call it on a thread.

    The caller holds the pages, or ignores the result if it does not hold them any more.
    """
    pages_per_load = max(1, LOAD_BYTES // num_bytes)
    return [
        zlib.crc32(row)
        for first in range(0, len(pages), pages_per_load)
        for row in store.load(pages[first : first + pages_per_load], begin, num_bytes)
    ]


def check_checksums(
    offer: kv_pb2.OfferRequest, page_tokens: int, runs: Sequence[tuple[int, Run]], landed: Sequence[int], way: str
) -> None:
    """Raise ReadError if pages have other checksums here than in the offer. Pure.

    `runs`: of all our ranks; `landed`: a checksum per run and page, as in the offer; `way`: transport and peer.
    """

    def describe(index: int) -> str:
        begin = offer.begin + index * page_tokens
        return f"page {offer.pages[index].page} (positions {begin} to {min(begin + page_tokens, offer.end) - 1}"

    _compare(offer.checksums, landed, runs, len(offer.pages), describe, way)


def check_slot_checksums(
    offer: kv_pb2.OfferRequest, runs: Sequence[tuple[int, Run]], landed: Sequence[int], way: str
) -> None:
    """The same for slots of state."""

    def describe(index: int) -> str:
        return f"slot {offer.slots[index].page} (state after {offer.end if not index else 'the last whole page'}"

    _compare(offer.slot_checksums, landed, runs, len(offer.slots), describe, way)


def _compare(
    offered: Sequence[int], landed: Sequence[int], runs: Sequence[tuple[int, Run]], num_pages: int,
    describe: Callable[[int], str], way: str,
) -> None:  # fmt: skip
    changed = [at for at, pair in enumerate(zip(offered, landed, strict=True)) if pair[0] != pair[1]]
    if not changed:
        return
    number, index = divmod(changed[0], num_pages)
    rank, run = runs[number]
    raise ReadError(
        "checksum",
        f"{describe(index)}; bytes {run.source} to {run.source + run.num_bytes - 1} of rank {run.rank}, read by rank "
        f"{rank}) changed on its way by {way}: checksum {offered[changed[0]]:08x} offered, {landed[changed[0]]:08x} "
        f"landed; {len(changed)} of {len(landed)} checksums differ",
    )
