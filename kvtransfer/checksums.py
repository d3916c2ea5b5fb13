"""Checksums of pages and slots: computed from a pool, and compared with those of an offer.

CRC-32 notices every change confined to 32 consecutive bits, and misses others once in 2^32. Of the standard library's
checks it is the fastest (docs/BENCHMARKS.md#hand-off); NumPy's sums are faster, and miss pairs of flipped sign bits.
"""

import zlib
from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

from kvtransfer.layout import Run
from kvtransfer.reader import PageStore, ReadError
from protos import kv_pb2

LOAD_BYTES = 2 << 20  # pages loaded at once: they stay in a core's cache; twice as fast as 16 MiB (measured on a CPU)


class OfferPart(NamedTuple):
    """An offer's pages, or its slots."""

    name: str
    refs: MutableSequence[kv_pb2.PageRef]
    checksums: MutableSequence[int]  # for each run (plan_all_runs), one per page


def parts_of(offer: kv_pb2.OfferRequest) -> tuple[OfferPart, OfferPart]:
    """Views of the offer, which change it."""
    return OfferPart("page", offer.pages, offer.checksums), OfferPart("slot", offer.slots, offer.slot_checksums)


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
    offer: kv_pb2.OfferRequest, part: OfferPart, page_tokens: int, runs: Sequence[tuple[int, Run]],
    landed: Sequence[int], way: str,
) -> None:  # fmt: skip
    """Raise ReadError if a part's pages have other checksums here than in the offer. Pure.

    `runs`: of all our ranks; `landed`: a checksum per run and page, as in the offer; `way`: transport and peer.
    """
    changed = [at for at, pair in enumerate(zip(part.checksums, landed, strict=True)) if pair[0] != pair[1]]
    if not changed:
        return
    number, index = divmod(changed[0], len(part.refs))
    rank, run = runs[number]
    if part.name == "page":
        begin = offer.begin + index * page_tokens
        held = f"positions {begin} to {min(begin + page_tokens, offer.end) - 1}"
    else:
        held = f"state after {offer.end if not index else 'the last whole page'}"
    raise ReadError(
        "checksum",
        f"{part.name} {part.refs[index].page} ({held}; bytes {run.source} to {run.source + run.num_bytes - 1} of rank "
        f"{run.rank}, read by rank {rank}) changed on its way by {way}: checksum {part.checksums[changed[0]]:08x} "
        f"offered, {landed[changed[0]]:08x} landed; {len(changed)} of {len(landed)} checksums differ",
    )
