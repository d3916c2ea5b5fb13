"""Checks that two pools have the same kind of pages, and plans which bytes each rank reads from which. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from protos import kv_pb2
from wire.kv_layout import PagePart, can_divide, head_bytes_of, heads_of, layers_of, stage_of

# 1: layers outermost in a page. 2: heads outermost (wire/kv_layout.py), which no other field shows. 3: ranks.
# 4: Rank.transports. 5: Ticket.adapter, without which a prompt's KV would be the base model's. 7: stages.
PROTOCOL_MIN = 7
PROTOCOL_MAX = 7
MAX_RANKS = 1024  # of a peer

_VERSION_FIELDS = ("protocol_min", "protocol_max")


def process_of(incarnation: str) -> str:
    """The name under which a worker's pools are read: the incarnation without + and the number of its new weights."""
    return incarnation.partition("+")[0]


class Run(NamedTuple):
    """Bytes of each page that one of our ranks reads from one rank of a peer."""

    rank: int  # the peer's
    source: int  # first byte in its page
    target: int  # first byte in ours
    num_bytes: int


def build_layout(
    *, weights: str, dtype: str, num_layers: int, num_kv_heads: int, page_tokens: int, head_dim: int,
    draft_weights: str = "", computed: str = "",
) -> kv_pb2.KvLayout:  # fmt: skip
    """Layout of a pool here; see kv.proto. num_kv_heads: over all ranks. `computed`: the model's dtype, if another."""
    dtype = dtype if computed in ("", dtype) else f"{dtype} of {computed}"
    return kv_pb2.KvLayout(
        protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, weights=weights, dtype=dtype, num_layers=num_layers,
        num_kv_heads=num_kv_heads, page_tokens=page_tokens, head_dim=head_dim, draft_weights=draft_weights,
    )  # fmt: skip


def find_mismatch(ours: kv_pb2.KvLayout, theirs: kv_pb2.KvLayout) -> str | None:
    """The first difference that rules out a transfer, naming both values; None if pages may be exchanged."""
    if ours.protocol_min > theirs.protocol_max or theirs.protocol_min > ours.protocol_max:
        return (
            f"protocol versions do not overlap: {ours.protocol_min}-{ours.protocol_max} here, "
            f"{theirs.protocol_min}-{theirs.protocol_max} there"
        )
    for field in kv_pb2.KvLayout.DESCRIPTOR.fields:
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in _VERSION_FIELDS and here != there:
            return f"{field.name} differs: {here!r} here, {there!r} there"
    return None


def hosts_of(peer: kv_pb2.Peer) -> set[str]:
    """Where its ranks are, see Peer.host."""
    return {rank.host or peer.host for rank in peer.ranks}


def find_bad_states(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
    """Why the slots of `theirs` do not fit ours; None if they do, or if both have none."""
    if ours.HasField("states") != theirs.HasField("states"):
        return f"recurrent state differs: {ours.HasField('states')} here, {theirs.HasField('states')} there"
    if not ours.HasField("states"):
        return None
    states, expected = theirs.states, (theirs.pid, theirs.address, theirs.host, len(theirs.ranks))
    if (states.pid, states.address, states.host, len(states.ranks)) != expected:
        return "its recurrent state is of another process"
    return find_mismatch(ours.states.layout, states.layout)


def find_bad_ranks(parts: Sequence[PagePart], peer: kv_pb2.Peer) -> str | None:
    """Why a peer with such pages cannot have these ranks; None if it can."""
    num_ranks = len(peer.ranks)
    if not 0 < num_ranks <= MAX_RANKS:
        return f"{num_ranks} ranks: a worker has 1 to {MAX_RANKS}"
    stages = stages_of(peer)
    if num_ranks % stages or stages > min((part.num_layers for part in parts), default=1):
        return f"{num_ranks} ranks cannot be {stages} stages of its layers"
    undivided = [part.num_heads for part in parts if not can_divide(part.num_heads, num_ranks // stages)]
    if undivided:
        return f"{num_ranks // stages} ranks cannot share {undivided[0]} KV heads"
    first = peer.ranks[0]
    if (first.address, first.pid) != (peer.address, peer.pid):
        whole = f"the worker {peer.pid} at {peer.address[:64]!r}"
        return f"rank 0 is process {first.pid} at {first.address[:64]!r}, {whole}"
    return None


def stages_of(peer: kv_pb2.Peer) -> int:
    """How many stages its ranks are divided into."""
    return max(peer.stages, 1)


def plan_runs(
    parts: Sequence[PagePart], rank: int, size: int, their_size: int, stages: int = 1, their_stages: int = 1
) -> list[Run]:
    """Where rank `rank` of `size` finds its page in the pages of `their_size` ranks.

    With equal stages one or two runs per peer rank: two if the draft model's part is not adjacent on both sides. Else
    one per head and peer's stage that has some of its layers. If several ranks have a head, our ranks take turns.
    """
    runs: list[Run] = []
    tp, their_tp, stage = size // stages, their_size // their_stages, stage_of(rank, size, stages)
    sources = [0] * their_size  # where the part begins in each rank's page
    target = 0
    for part in parts:
        ours, theirs = head_bytes_of(part, stages), head_bytes_of(part, their_stages)
        pieces = [(stage, 0, 0, ours)]
        if stages != their_stages:
            pieces = _find_pieces(part, stage, stages, their_stages)
        for head in heads_of(part.num_heads, rank % tp, tp):
            peer, head_there = _find_head(part, head, rank % tp, their_tp)
            for their_stage, source, begin, num_bytes in pieces:
                one = (their_stages - 1 - their_stage) * their_tp + peer
                _append(runs, Run(one, sources[one] + head_there * theirs + source, target + begin, num_bytes))
            target += ours
        for one in range(their_size):
            sources[one] += len(heads_of(part.num_heads, one % their_tp, their_tp)) * theirs
    return runs


def plan_all_runs(
    parts: Sequence[PagePart], size: int, their_size: int, stages: int = 1, their_stages: int = 1
) -> list[tuple[int, Run]]:
    """The runs of all `size` ranks of a reader, each with its rank: rank by rank, in the order of `plan_runs`."""
    return [
        (rank, run) for rank in range(size) for run in plan_runs(parts, rank, size, their_size, stages, their_stages)
    ]


def _find_pieces(part: PagePart, stage: int, stages: int, their_stages: int) -> list[tuple[int, int, int, int]]:
    """(their stage, first byte in a head there, in a head here, bytes) of the layers that both stages have."""
    layer_bytes, own, pieces = part.head_bytes // part.num_layers, layers_of(part.num_layers, stage, stages), []
    for other in range(their_stages):
        there = layers_of(part.num_layers, other, their_stages)
        first, end = max(own.start, there.start), min(own.stop, there.stop)
        if first < end:
            begins = (first - there.start) * layer_bytes, (first - own.start) * layer_bytes
            pieces.append((other, *begins, (end - first) * layer_bytes))
    return pieces


def _find_head(part: PagePart, head: int, rank: int, their_size: int) -> tuple[int, int]:
    """The rank of a peer's stage to read a head from, and the head's index on that rank."""
    num_copies = max(their_size // part.num_heads, 1)
    first = head * their_size // part.num_heads
    peer = first + rank % num_copies
    return peer, head - heads_of(part.num_heads, peer, their_size).start


def _append(runs: list[Run], run: Run) -> None:
    """Extend the last run if this one follows it on both sides."""
    last = runs[-1] if runs else None
    if last is not None and (last.rank, last.source + last.num_bytes, last.target + last.num_bytes) == run[:3]:
        runs[-1] = last._replace(num_bytes=last.num_bytes + run.num_bytes)
    else:
        runs.append(run)
