"""The table of transports, and the choice among them."""

import os

from kvtransfer.cuda_ipc import CudaIpcReader
from kvtransfer.grpc_bytes import GrpcReader
from kvtransfer.nixl import NixlReader
from kvtransfer.reader import Local, Reader, TransportReader
from kvtransfer.shm import ShmReader
from protos import kv_pb2

# fastest first; the last is always possible
TRANSPORTS: tuple[type[TransportReader], ...] = (CudaIpcReader, ShmReader, NixlReader, GrpcReader)


def describe_rank(local: Local, address: str, host: str = "") -> kv_pb2.Rank:
    """How peers reach this process's pool. `address`: of the server of its pages. `host`: see Rank.host."""
    entries = {one.name: one.advertise(local) for one in TRANSPORTS}
    taken = {name: entry for name, entry in entries.items() if entry is not None}
    return kv_pb2.Rank(address=address, pid=os.getpid(), transports=taken, host=host)


async def open_reader(local: Local, transport: str, peer: kv_pb2.Peer) -> Reader:
    """Raises ReadError if the peer cannot be read with this transport."""
    (found,) = [one for one in TRANSPORTS if one.name == transport]
    return await found.open(local, peer)


def choose_transport(ours: kv_pb2.Peer, theirs: kv_pb2.Peer, wanted: str, is_required: bool) -> tuple[str, str]:
    """The fastest transport for reading `theirs` from `ours` that `wanted` (or "auto") allows, and the reason. Pure.

    If `wanted` is not possible, the result is that of auto, or ValueError if `is_required`. Raises ReadError if the
    peer's description is malformed.
    """
    last = TRANSPORTS[-1].name
    if wanted == last:
        return last, f"requested by --transport {last}"
    obstacles = {one.name: one.find_obstacle(ours, theirs) for one in TRANSPORTS}
    fastest = next(one for one in TRANSPORTS if obstacles[one.name] is None)
    obstacle = None if wanted == "auto" else obstacles[wanted]
    if obstacle is not None and is_required:
        raise ValueError(
            f"{wanted} is not possible with {theirs.address}: {obstacle}; "
            f"drop --require-transport to use {fastest.name}"
        )
    if obstacle is not None:
        return fastest.name, obstacle
    if wanted not in ("auto", fastest.name):
        return wanted, f"requested by --transport {wanted}"
    return fastest.name, fastest.why or _explain_last(theirs, obstacles)


def _explain_last(theirs: kv_pb2.Peer, obstacles: dict[str, str | None]) -> str:
    """The obstacle to the fastest transport that the peer takes part in."""
    taken = [name for name in obstacles if theirs.ranks and name in theirs.ranks[0].transports]
    return obstacles[taken[0] if taken else ShmReader.name] or ""
