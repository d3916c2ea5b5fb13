"""Promises of the readers of all transports, then details of shared memory and gRPC."""

import asyncio
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kv.pool import Pool
from kvtransfer import grpc_bytes, shm
from kvtransfer.checksums import compute_checksums
from kvtransfer.grpc_bytes import METHOD, SERVICE, GrpcReader, PageServer, decode, encode_data
from kvtransfer.layout import plan_runs
from kvtransfer.reader import PageRef, Reader, ReadError
from kvtransfer.shm import ShmReader
from kvtransfer.transports import open_reader as open_by_name
from protos import kv_pb2
from runtime.rpc import bind, build_server, open_channel
from tests.support.combinations import examples
from tests.support.fake_cuda import FakeGpu
from tests.support.fake_workers import PATIENCE_S
from tests.support.pool_process import (
    COMMAND,
    PARTS,
    WHOLE_BYTES,
    Exporter,
    build_local,
    build_pool,
    build_ranks,
    describe,
    find_share,
    find_share_of_page,
    page_content,
    recycle,
    recycle_ranks,
)

NUM_REMOTE, NUM_LOCAL = 9, 7
OWNER_WORDS = {"cuda_ipc": ("fake-gpu",), "shm": (), "nixl:cma": ("transport=nixl",)}  # arguments of that process


class Owner:
    """Owner of the pages, local or not; the contents of a page follow from its generation."""

    def __init__(self, message: kv_pb2.Peer, recycle_page: Callable[[int], None]) -> None:
        self.peer = message
        self.generations = [0] * NUM_REMOTE
        self._recycle_page = recycle_page
        for page in range(NUM_REMOTE):
            self.recycle(page)

    def recycle(self, page: int) -> None:
        self._recycle_page(page)
        self.generations[page] += 1

    def ref(self, page: int) -> PageRef:
        return PageRef(page, self.generations[page])


def build_filled() -> Pool:
    local = build_pool(NUM_LOCAL)
    for page in range(NUM_LOCAL):
        local.store([page], [np.full(local.page_bytes, 255 - page, np.uint8)])
    return local


def build_remote_pool() -> Pool:
    pool = build_pool(NUM_REMOTE)
    for page in range(NUM_REMOTE):
        recycle(pool, page)
    return pool


@asynccontextmanager
async def serving(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """A real server; returns its address."""
    server = build_server()
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    add(server)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def pages_of(pool: Pool) -> Callable[[grpc.aio.Server], None]:
    return PageServer({"exporter": pool}).add_to


@asynccontextmanager
async def grpc_reader(remote: Pool, local: Pool, add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[GrpcReader]:
    """Reads what `add` serves at the address of a peer with the pool `remote`."""
    async with serving(add) as address:
        reader = GrpcReader(build_local(local, "reader"), describe(build_local(remote), address))
        try:
            yield reader
        finally:
            await reader.close()


@asynccontextmanager
async def open_owner(transport: str, num_ranks: int) -> AsyncIterator[Owner]:
    async with AsyncExitStack() as stack:
        if transport == "grpc":
            pools = build_ranks(NUM_REMOTE, num_ranks)
            addresses = [await stack.enter_async_context(serving(pages_of(pool))) for pool in pools]
            message = kv_pb2.Peer(
                incarnation="exporter", num_pages=NUM_REMOTE, ranks=[kv_pb2.Rank(address=one) for one in addresses]
            )
            yield Owner(message, partial(recycle_ranks, pools))
        else:
            words = [*COMMAND, *OWNER_WORDS[transport], f"ranks={num_ranks}"]
            exporter = stack.enter_context(Exporter(words, NUM_REMOTE))
            yield Owner(exporter.peer, exporter.recycle)


@asynccontextmanager
async def open_reader(transport: str, theirs: kv_pb2.Peer, local: Pool) -> AsyncIterator[Reader]:
    ours = build_local(local, "reader")
    reader = await open_by_name(ours, transport.partition(":")[0], theirs)
    assert reader.transport == transport
    try:
        yield reader
    finally:
        await reader.close()
        ours.close()


@pytest.mark.parametrize(
    ("transport", "their_size", "our_sizes"),
    [("cuda_ipc", 2, [1, 4]), ("nixl:cma", 4, [2]), ("shm", 2, [1, 4]), ("grpc", 4, [2])],
)
async def test_ranks_read_their_heads_of_the_pages_asked_for_and_touch_no_other(
    transport: str, their_size: int, our_sizes: list[int]
) -> None:
    async with open_owner(transport, their_size) as owner:
        for our_size in our_sizes:
            await read_by_ranks(transport, owner, our_size)


async def read_by_ranks(transport: str, owner: Owner, our_size: int) -> None:
    dice = random.Random(our_size)
    pools = build_ranks(NUM_LOCAL, our_size, FakeGpu() if transport == "cuda_ipc" else None)
    expected = [np.full((NUM_LOCAL, pool.page_bytes), 255, np.uint8) for pool in pools]
    for pool, rows in zip(pools, expected, strict=True):
        pool.store(range(NUM_LOCAL), list(rows))
    async with AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(open_reader(transport, owner.peer, pool)) for pool in pools]
        for outside in (NUM_REMOTE, 2**31):
            with pytest.raises(ReadError, match=f"page {outside} is outside the peer's pool of {NUM_REMOTE}") as error:
                await readers[0].read([owner.ref(0), PageRef(outside, 1)], [0, 1])
            assert error.value.reason == "bounds" and (pools[0].load(range(NUM_LOCAL)) == 255).all()
        for _ in range(6):
            for page in dice.sample(range(NUM_REMOTE), dice.randint(0, 2)):
                owner.recycle(page)
            sources, targets = (dice.sample(range(many), dice.randint(0, 5)) for many in (NUM_REMOTE, NUM_LOCAL))
            both = list(zip(sources, targets, strict=False))
            refs, into = [owner.ref(source) for source, _ in both], [target for _, target in both]
            for reader in readers:  # one after the other: Triton's interpreter is not thread-safe
                await reader.read(refs, into)
            for pool, rows in zip(pools, expected, strict=True):
                for source, target in both:
                    rows[target] = find_share_of_page(source, owner.generations[source], pool)
                assert np.array_equal(pool.load(range(NUM_LOCAL)), rows), "only the read pages changed"
                check_sums(pool, refs, into, len(owner.peer.ranks))
        stale, was = [owner.ref(page) for page in (2, 4, 6)], owner.generations[4]
        owner.recycle(4)
        for reader, pool, rows in zip(readers, pools, expected, strict=True):
            with pytest.raises(ReadError, match=f"page 4 was recycled: offered at generation {was}, now") as error:
                await reader.read(stale, [0, 2, 4])
            await reader.probe(NUM_REMOTE)
            assert error.value.reason == "generation"
            assert np.array_equal(pool.load([1, 3, 5, 6]), rows[[1, 3, 5, 6]])


def check_sums(pool: Pool, refs: Sequence[PageRef], into: Sequence[int], their_size: int) -> None:
    """Checksums of what landed are those of the owner's ranks, computed here from what these wrote."""
    for run in plan_runs(PARTS, pool.rank, pool.num_ranks, their_size):
        pages = [page_content(ref.page, ref.generation, WHOLE_BYTES) for ref in refs]
        theirs = [find_share(PARTS, page, run.rank, their_size).astype(np.uint8) for page in pages]
        sent = [zlib.crc32(page[run.source : run.source + run.num_bytes].tobytes()) for page in theirs]
        assert compute_checksums(pool, into, run.target, run.num_bytes) == sent


def watched(on_store: Callable[[Sequence[int]], None]) -> Pool:
    """A pool that keeps nothing and calls `on_store` with the pages."""
    pool = build_pool(NUM_LOCAL)

    def store(pages: Sequence[int], rows: Sequence[NDArray[np.uint8]], begin: int = 0) -> None:
        assert len(pages) == len(rows) and begin == 0
        on_store(pages)

    pool.store = store  # type: ignore[method-assign]
    return pool


async def test_generations_are_read_after_the_copy_and_on_another_thread() -> None:
    seen, pool = list[tuple[str, int]](), build_remote_pool()

    class Generations:
        def __getitem__(self, page: int) -> int:
            seen.append(("generation", threading.get_ident()))
            return 1

    store = watched(lambda pages: seen.append(("copy", threading.get_ident())))
    reader = ShmReader(build_local(store, "reader"), describe(build_local(pool)))
    reader._generations = Generations()  # type: ignore[assignment]
    await reader.read([PageRef(0, 1), PageRef(1, 1)], [3, 4])
    await reader.close()
    (_, copied_on), (_, read_on) = seen[0], seen[-1]
    assert [what for what, _ in seen] == ["copy", "generation", "generation"]
    assert copied_on != read_on == threading.get_ident()


async def test_a_long_read_is_shared_by_two_threads_and_ends_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SHARED_BYTES", 1)
    failed, copied = threading.Event(), list[Sequence[int]]()

    def on_store(pages: Sequence[int]) -> None:
        if 3 in pages:
            failed.set()
            raise ValueError("broken")
        assert failed.wait(60)
        copied.append(pages)

    reader = ShmReader(build_local(watched(on_store), "reader"), describe(build_local(build_remote_pool())))
    with pytest.raises(ValueError, match="broken"):
        await reader.read([PageRef(0, 1), PageRef(1, 1)], [3, 4])
    assert copied == [[4]]
    await reader.close()


@settings(max_examples=examples(60))
@given(st.binary(min_size=1, max_size=100) | st.integers(1, 70_000).map(lambda count: bytes([count % 256]) * count))
def test_hand_written_messages_are_protobufs(data: bytes) -> None:
    message = kv_pb2.ReadPagesResponse(data=data).SerializeToString()
    assert encode_data(memoryview(data)) == message
    view = decode(message)
    assert isinstance(view, memoryview) and bytes(view) == data


@settings(max_examples=examples(300))
@given(st.binary(max_size=30) | st.binary(max_size=30).map(lambda tail: b"\x0a" + tail))
def test_any_bytes_are_either_a_message_or_a_read_error(message: bytes) -> None:
    try:
        part = decode(message)
    except ReadError as error:
        assert error.reason == "transport"
        return
    if isinstance(part, memoryview):
        assert kv_pb2.ReadPagesResponse.FromString(message).data == bytes(part)


def script(answer: Callable[[], AsyncIterator[bytes]]) -> Callable[[grpc.aio.Server], None]:
    """A peer that answers every Read with these messages."""

    async def read(request: kv_pb2.ReadPagesRequest, context: object) -> AsyncIterator[bytes]:
        async for message in answer():
            yield message

    handler: grpc.RpcMethodHandler[kv_pb2.ReadPagesRequest, bytes] = grpc.unary_stream_rpc_method_handler(
        cast(Any, read), request_deserializer=kv_pb2.ReadPagesRequest.FromString, response_serializer=None
    )
    services = (grpc.method_handlers_generic_handler(SERVICE, {"Read": handler}),)
    return lambda server: server.add_generic_rpc_handlers(services)


@pytest.mark.parametrize("chunk_bytes", [1, 700, 1 << 20])
async def test_pages_and_chunks_need_not_end_together(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_bytes, "CHUNK_BYTES", chunk_bytes)
    local, pool = build_filled(), build_remote_pool()
    async with grpc_reader(pool, local, pages_of(pool)) as reader:
        await reader.read([PageRef(page, 1) for page in (8, 0, 3)], [1, 5, 2])
    assert np.array_equal(local.load([1, 5, 2]), pool.load([8, 0, 3]))


BYTES = encode_data(memoryview(bytes(512)))
GENERATION = kv_pb2.ReadPagesResponse(generations=[1]).SerializeToString()


@pytest.mark.parametrize(
    ("messages", "detail"),
    [
        ([], "the stream ended after 0 of 1 pages"),
        ([BYTES], "the stream ended after 1 of 1 pages"),
        ([GENERATION], "0 of 1 pages arrived before the end"),
        ([encode_data(memoryview(bytes(511))), GENERATION], "0 of 1 pages arrived before the end"),
        ([encode_data(memoryview(bytes(513))), GENERATION], "more bytes than 1 pages arrived"),
        ([BYTES[:-1], GENERATION], "malformed page data"),
        ([b"\x0a" + b"\xff" * 12, GENERATION], "malformed page data"),
        ([b"no protobuf at all"], "malformed"),
        ([BYTES, kv_pb2.ReadPagesResponse(generations=[1, 1]).SerializeToString()], "2 generations of 1 pages"),
        ([BYTES, b""], "0 generations of 1 pages"),
    ],
)
async def test_a_peer_that_talks_nonsense_is_a_read_error(messages: list[bytes], detail: str) -> None:
    async def answer() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    local = build_filled()
    others = local.load(range(1, NUM_LOCAL))
    async with grpc_reader(build_pool(NUM_REMOTE), local, script(answer)) as reader:
        with pytest.raises(ReadError, match=detail) as error:
            await reader.read([PageRef(0, 1)], [0])
        assert error.value.reason == "transport"
    assert np.array_equal(local.load(range(1, NUM_LOCAL)), others)


async def test_the_server_refuses_another_incarnation_and_what_is_outside_its_pool() -> None:
    async def ask(incarnation: str = "exporter", page: int = 8, begin: int = 0, num_bytes: int = 512) -> bytes:
        request = kv_pb2.ReadPagesRequest(incarnation=incarnation, pages=[page, 0], begin=begin, num_bytes=num_bytes)
        return b"".join([answer.data async for answer in call(request, timeout=PATIENCE_S)])

    pool, end = build_remote_pool(), 2**64 - 1
    refused: list[tuple[dict[str, Any], str]] = [
        ({"incarnation": "P2"}, "incarnation P2 was asked for; this worker is exporter"),
        *(({"page": page}, f"page {page} is outside the pool of {NUM_REMOTE} pages") for page in (9, 2**32 - 1)),
        *(
            ({"begin": begin, "num_bytes": count}, f"bytes {begin} to {begin + count} of a page of 512 bytes were")
            for begin, count in ((0, 0), (100, 0), (0, 513), (1, 512), (512, 1), (end, 1), (0, end), (end, end))
        ),
    ]
    async with serving(pages_of(pool)) as address, open_channel(address) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[kv_pb2.ReadPagesRequest, kv_pb2.ReadPagesResponse]
        call = channel.unary_stream(
            METHOD, kv_pb2.ReadPagesRequest.SerializeToString, kv_pb2.ReadPagesResponse.FromString
        )
        for wanted, detail in refused:
            with pytest.raises(grpc.aio.AioRpcError, match=detail) as error:
                await ask(**wanted)
            is_other = "incarnation" in wanted
            code = grpc.StatusCode.FAILED_PRECONDITION if is_other else grpc.StatusCode.OUT_OF_RANGE
            assert error.value.code() is code
        assert await ask(begin=100, num_bytes=412) == pool.load([8, 0])[:, 100:].tobytes()


async def test_one_rank_that_is_gone_fails_the_whole_read() -> None:
    (local,) = build_ranks(NUM_LOCAL, 1)
    before = local.load(range(NUM_LOCAL))
    alive, dead = build_ranks(NUM_REMOTE, 2)
    async with serving(pages_of(alive)) as address:
        async with serving(pages_of(dead)) as gone:
            ranks = [kv_pb2.Rank(address=one) for one in (address, gone)]
            theirs = kv_pb2.Peer(incarnation="exporter", num_pages=NUM_REMOTE, ranks=ranks)
            reader = GrpcReader(build_local(local, "reader"), theirs)
            await reader.read([PageRef(0, 0)], [0])
        with pytest.raises(ReadError, match=rf"{gone}: UNAVAILABLE") as error:
            await reader.read([PageRef(0, 0)], [1])
        assert error.value.reason == "transport"
        while not reader.is_gone():  # noqa: ASYNC110, no event for it
            await asyncio.sleep(0.005)
        await reader.close()
    assert np.array_equal(local.load(range(1, NUM_LOCAL)), before[1:])


async def test_of_ranks_on_several_hosts_rank_0_knows_the_generations_and_is_asked_last() -> None:
    (local,), (first, other) = build_ranks(NUM_LOCAL, 1), build_ranks(NUM_REMOTE, 2, is_spread=True)
    assert first.fd is None and other.fd is None
    first.generations[3] = 7
    for pool in (first, other):
        pool.store([3], [find_share_of_page(3, 7, pool)])
    load = other.load

    def load_late(pages: Sequence[int], begin: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
        """When rank 0 has answered, the page gets a new owner."""
        first.generations[3] = 8
        return load(pages, begin, num_bytes)

    async with serving(pages_of(first)) as here, serving(pages_of(other)) as there:
        ranks = [kv_pb2.Rank(address=here, host="a"), kv_pb2.Rank(address=there, host="b")]
        theirs = kv_pb2.Peer(address=here, incarnation="exporter", num_pages=NUM_REMOTE, ranks=ranks)
        reader = GrpcReader(build_local(local, "reader"), theirs)
        await reader.read([PageRef(3, 7)], [1])
        assert np.array_equal(local.load([1])[0], find_share_of_page(3, 7, local))
        other.load = load_late  # type: ignore[method-assign]
        with pytest.raises(ReadError, match="page 3 was recycled: offered at generation 7, now 8"):
            await reader.read([PageRef(3, 7)], [2])
        await reader.close()


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_a_read_that_hangs_can_be_ended(end: str) -> None:
    has_begun, local = asyncio.Event(), build_filled()

    async def answer() -> AsyncIterator[bytes]:
        yield encode_data(memoryview(bytes(100)))
        has_begun.set()
        await asyncio.Event().wait()

    before = local.load(range(NUM_LOCAL))
    async with grpc_reader(build_pool(NUM_REMOTE), local, script(answer)) as reader:
        reading = asyncio.create_task(reader.read([PageRef(0, 1)], [0]))
        await asyncio.wait_for(has_begun.wait(), PATIENCE_S)
        if end == "cancel":
            reading.cancel()
        else:
            await reader.close()
        done, _ = await asyncio.wait([reading], timeout=PATIENCE_S)
        assert done and reading.cancelled() == (end == "cancel")
        assert reading.cancelled() or isinstance(reading.exception(), ReadError)
    assert np.array_equal(local.load(range(NUM_LOCAL)), before)
