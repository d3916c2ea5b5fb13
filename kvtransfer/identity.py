"""Describes a worker to its peers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.layout import PROTOCOL_MAX, PROTOCOL_MIN
from protos import kv_pb2


@dataclass(frozen=True, slots=True)
class GpuFacts:
    uuid: str
    ipc_handle: bytes  # opens the pool's memory; empty if not possible
    readable: tuple[str, ...]  # UUIDs of the GPUs whose memory it can read
    test_checksum: int = 0  # of the bytes behind the pages


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What peers must know about a worker's pages."""

    weights: str  # fingerprint of the model that fills it
    dtype: str
    num_layers: int
    num_kv_heads: int  # over all ranks
    page_tokens: int
    head_dim: int
    num_pages: int
    fd: int | None  # of its memory file, if it has one
    pages_offset: int  # bytes before the first page in that file
    draft_weights: str = ""  # fingerprint of the draft model whose KV is also in the pages


def build_rank(address: str, pid: int, gpu: GpuFacts | None = None, nixl: kv_pb2.Nixl | None = None) -> kv_pb2.Rank:
    """One process of a worker. `address`: of the server of its pages; `gpu`: None if they are in main memory."""
    built = None
    if gpu:
        built = kv_pb2.Gpu(
            uuid=gpu.uuid, ipc_handle=gpu.ipc_handle, readable=gpu.readable, test_checksum=gpu.test_checksum
        )  # fmt: skip
    return kv_pb2.Rank(address=address, pid=pid, gpu=built, nixl=nixl)


def build_peer(
    role: str, address: str, incarnation: str, host_identity: str, facts: PoolFacts, ranks: Sequence[kv_pb2.Rank],
    states: kv_pb2.Peer | None = None,
) -> kv_pb2.Peer:  # fmt: skip
    """The message for handshakes and Status. `ranks`: that of this process first. `states`: the same of its slots."""
    return kv_pb2.Peer(
        role=role,
        address=address,
        incarnation=incarnation,
        pid=ranks[0].pid,
        host=host_identity,
        num_pages=facts.num_pages,
        pool_fd=facts.fd,
        pages_offset=facts.pages_offset,
        layout=kv_pb2.KvLayout(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            weights=facts.weights,
            dtype=facts.dtype,
            num_layers=facts.num_layers,
            num_kv_heads=facts.num_kv_heads,
            page_tokens=facts.page_tokens,
            head_dim=facts.head_dim,
            draft_weights=facts.draft_weights,
        ),
        ranks=ranks,
        states=states,
    )


def states_incarnation(incarnation: str) -> str:
    """The incarnation of a worker's pool of states."""
    return f"{incarnation}/states"
