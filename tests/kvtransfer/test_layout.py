"""Which peers may exchange pages, by which transport, and which bytes each rank reads."""

from collections.abc import Sequence
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.cuda_ipc import GpuMemory
from kvtransfer.layout import build_layout, find_bad_ranks, find_mismatch, plan_runs
from kvtransfer.reader import ReadError
from kvtransfer.transports import TRANSPORTS, choose_transport
from protos import kv_pb2
from runtime.config_parts import Transport
from tests.support.pool_process import find_share
from wire.kv_layout import PagePart, page_bytes_of


def peer(num_ranks: int = 1) -> kv_pb2.Peer:
    layout = build_layout(weights="weights-1", dtype="float32", num_layers=2, num_kv_heads=1, page_tokens=4, head_dim=8)
    return kv_pb2.Peer(address="p:1", pid=1, layout=layout, ranks=[kv_pb2.Rank(address="p:1", pid=1)] * num_ranks)


@pytest.mark.parametrize(
    "name", [field.name for field in kv_pb2.KvLayout.DESCRIPTOR.fields if not field.name.startswith("protocol_")]
)
def test_a_mismatch_names_the_field_and_both_values(name: str) -> None:
    ours, theirs = peer().layout, peer().layout
    assert find_mismatch(ours, theirs) is None
    here = getattr(ours, name)
    there = here + 1 if isinstance(here, int) else f"other {here}"
    setattr(theirs, name, there)
    assert find_mismatch(ours, theirs) == f"{name} differs: {here!r} here, {there!r} there"


def test_kv_of_fp8_is_of_the_dtype_that_computed_it() -> None:
    shape = {"weights": "w", "num_layers": 2, "num_kv_heads": 1, "page_tokens": 4, "head_dim": 8}
    ours, theirs, usual = (
        build_layout(dtype=dtype, computed=computed, **shape)  # type: ignore[arg-type]
        for dtype, computed in (("float8_e4m3fn", "bfloat16"), ("float8_e4m3fn", "float16"), ("bfloat16", "bfloat16"))
    )
    assert find_mismatch(ours, ours) is None and usual.dtype == "bfloat16"
    told = "dtype differs: 'float8_e4m3fn of bfloat16' here, 'float8_e4m3fn of float16' there"
    assert find_mismatch(ours, theirs) == told


@pytest.mark.parametrize(
    ("ours", "theirs", "may"),
    [((1, 1), (1, 1), True), ((1, 3), (3, 5), True), ((1, 2), (3, 5), False), ((4, 4), (1, 3), False)],
)
def test_protocol_ranges_must_overlap(ours: tuple[int, int], theirs: tuple[int, int], may: bool) -> None:
    here, there = (kv_pb2.KvLayout(protocol_min=low, protocol_max=high) for low, high in (ours, theirs))
    expected = f"{ours[0]}-{ours[1]} here, {theirs[0]}-{theirs[1]} there"
    assert find_mismatch(here, there) == (None if may else f"protocol versions do not overlap: {expected}")
    assert (peer().layout.protocol_min, peer().layout.protocol_max) == (7, 7), (
        "fields have other numbers in an older one"
    )


def build(
    pid: int, uuid: str | None = None, *, host: str = "near", handle: bytes = bytes(64), fd: int | None = 5,
    nixl: bool = False, rank_host: str = "",
) -> kv_pb2.Peer:  # fmt: skip
    """`uuid`: its pool's GPU, which can read itself and the GPU `near`. All have NIXL; `nixl`: and let it read."""
    entries = {"nixl": b"open" if nixl else b"", "grpc": b""}
    if uuid is not None:
        entries["cuda_ipc"] = GpuMemory(uuid, (uuid, "near"), handle).pack()
    elif fd is not None:
        entries["shm"] = b""
    rank = kv_pb2.Rank(address="p:1", pid=pid, transports=entries, host=rank_host)
    return kv_pb2.Peer(address="p:1", pid=pid, host=host, pool_fd=fd, ranks=[rank])


def together(first: kv_pb2.Peer, second: kv_pb2.Peer) -> kv_pb2.Peer:
    """The first one, with the ranks of both."""
    first.ranks.extend(second.ranks)
    return first


NO_FILE, NO_HOST = "the peer's pool is not shared memory", "the workers share no host and PID namespace"
NO_GPU, NO_HANDLE = "this worker's pool is not on a GPU", "no handle of its GPU memory"
NO_NIXL, NO_ACCESS = "the peer's pool is not open to NIXL", "has no peer access to the peer's"
GOOD = build(2, "near")
CHOICES: list[tuple[kv_pb2.Peer, kv_pb2.Peer, str, str, str | None]] = [  # ..., auto's choice, the obstacle
    (build(1), build(2), "shm", "shm", None),
    (build(1), build(2, host="far"), "shm", "grpc", NO_HOST),
    (build(1), together(build(2, rank_host="near"), build(4, rank_host="far")), "shm", "grpc", NO_HOST),
    (together(build(1), build(3, rank_host="far")), build(2), "shm", "grpc", NO_HOST),
    (together(build(1, "a"), build(3, "a", rank_host="far")), build(2, "near"), "cuda_ipc", "grpc", NO_HOST),
    (build(1), build(2, fd=None), "shm", "grpc", NO_FILE),
    (build(1, "a"), GOOD, "shm", "cuda_ipc", NO_FILE),
    (build(1), build(2, host="far", nixl=True), "nixl", "nixl", None),
    (build(1), build(2, nixl=True), "nixl", "shm", None),
    (build(1), build(2, nixl=True, fd=None), "nixl", "nixl", None),
    (build(1), build(2, host="far"), "nixl", "grpc", NO_NIXL),
    (build(1, "a"), GOOD, "cuda_ipc", "cuda_ipc", None),
    (build(1, "near"), GOOD, "cuda_ipc", "cuda_ipc", None),
    (build(1), GOOD, "cuda_ipc", "grpc", NO_GPU),
    (build(1, "a"), build(2), "cuda_ipc", "shm", "the peer's pool is not on a GPU"),
    (build(1, "a"), build(2, "near", host="far"), "cuda_ipc", "grpc", "share no host and PID namespace"),
    (build(2, "a"), GOOD, "cuda_ipc", "grpc", "one process, which cannot open its own handles"),
    (build(1, "a"), build(2, "near", handle=b""), "cuda_ipc", "grpc", NO_HANDLE),
    (build(1, "a"), build(2, "near", fd=None), "cuda_ipc", "grpc", NO_HANDLE),
    (build(1, "a"), build(2, "far"), "cuda_ipc", "grpc", f"GPU a {NO_ACCESS} far"),
    (together(build(1, "a"), build(3, "b")), together(GOOD, build(4, "near")), "cuda_ipc", "cuda_ipc", None),
    (build(1, "a"), together(build(2, "near"), build(4, "far")), "cuda_ipc", "grpc", f"GPU a {NO_ACCESS} far"),
    (together(build(1, "far"), build(3, "b")), build(2, "far"), "cuda_ipc", "grpc", f"GPU b {NO_ACCESS}"),
    (build(1, "a"), together(build(2, "near"), build(4, "near", handle=b"")), "cuda_ipc", "grpc", NO_HANDLE),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs", "wanted", "by_itself", "obstacle"), CHOICES)
def test_the_choice_of_transport_names_what_stands_in_the_way(
    ours: kv_pb2.Peer, theirs: kv_pb2.Peer, wanted: str, by_itself: str, obstacle: str | None
) -> None:  # fmt: skip
    used, why = choose_transport(ours, theirs, wanted, False)
    assert used == (by_itself if obstacle else wanted)
    assert (obstacle or ("the peer's " if wanted == by_itself else "requested")) in why
    if obstacle is None:
        assert choose_transport(ours, theirs, wanted, True) == (used, why)
    else:
        with pytest.raises(ValueError, match=f"^{wanted} is not possible with p:1: .*{obstacle}.* to use {by_itself}$"):
            choose_transport(ours, theirs, wanted, True)
    chosen, why = choose_transport(ours, theirs, "auto", True)
    assert chosen == by_itself and choose_transport(ours, theirs, "grpc", True)[0] == "grpc"


def test_a_worker_without_nixl_says_so() -> None:
    ours, theirs, why = build(1), build(2, host="far", nixl=True), "NIXL is not installed"
    del ours.ranks[0].transports["nixl"]
    assert choose_transport(ours, theirs, "auto", False)[0] == "grpc"
    with pytest.raises(ValueError, match=f"^nixl is not possible with p:1: {why}: .* to use grpc$"):
        choose_transport(ours, theirs, "nixl", True)


def test_every_transport_can_be_wanted_and_a_malformed_entry_is_refused() -> None:
    assert get_args(Transport) == ("auto", *(one.name for one in TRANSPORTS))
    for entry in (b"no msgpack", msgspec.msgpack.encode(["a list"]), msgspec.msgpack.encode({"uuid": "a"})):
        theirs = build(2, "near")
        theirs.ranks[0].transports["cuda_ipc"] = entry
        with pytest.raises(ReadError, match="the peer's entry for cuda_ipc is malformed") as error:
            choose_transport(build(1, "a"), theirs, "auto", False)
        assert error.value.reason == "layout"


PAGE_PARTS = st.lists(st.builds(PagePart, st.integers(1, 8), st.integers(1, 5), st.just(1)), min_size=1, max_size=2)


def can_share(parts: Sequence[PagePart], size: int) -> bool:
    return all(max(size, part.num_heads) % min(size, part.num_heads) == 0 for part in parts)


@given(PAGE_PARTS, st.integers(1, 40))
def test_ranks_that_cannot_share_the_heads_are_named_with_them(parts: list[PagePart], size: int) -> None:
    why = find_bad_ranks(parts, peer(size))
    assert (why is None) == can_share(parts, size)
    assert why is None or why in {f"{size} ranks cannot share {part.num_heads} KV heads" for part in parts}


def test_a_worker_has_1_to_1024_ranks_the_first_of_which_is_itself() -> None:
    one_head = [PagePart(1, 512)]
    assert find_bad_ranks(one_head, peer(1)) is find_bad_ranks(one_head, peer(1024)) is None
    for size in (0, 1025):
        theirs = peer(max(size, 1))
        del theirs.ranks[size:]
        assert find_bad_ranks(one_head, theirs) == f"{size} ranks: a worker has 1 to 1024"
    for name, value in (("pid", 2), ("address", "p:2")):
        theirs = peer(2)
        setattr(theirs.ranks[0], name, value)
        assert "rank 0 is process" in str(find_bad_ranks(one_head, theirs))


def test_ranks_are_divided_among_stages_that_have_a_layer_each() -> None:
    parts = [PagePart(2, 512, 2)]
    for size, stages, why in ((2, 2, None), (4, 2, None), (3, 2, "cannot be 2"), (3, 3, "be 3"), (6, 2, "share 2 KV")):
        theirs = peer(size)
        theirs.stages = stages
        found = find_bad_ranks(parts, theirs)
        assert found is why is None or (why is not None and why in str(found)), (size, stages)


@given(st.data())
def test_ranks_find_their_heads_and_layers_whatever_the_stages_of_both_sides(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 7))
    part = PagePart(data.draw(st.sampled_from([1, 2, 4])), 3 * layers, layers)
    stages, theirs = data.draw(st.tuples(*[st.integers(1, layers)] * 2))
    tp, their_tp = data.draw(st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2))
    size, their_size = stages * tp, theirs * their_tp
    whole = np.arange(1, 1 + part.num_heads * part.head_bytes)
    pages = [find_share([part], whole, rank, their_size, theirs) for rank in range(their_size)]
    assert {len(page) for page in pages} == {page_bytes_of([part], 0, their_size, theirs)}
    for rank in range(size):
        expected = find_share([part], whole, rank, size, stages)
        found = np.zeros_like(expected)
        for run in plan_runs([part], rank, size, their_size, stages, theirs):
            found[run.target : run.target + run.num_bytes] = pages[run.rank][run.source : run.source + run.num_bytes]
        assert np.array_equal(found, expected)
        if stages == theirs:
            assert len(plan_runs([part], rank, size, their_size, stages, theirs)) <= max(their_tp // tp, 1)
