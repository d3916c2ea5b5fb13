"""Messages between rank 0 and another rank of its worker, beside the steps, over a socket pair.

    rank 0 ── Start ──► child      once, before anything else
    rank 0 ◄── Ready ── child      the child has its part of the model and of the pages, and serves them
    rank 0 ── Open, Read, Probe, Close, Checksum ──► child ── Done ──► rank 0     in any order, one answer per call

The end of the stream means that the other process ended, or asks it to end.
"""

import asyncio
import socket

import msgspec

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28  # generous: the other process is our own


class Start(msgspec.Struct, tag=True):
    """Configures a child."""

    role: str
    config: bytes  # PrefillConfig or DecodeConfig as JSON
    incarnation: str  # of the worker
    rank: int
    size: int
    rendezvous: str  # a file's path
    ring_fds: list[int]  # inherited, in the order of parse_fds
    pool_fds: list[int]  # of pages and of slots


class Ready(msgspec.Struct, tag=True):
    """How peers reach the rank's pages."""

    rank: bytes  # kv_pb2.Rank
    states_rank: bytes  # the same for its slots; empty without


class Open(msgspec.Struct, tag=True):
    """Open a reader of a peer, named `reader` from now on."""

    call: int
    reader: int
    transport: str
    peer: bytes  # kv_pb2.Peer
    is_states: bool  # it reads slots


class Read(msgspec.Struct, tag=True):
    """Read pages into the rank's pool."""

    call: int
    reader: int
    pages: list[int]
    generations: list[int]
    into: list[int]


class Probe(msgspec.Struct, tag=True):
    """Read pages and drop them."""

    call: int
    reader: int
    num_pages: int


class Close(msgspec.Struct, tag=True):
    """The reader is not used again."""

    call: int
    reader: int


class Checksum(msgspec.Struct, tag=True):
    """Compute checksums of bytes of pages in the rank's pool."""

    call: int
    pages: list[int]
    begin: int
    num_bytes: int
    is_states: bool  # of slots in the rank's pool of states


class Done(msgspec.Struct, tag=True):
    """A call is over; the child no longer works on it."""

    call: int
    reason: str = ""  # of the ReadError; empty on success
    detail: str = ""
    is_gone: bool = False  # the reader cannot be used any more
    checksums: list[int] = []


Call = Open | Read | Probe | Close | Checksum
Message = Ready | Call | Done
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Start | Message) -> bytes:
    """The message after its length."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def receive_start(sock: socket.socket) -> Start:
    """The first message, which arrives at once. ValueError if it is another, or the other process is gone."""
    size = int.from_bytes(sock.recv(LENGTH_BYTES, socket.MSG_WAITALL), "little")
    return msgspec.msgpack.decode(sock.recv(size, socket.MSG_WAITALL), type=Start)


async def receive(reader: asyncio.StreamReader) -> Message:
    """The next message. asyncio.IncompleteReadError if the other process is gone, ValueError if it is invalid."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes from another rank")
    message: Message = _decoder.decode(await reader.readexactly(size))
    return message
