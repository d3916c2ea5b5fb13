"""What rank 0 and another rank of its worker say to each other beside the steps: messages over a socket pair.

    rank 0 ── Start ──► child      once, before anything else
    rank 0 ◄── Ready ── child      it has its part of the model and of the pages, and serves them
    rank 0 ── Open, Read, Probe, Close ──► child ── Done ──► rank 0       in any order, each call answered once

The end of the stream is the end of the other process, or means that it shall end.
"""

import asyncio
import socket

import msgspec

from kvtransfer.reader import Transport

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28  # of a process that is our own


class Start(msgspec.Struct, tag=True):
    """What a child is."""

    role: str
    config: bytes  # PrefillConfig or DecodeConfig as JSON
    incarnation: str  # of the worker
    rank: int
    size: int
    rendezvous: str  # a file's path
    ring_fds: list[int]  # inherited, as parse_fds takes them
    pool_fd: int


class Ready(msgspec.Struct, tag=True):
    """How peers reach the rank's pages."""

    rank: bytes  # kv_pb2.Rank


class Open(msgspec.Struct, tag=True):
    """A reader of a peer, called `reader` from now on."""

    call: int
    reader: int
    transport: Transport
    peer: bytes  # kv_pb2.Peer


class Read(msgspec.Struct, tag=True):
    """Pages into the rank's pool."""

    call: int
    reader: int
    pages: list[int]
    generations: list[int]
    into: list[int]


class Probe(msgspec.Struct, tag=True):
    """Pages into nowhere."""

    call: int
    reader: int
    num_pages: int


class Close(msgspec.Struct, tag=True):
    """The reader is not used again."""

    call: int
    reader: int


class Done(msgspec.Struct, tag=True):
    """A call is over: nothing of it goes on."""

    call: int
    reason: str = ""  # of the ReadError; empty when all went well
    detail: str = ""
    is_gone: bool = False  # the reader can do nothing more


Call = Open | Read | Probe | Close
Message = Ready | Call | Done
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Start | Message) -> bytes:
    """With its length before it."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def receive_start(sock: socket.socket) -> Start:
    """The first message, which is there at once. ValueError: it is another, or the other side is gone."""
    size = int.from_bytes(sock.recv(LENGTH_BYTES, socket.MSG_WAITALL), "little")
    return msgspec.msgpack.decode(sock.recv(size, socket.MSG_WAITALL), type=Start)


async def receive(reader: asyncio.StreamReader) -> Message:
    """The next message. asyncio.IncompleteReadError: the other side is gone. ValueError: it says what it may not."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes from another rank")
    message: Message = _decoder.decode(await reader.readexactly(size))
    return message
