"""A real prefill worker that changes a byte of an offered page after its checksums were computed.

python -m tests.faults.corrupting_worker FILE prefill FLAGS     # in the next offer once FILE exists; then removes FILE

The byte is right again when the offer is over, as if it had changed on its way.
"""

import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.main import main
from runtime.hardware import wait_without_spinning


def find_last_byte(pool: Any, page: int) -> int:
    """Where the last rank's page ends in the pool's memory file."""
    index = (pool.num_ranks - 1) * pool.num_pages + page
    return int(pool.pages_offset + (index + 1) * pool.page_bytes - 1)


def change(pool: Any, page: int) -> None:
    """Twice is not at all."""
    with mmap.mmap(pool.fd, 0) as memory:
        memory[find_last_byte(pool, page)] ^= 1


def run() -> None:
    file = Path(sys.argv.pop(1))
    wait_without_spinning()
    from prefill_worker import kv_sender  # deferred: it imports torch
    from worker.peers.pools import RankedPool

    send = kv_sender.KVSender.send
    changed: list[tuple[Any, int]] = []

    def change_once(pool: Any, page: int) -> None:
        if file.exists():
            file.unlink()
            change(pool, page)
            changed.append((pool, page))

    compute = RankedPool.compute_checksums

    async def compute_and_change(ours: Any, pages: Sequence[int], places: Any) -> list[int]:
        checksums = await compute(ours, pages, places)
        change_once(ours.own, pages[-1])
        return checksums

    async def send_and_mend(*arguments: Any) -> None:
        try:
            await send(*arguments)
        finally:
            while changed:
                change(*changed.pop())

    RankedPool.compute_checksums = compute_and_change  # type: ignore[assignment, method-assign]
    kv_sender.KVSender.send = send_and_mend  # type: ignore[assignment, method-assign]
    main()


if __name__ == "__main__":
    run()
