"""Calls of rank 0 of a worker to the others, whose answers become one. ranks/ has a process for each."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from engine.out_of_memory import end_process
from kvtransfer.reader import Reader
from protos import kv_pb2
from wire.page_keys import NamedPage

Verb = Literal["read", "take", "drop"]


class OtherRanks:
    """The ranks of a worker beside this process's: there are none."""

    def lead(self, weights: Sequence[str]) -> None:
        """Warm-up is over: from now on they follow this process's steps. `weights`: its fingerprints, also theirs."""

    async def connect(self, timeout_s: float) -> list[list[kv_pb2.Rank]]:
        """Wait until all serve their pages and slots; returns how peers reach them. `timeout_s`: of a read.

        Raises ValueError if one has other weights.
        """
        return []

    async def join(self, own: Reader, transport: str, peer: kv_pb2.Peer, is_states: bool) -> Reader:
        """One reader for this process's, `own`, and theirs. Raises ReadError."""
        return own

    async def compute_checksums(
        self, rank: int, pages: Sequence[int], begin: int, num_bytes: int, is_states: bool
    ) -> list[int]:
        """See kvtransfer/checksums.py; of the pool of `rank`. Raises ReadError with the driver's message."""
        raise NotImplementedError

    async def save(self, entries: Sequence[NamedPage], is_states: bool) -> None:
        """Each saves its part. Raises ReadError."""

    def restore(
        self, keys: Sequence[bytes], into: Sequence[int], is_states: bool
    ) -> list[Coroutine[Any, Any, list[bool]]]:
        """PageTiers.load of each. They raise ReadError."""
        return []

    def load_adapter(self, key: str, folder: str, digest: str) -> list[Coroutine[Any, Any, None]]:
        """Each reads its part of an adapter. They raise ValueError."""
        return []

    def set_weights(self, verb: Verb, folder: str = "", weights: str = "") -> list[Coroutine[Any, Any, None]]:
        """Each reads its part of other weights, and takes or drops what it read. They raise ValueError."""
        return []

    def end_process(self) -> None:
        """End this one for a failed step: the worker begins anew with all its ranks."""
        end_process()

    async def close(self) -> None:
        """End them."""


ALONE = OtherRanks()


async def run_all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait until all have ended, whatever their result; raises the failure of the first that failed."""
    failure = find_failure(await asyncio.gather(*work, return_exceptions=True))
    if failure is not None:
        raise failure


def find_failure(results: Sequence[BaseException | None]) -> BaseException | None:
    """Combine the ranks' results: the first failure fails all. Pure."""
    return next((result for result in results if result is not None), None)
