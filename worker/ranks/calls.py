"""Calls from rank 0 to each other rank's process beside its steps, and the answers (runtime/child.py)."""

import msgspec

from wire.page_keys import NamedPage
from worker.peers.other_ranks import Verb


class Start(msgspec.Struct, tag=True):
    """Configures a child; the answer is `Ready`."""

    role: str
    config: bytes  # PrefillConfig or DecodeConfig as JSON; for another host without what is its own (OWN_SETTINGS)
    incarnation: str  # of the worker
    rank: int
    rendezvous: str  # a file's path; of several hosts the address of rank 0's store
    address: str  # of its host, by which the others reach it; empty: all are on one
    pool_fds: tuple[int, int]  # of pages and of slots; see `Place`


class OpenReader(msgspec.Struct, tag=True):
    reader: int  # its number in later calls
    transport: str
    peer: bytes  # kv_pb2.Peer
    is_states: bool  # it reads slots


class ReadPages(msgspec.Struct, tag=True):
    reader: int
    pages: list[int]
    generations: list[int]
    into: list[int]  # pages of the rank's pool


class ProbePages(msgspec.Struct, tag=True):
    """Read pages and drop them."""

    reader: int
    num_pages: int


class CloseReader(msgspec.Struct, tag=True):
    reader: int


class ComputeChecksums(msgspec.Struct, tag=True):
    """Checksums of bytes of pages, or slots, in the rank's pool."""

    pages: list[int]
    begin: int
    num_bytes: int
    is_states: bool


class SavePages(msgspec.Struct, tag=True):
    """The rank's part of pages, or slots, to its files."""

    entries: list[NamedPage]
    is_states: bool


class RestorePages(msgspec.Struct, tag=True):
    """Files into pages, or slots, of the rank's pool."""

    keys: list[bytes]
    into: list[int]
    is_states: bool


class LoadAdapter(msgspec.Struct, tag=True):
    """The rank's part of an adapter, under a key; the links say when to drop it (DropAdapter in leader.py)."""

    key: str
    folder: str
    digest: str


class SetWeights(msgspec.Struct, tag=True):
    """See `OtherRanks.set_weights`."""

    verb: Verb
    folder: str
    weights: str


class Ready(msgspec.Struct, tag=True):
    """The child has its part of the model and of the pages."""

    ranks: list[bytes]  # kv_pb2.Rank: how peers reach its pages, and its slots if it has any
    weights: list[str]  # see OtherRanks.lead


class Done(msgspec.Struct, tag=True):
    """A call is over; the child no longer works on it."""

    reason: str = ""  # of the ReadError, or "adapter"; empty on success
    detail: str = ""
    is_gone: bool = False  # the reader cannot be used any more
    checksums: list[int] = []
    drafts: list[bool] = []  # of the pages restored


ReaderCall = OpenReader | ReadPages | ProbePages | CloseReader
Call = Start | ReaderCall | ComputeChecksums | SavePages | RestorePages | LoadAdapter | SetWeights
