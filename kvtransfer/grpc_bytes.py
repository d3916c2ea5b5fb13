"""Transport "grpc": pages as bytes over gRPC, between any two hosts.

The wire format is ReadPagesResponse of kv.proto, but messages with bytes are encoded and decoded by hand: this avoids
protobuf's copies, which halve the bandwidth. Tests compare `encode_data` and `decode` with protobuf.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvtransfer.layout import Run, hosts_of, process_of
from kvtransfer.reader import Local, PageRef, PageStore, ReadError, TransportReader, check_generations
from protos import kv_pb2

SERVICE = "baton.v1.KvPages"
METHOD = f"/{SERVICE}/Read"
CHUNK_BYTES = 2 << 20  # 1-4 MiB measured fastest
LOAD_BYTES = 16 << 20  # pages loaded at once: each copy from a GPU costs a wait, whatever its size
DATA_TAG = b"\x0a"  # field 1, length-delimited
FIRST_WORD = Run(rank=0, source=0, target=0, num_bytes=4)  # of a page, where only its generation is wanted
Received = tuple[list[memoryview], Sequence[int]]  # bytes of all pages as they came; generations


def encode_data(data: memoryview) -> bytes:
    """A ReadPagesResponse with only `data` set."""
    length, varint = len(data), bytearray()
    while length > 127:
        varint.append(length & 127 | 128)
        length >>= 7
    varint.append(length)
    return b"".join((DATA_TAG, varint, data))


def decode(message: bytes) -> memoryview | kv_pb2.ReadPagesResponse:
    """The data of a message as a view, without a copy; the parsed message if it carries generations.

    Raises ReadError("transport") for anything else.
    """
    if not message.startswith(DATA_TAG):
        try:
            return kv_pb2.ReadPagesResponse.FromString(message)
        except DecodeError as error:
            raise ReadError("transport", f"malformed message of {len(message)} bytes: {error}") from error
    length = shift = 0
    for at in range(1, min(len(message), 11)):
        length |= (message[at] & 127) << shift
        shift += 7
        if message[at] < 128:
            if at + 1 + length != len(message):
                break
            return memoryview(message)[at + 1 :]
    raise ReadError("transport", f"malformed page data: {len(message)} bytes announce {length}")


def cut_pages(parts: Sequence[memoryview], page_bytes: int) -> list[NDArray[np.uint8]]:
    """Cut consecutive pages out of `parts`: views of one part, or copies of pages that span several."""
    pages: list[NDArray[np.uint8]] = []
    begun: list[memoryview] = []  # pieces of the next page
    missing = page_bytes  # of that page
    for part in parts:
        while part:
            piece, part = part[:missing], part[missing:]
            begun.append(piece)
            missing -= len(piece)
            if not missing:
                pages.append(np.frombuffer(begun[0] if len(begun) == 1 else b"".join(begun), np.uint8))
                begun, missing = [], page_bytes
    return pages


def is_unreachable(channel: grpc.aio.Channel) -> bool:
    """Whether the peer's address does not answer; a peer that returns shakes hands again.

    A channel that lost its peer stays idle until used: this call makes it reconnect, so the next call knows.
    """
    return channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.TRANSIENT_FAILURE


class PageServer:
    """Serves this worker's pages, and its slots, to grpc readers."""

    def __init__(self, stores: Mapping[str, PageStore]) -> None:
        """stores: incarnation |-> what it names."""
        self._stores = stores

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register KvPages with raw bytes as the response type."""
        handler: grpc.RpcMethodHandler[kv_pb2.ReadPagesRequest, bytes] = grpc.unary_stream_rpc_method_handler(
            self._read, request_deserializer=kv_pb2.ReadPagesRequest.FromString, response_serializer=None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Read": handler}),))

    async def _read(
        self, request: kv_pb2.ReadPagesRequest, context: grpc.aio.ServicerContext[kv_pb2.ReadPagesRequest, bytes]
    ) -> AsyncIterator[bytes]:
        store = self._stores.get(process_of(request.incarnation))
        if store is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {request.incarnation} was asked for; this worker is {next(iter(self._stores))}",
            )
        begin, end, problem = request.begin, request.begin + request.num_bytes, None
        if (page := max(request.pages, default=0)) >= store.num_pages:
            problem = f"page {page} is outside the pool of {store.num_pages} pages"
        elif not begin < end <= store.page_bytes:
            problem = f"bytes {begin} to {end} of a page of {store.page_bytes} bytes were asked for"
        if problem is not None:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, problem)
        pages_per_load = max(1, LOAD_BYTES // request.num_bytes)
        for first in range(0, len(request.pages), pages_per_load):
            pages = list(request.pages[first : first + pages_per_load])
            rows = await asyncio.to_thread(store.load, pages, begin, request.num_bytes)
            view = memoryview(rows.reshape(-1).data)
            for start in range(0, len(view), CHUNK_BYTES):
                yield encode_data(view[start : start + CHUNK_BYTES])
        generations = [int(store.generations[page]) for page in request.pages]
        yield kv_pb2.ReadPagesResponse(generations=generations).SerializeToString()


class GrpcReader(TransportReader):
    """Reads a peer's pages through the KvPages services of its ranks. Every worker has them."""

    name, why = "grpc", ""

    @staticmethod
    def advertise(local: Local) -> bytes | None:
        return b""

    @staticmethod
    def find_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
        return None

    def __init__(self, local: Local, peer: kv_pb2.Peer) -> None:
        super().__init__(local, peer)
        self._executor = None
        self._timeout_s = local.timeout_s
        self._is_spread = len(hosts_of(peer)) > 1  # only rank 0 knows the generations
        read = {run.rank for run in self._runs} | ({0} if self._is_spread else set())
        addresses = sorted({peer.ranks[rank].address for rank in read})
        self._channels = {address: local.open_channel(address) for address in addresses}

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        self._check_bounds(sources)
        pages = [source.page for source in sources]
        received = await self._receive_all(pages)
        found = [generations for _parts, generations in received]
        if self._is_spread:  # after the bytes of all ranks: rank 0 raises a generation before any rank writes
            found = [(await self._receive(pages, FIRST_WORD))[1]]
        for generations in found:
            check_generations(sources, generations)

        def store() -> None:
            for run, (parts, _generations) in zip(self._runs, received, strict=True):
                self._store.store(into, cut_pages(parts, run.num_bytes), run.target)

        await self._copy(store)

    async def probe(self, num_pages: int) -> None:
        await self._receive_all(range(num_pages))

    async def _receive_all(self, pages: Sequence[int]) -> list[Received]:
        """Receive all runs. When this returns or raises, no receive is running."""
        receiving = [asyncio.ensure_future(self._receive(pages, run)) for run in self._runs]
        try:
            return [await one for one in receiving]
        finally:
            for one in receiving:
                one.cancel()
            await asyncio.wait(receiving)

    async def _receive(self, pages: Sequence[int], run: Run) -> Received:
        address = self._peer.ranks[run.rank].address
        try:
            return await self._collect(pages, run, self._channels[address])
        except grpc.aio.AioRpcError as error:
            raise ReadError("transport", f"{address}: {error.code().name}: {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc cancels the calls of a closed channel; our task itself was not cancelled
            raise ReadError("transport", f"{address}: the connection was closed during the read") from None

    async def _collect(self, pages: Sequence[int], run: Run, channel: grpc.aio.Channel) -> Received:
        wanted, page_bytes = len(pages), run.num_bytes
        request = kv_pb2.ReadPagesRequest(
            incarnation=self._peer.incarnation, pages=pages, begin=run.source, num_bytes=page_bytes
        )
        call: grpc.aio.UnaryStreamMultiCallable[kv_pb2.ReadPagesRequest, bytes] = channel.unary_stream(
            METHOD, request_serializer=kv_pb2.ReadPagesRequest.SerializeToString, response_deserializer=None
        )
        parts: list[memoryview] = []
        received = 0
        async for message in call(request, timeout=self._timeout_s):
            part = decode(message)
            if isinstance(part, kv_pb2.ReadPagesResponse):
                if received != wanted * page_bytes:
                    raise ReadError("transport", f"{received // page_bytes} of {wanted} pages arrived before the end")
                if len(part.generations) != wanted:
                    raise ReadError("transport", f"{len(part.generations)} generations of {wanted} pages arrived")
                return parts, list(part.generations)
            parts.append(part)
            received += len(part)
            if received > wanted * page_bytes:
                raise ReadError("transport", f"more bytes than {wanted} pages arrived")
        raise ReadError("transport", f"the stream ended after {received // page_bytes} of {wanted} pages")

    def is_gone(self) -> bool:
        return any(is_unreachable(channel) for channel in self._channels.values())

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
