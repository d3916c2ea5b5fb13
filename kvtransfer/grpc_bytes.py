"""Pages as bytes over gRPC: works between any two hosts.

The wire format is ReadPagesResponse of kv.proto, but a message that carries bytes is written and read by hand: that
saves protobuf's copies, which halve the bandwidth. `encode_data` and `decode` are tested against protobuf itself.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvtransfer.copying import copy_in_thread
from kvtransfer.reader import PageRef, PageStore, ReadError, Transport, check_bounds, check_generations
from protos import kv_pb2

METHOD = "/baton.v1.KvPages/Read"
CHUNK_BYTES = 2 << 20  # 1-4 MiB measured fastest
LOAD_BYTES = 16 << 20  # pages loaded at once: from a GPU a copy costs a wait, however small it is
DATA_TAG = b"\x0a"  # field 1, length-delimited


def encode_data(data: memoryview) -> bytes:
    """A ReadPagesResponse with only `data` set."""
    length, varint = len(data), bytearray()
    while length > 127:
        varint.append(length & 127 | 128)
        length >>= 7
    varint.append(length)
    return b"".join((DATA_TAG, varint, data))


def decode(message: bytes) -> memoryview | kv_pb2.ReadPagesResponse:
    """The data of a message as a view without a copy; the parsed message when it carries generations.

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
    """The pages that lie one after the other in `parts`: views of one part, copies of pages that are in several."""
    pages: list[NDArray[np.uint8]] = []
    begun: list[memoryview] = []  # pieces of the next page
    missing = page_bytes  # of it
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
    """Nothing answers at the peer's address; a peer that is back there shakes hands again.

    A channel that lost its peer rests until it is used: asking makes it look, and the next question is answered.
    """
    return channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.TRANSIENT_FAILURE


class PageServer:
    """Serves this worker's pages to grpc readers."""

    def __init__(self, store: PageStore, incarnation: str) -> None:
        self._store = store
        self._incarnation = incarnation

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register KvPages with raw bytes as the response type."""
        handler: grpc.RpcMethodHandler[kv_pb2.ReadPagesRequest, bytes] = grpc.unary_stream_rpc_method_handler(
            self._read,
            request_deserializer=kv_pb2.ReadPagesRequest.FromString,
            response_serializer=None,
        )
        service = METHOD.split("/")[1]
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Read": handler}),))

    async def _read(
        self, request: kv_pb2.ReadPagesRequest, context: grpc.aio.ServicerContext[kv_pb2.ReadPagesRequest, bytes]
    ) -> AsyncIterator[bytes]:
        if request.incarnation != self._incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {request.incarnation} was asked for; this worker is {self._incarnation}",
            )
        beyond = [page for page in request.pages if page >= self._store.num_pages]
        if beyond:
            await context.abort(
                grpc.StatusCode.OUT_OF_RANGE, f"page {beyond[0]} is outside the pool of {self._store.num_pages} pages"
            )
        pages_per_load = max(1, LOAD_BYTES // self._store.page_bytes)
        for first in range(0, len(request.pages), pages_per_load):
            pages = list(request.pages[first : first + pages_per_load])
            rows = await asyncio.to_thread(self._store.load, pages)
            view = memoryview(rows.reshape(-1).data)
            for start in range(0, len(view), CHUNK_BYTES):
                yield encode_data(view[start : start + CHUNK_BYTES])
        generations = [int(self._store.generations[page]) for page in request.pages]
        yield kv_pb2.ReadPagesResponse(generations=generations).SerializeToString()


class GrpcReader:
    """Reads a peer's pages through its KvPages service."""

    transport: Transport = "grpc"

    def __init__(self, peer: kv_pb2.Peer, store: PageStore, channel: grpc.aio.Channel, timeout_s: float) -> None:
        """Owns `channel`. `timeout_s` bounds each read."""
        self._peer = peer
        self._store = store
        self._channel = channel
        self._timeout_s = timeout_s
        self._call: grpc.aio.UnaryStreamMultiCallable[kv_pb2.ReadPagesRequest, bytes] = channel.unary_stream(
            METHOD, request_serializer=kv_pb2.ReadPagesRequest.SerializeToString, response_deserializer=None
        )

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        check_bounds(sources, self._peer.num_pages)
        parts, generations = await self._receive([source.page for source in sources])
        check_generations(sources, generations)
        page_bytes = self._store.page_bytes
        await copy_in_thread(None, lambda: self._store.store(into, cut_pages(parts, page_bytes)))

    async def probe(self, num_pages: int) -> None:
        await self._receive(range(num_pages))

    async def _receive(self, pages: Sequence[int]) -> tuple[list[memoryview], Sequence[int]]:
        """The bytes of all pages as they came, and the generations that follow them. Copies nothing."""
        request = kv_pb2.ReadPagesRequest(incarnation=self._peer.incarnation, pages=pages)
        try:
            return await self._collect(request)
        except grpc.aio.AioRpcError as error:
            raise ReadError("transport", f"{self._peer.address}: {error.code().name}: {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # grpc cancels the calls of a channel that is closed; nobody cancelled us
            raise ReadError("transport", f"{self._peer.address}: the connection was closed during the read") from None

    async def _collect(self, request: kv_pb2.ReadPagesRequest) -> tuple[list[memoryview], Sequence[int]]:
        wanted, page_bytes = len(request.pages), self._store.page_bytes
        parts: list[memoryview] = []
        received = 0
        async for message in self._call(request, timeout=self._timeout_s):
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
        return is_unreachable(self._channel)

    async def close(self) -> None:
        await self._channel.close()
