"""Rank 0's side of its worker's other ranks: starts them, has them read pages, and ends with any of them.

A worker is one incarnation: if a rank ends, this process ends at once, and its supervisor restarts it. Steps go through
`links.py`; the calls here, beside the steps, through `runtime/child.py`. Ranks on other hosts are started there
(host_process.py) and reached by the connections of meeting.py.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import structlog

from engine.kv.memory import create_file
from engine.out_of_memory import end_process
from engine.rank_group import LOOPBACK, TCP, Store, open_store
from kvtransfer.reader import PageRef, Reader, ReadError
from protos import kv_pb2
from runtime.addresses import bracketed
from runtime.child import ChildServer, describe_exit, pack
from runtime.config import DecodeConfig, PrefillConfig
from wire.page_keys import NamedPage
from worker.peers.other_ranks import OtherRanks, Verb, run_all
from worker.ranks.calls import (
    Call,
    CloseReader,
    ComputeChecksums,
    Done,
    LoadAdapter,
    OpenReader,
    ProbePages,
    ReadPages,
    Ready,
    RestorePages,
    SavePages,
    SetWeights,
    Start,
)
from worker.ranks.leader import Leader
from worker.ranks.links import StepSender, open_links
from worker.ranks.meeting import OWN_SETTINGS, Ended, HostMessage, Meeting, Serving, find_interface
from worker.ranks.reader import RanksReader
from worker.ranks.remote import RemoteRank
from worker.startup.build import RANKS_S

log = structlog.get_logger()

NAMED_S = 2.0  # until the end of another rank is known and said; of a host see `name_within`
MARGIN_S = 10.0  # to answer, beyond the time that a read may take


Child = ChildServer[Ready | Done] | RemoteRank[Ready | Done]


def name_within(config: PrefillConfig | DecodeConfig) -> float:
    """Seconds after which all connections to a lost host have shown it, once one has (meeting.py: watch)."""
    return max(NAMED_S, config.stall_s / 4)


class RankChildren(OtherRanks):
    """Owns the processes of ranks 1 and up, and what they share with this one.

    Create it on the main thread: the children die with the thread that creates them.
    """

    def __init__(self, role: str, config: PrefillConfig | DecodeConfig, incarnation: str) -> None:
        """Starts them; they begin to load their parts of the model. Waits for other hosts.

        Raises ValueError if ranks cannot share memory, or a host does not come.
        """
        self._guests = Meeting(role, config).gather() if config.num_hosts > 1 else []
        try:
            ours, theirs = open_links(config.ranks_here - 1)
            address, meeting = self._open_meeting(config.num_ranks)
        except (OSError, AttributeError) as error:  # a sandbox or limit forbids it, or this is not Linux
            needed = "a network" if self._guests else "shared memory files"
            advice = "see the error" if self._guests else "allow memfd_create, or set --tp 1 and --pp 1"
            raise ValueError(f"{config.num_ranks} ranks need {needed}: {error}; {advice}") from error
        self.is_closing = False  # failures after this are expected
        far = [
            (host, guest, 1 + 2 * number)
            for host, guest in enumerate(self._guests, start=1)
            for number in range(config.ranks_here)
        ]
        steps = [*ours, *(guest.links[calls + 1] for _host, guest, calls in far)]
        self.leader = Leader(StepSender(steps), lambda: self.is_closing, self.end_process)
        self._named_s = name_within(config) if self._guests else NAMED_S
        self._timeout_s = 0.0
        self._weights: list[str] = []
        self._reader_numbers = itertools.count()
        self._children: list[Child] = []
        settings = asdict(config)
        build = partial(Start, role, incarnation=incarnation, rendezvous=meeting, pool_fds=self.pool_fds)
        for rank, end in enumerate(theirs, start=1):
            with end:  # the child alone has it then
                start = build(msgspec.json.encode(settings), rank=rank, address=address)
                fds = (end.fileno(), *(fd for fd in self.pool_fds if fd >= 0))
                self._add(rank, ChildServer("worker.ranks.main", start, Ready | Done, fds))
        shared = msgspec.json.encode({name: value for name, value in settings.items() if name not in OWN_SETTINGS})
        for rank, (host, guest, calls) in enumerate(far, start=config.ranks_here):
            start = build(shared, rank=rank, address=guest.address)
            self._add(rank, RemoteRank(guest.links[calls], start, Ready | Done, f"host {host} at {guest.address}"))

    def _open_meeting(self, num_ranks: int) -> tuple[str, str]:
        """This host's address for others, empty if there are none, and where ranks meet. Raises OSError."""
        self.rendezvous: str | Store
        if not self._guests:
            file, self.interface = os.memfd_create("baton-meeting", os.MFD_CLOEXEC), LOOPBACK
            self.pool_fds = create_file(), create_file()
            self.rendezvous = f"/proc/{os.getpid()}/fd/{file}"  # disappears with this process, however it ends
            return "", self.rendezvous
        address = self._guests[0].our_address
        self.pool_fds, self.interface = (-1, -1), find_interface(address)
        self.rendezvous = store = open_store(address, num_ranks, RANKS_S)
        return address, f"{TCP}{bracketed(address)}:{store.port}"

    def _add(self, rank: int, child: Child) -> None:
        child.ended.add_done_callback(partial(self._on_end, rank, child))
        self._children.append(child)

    def _on_end(self, rank: int, child: Child, ended: Future[int]) -> None:
        """On a thread of its own: while this process loads, there is no event loop."""
        if not self.is_closing:
            reason = child.trouble or f"ended with {describe_exit(ended.result())}"
            log.error("a rank ended; its worker ends with it", rank=rank, status=ended.result(), reason=reason)
            end_process()

    def end_process(self) -> None:
        """For a failed step. If a rank's end made it fail, `_on_end` names that rank, and ends this process, first."""
        time.sleep(self._named_s)
        end_process()

    @property
    def _ranks(self) -> range:
        return range(1, len(self._children) + 1)

    def lead(self, weights: Sequence[str]) -> None:
        self._weights = list(weights)
        self.leader.is_leading = True

    async def connect(self, timeout_s: float) -> list[list[kv_pb2.Rank]]:
        self._timeout_s = timeout_s + MARGIN_S
        ranks: list[list[kv_pb2.Rank]] = []
        for number, child in enumerate(self._children, start=1):
            ready = await child.wait_ready(RANKS_S)
            assert isinstance(ready, Ready)
            if ready.weights != self._weights:
                raise ValueError(
                    f"rank {number} has other weights than rank 0, {ready.weights} and {self._weights}: give all hosts "
                    "the same --model and --draft-model"
                )
            ranks.append([kv_pb2.Rank.FromString(rank) for rank in ready.ranks])
        self._tell_hosts(Serving())
        return ranks

    def _tell_hosts(self, message: HostMessage) -> None:
        for guest in self._guests:
            with suppress(OSError):  # its ranks say that it is gone
                guest.links[0].sendall(pack(message))

    async def ask(self, rank: int, call: Call, timeout_s: float | None = None) -> Done:
        """Send a call and return its answer. Afterwards the child no longer works on it, even if this is cancelled.

        Pages that a child may still write to can be neither used nor freed: if it does not answer, this process ends.
        Raises ReadError while closing. `timeout_s`: None: a read's.
        """
        asking = asyncio.ensure_future(self._children[rank - 1].ask(call, timeout_s or self._timeout_s))
        is_cancelled = False
        while not asking.done():
            try:
                await asyncio.wait([asking])
            except asyncio.CancelledError:
                is_cancelled = True
        error = asking.exception()
        if error is not None and not self.is_closing:
            log.error("a rank does not answer; this process ends", rank=rank, reason=str(error))
            end_process()
        if is_cancelled:
            raise asyncio.CancelledError
        if error is not None:
            raise ReadError("transport", f"rank {rank} {error}") from error
        done = asking.result()
        assert isinstance(done, Done)
        return done

    async def join(self, own: Reader, transport: str, peer: kv_pb2.Peer, is_states: bool) -> Reader:
        return RanksReader([own, *await self.open(transport, peer, is_states)])

    async def open(self, transport: str, peer: kv_pb2.Peer, is_states: bool) -> list["ChildReader"]:
        """Open a reader in each child. Raises ReadError if one cannot be opened, and closes the others."""
        readers = [ChildReader(self, rank, next(self._reader_numbers), transport) for rank in self._ranks]
        packed = peer.SerializeToString()
        try:
            await run_all([reader.ask(OpenReader(reader.number, transport, packed, is_states)) for reader in readers])
        except BaseException:
            await run_all([reader.close() for reader in readers])
            raise
        return readers

    async def compute_checksums(
        self, rank: int, pages: Sequence[int], begin: int, num_bytes: int, is_states: bool
    ) -> list[int]:
        done = await self.ask(rank, ComputeChecksums(list(pages), begin, num_bytes, is_states))
        if done.reason:
            raise ReadError(done.reason, done.detail)
        return done.checksums

    async def save(self, entries: Sequence[NamedPage], is_states: bool) -> None:
        call = SavePages(list(entries), is_states)
        for done in await asyncio.gather(*(self.ask(rank, call, RANKS_S) for rank in self._ranks)):
            if done.reason:
                raise ReadError(done.reason, done.detail)

    def restore(
        self, keys: Sequence[bytes], into: Sequence[int], is_states: bool
    ) -> list[Coroutine[Any, Any, list[bool]]]:
        """For each child: PageTiers.load of its part. Raises ReadError."""

        async def restore(rank: int) -> list[bool]:
            done = await self.ask(rank, RestorePages(list(keys), list(into), is_states), RANKS_S)
            if done.reason:
                raise ReadError(done.reason, done.detail)
            return done.drafts

        return [restore(rank) for rank in self._ranks]

    def load_adapter(self, key: str, folder: str, digest: str) -> list[Coroutine[Any, Any, None]]:
        return self._ask_all(LoadAdapter(key, folder, digest))

    def set_weights(self, verb: Verb, folder: str = "", weights: str = "") -> list[Coroutine[Any, Any, None]]:
        return self._ask_all(SetWeights(verb, folder, weights))

    def _ask_all(self, call: Call) -> list[Coroutine[Any, Any, None]]:
        """For each child. Raises ValueError if it cannot."""

        async def ask(rank: int) -> None:
            done = await self.ask(rank, call, RANKS_S)
            if done.reason:
                raise ValueError(f"rank {rank}: {done.detail}")

        return [ask(rank) for rank in self._ranks]

    async def close(self) -> None:
        self.is_closing = True
        self._tell_hosts(Ended())
        await asyncio.gather(*(child.close() for child in self._children))


class ChildReader:
    """One child's reader of one peer; see kvtransfer's Reader."""

    def __init__(self, children: RankChildren, rank: int, number: int, transport: str) -> None:
        self.number = number
        self.transport = transport
        self._children = children
        self._rank = rank
        self._is_gone = False

    async def ask(self, call: Call) -> None:
        done = await self._children.ask(self._rank, call)
        self._is_gone = self._is_gone or done.is_gone
        if done.reason:
            raise ReadError(done.reason, done.detail)

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        pages, generations = [source.page for source in sources], [source.generation for source in sources]
        await self.ask(ReadPages(self.number, pages, generations, list(into)))

    async def probe(self, num_pages: int) -> None:
        await self.ask(ProbePages(self.number, num_pages))

    def is_gone(self) -> bool:
        return self._is_gone

    async def close(self) -> None:
        await self.ask(CloseReader(self.number))
