"""Rank 0's side of its worker's other ranks: starts them, has them read pages, and ends with any of them.

A worker is one incarnation: if a rank ends, this process ends at once, and its supervisor restarts it.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

import msgspec
import structlog

from engine.kv.pool import create_file
from engine.out_of_memory import end_process
from kvtransfer.reader import PageRef, ReadError
from protos import kv_pb2
from runtime.config import DecodeConfig, PrefillConfig
from worker import rank_link as link
from worker.rank_reads import run_all
from worker.rank_ring import RingFds, RingLeader, open_ring

log = structlog.get_logger()

END_S = 5.0  # that a child has to end on request
MARGIN_S = 10.0  # to answer, beyond the time that a read may take


class RankChildren:
    """Owns the processes of ranks 1 and up, and what they share with this one.

    Create it on the main thread: the children die with the thread that creates them.
    """

    def __init__(self, role: str, config: PrefillConfig | DecodeConfig, incarnation: str) -> None:
        """Starts them; they begin to load their parts of the model. Raises ValueError if memory cannot be shared."""
        try:
            meeting = os.memfd_create("baton-meeting", os.MFD_CLOEXEC)
            self.pool_fds = create_file(), create_file()
            self._ring_fds: RingFds = open_ring(config.tp - 1)
        except (OSError, AttributeError) as error:  # a sandbox or limit forbids it, or this is not Linux
            raise ValueError(
                f"{config.tp} ranks need shared memory files: {error}; allow memfd_create, or set --tp 1"
            ) from error
        self.rendezvous = f"/proc/{os.getpid()}/fd/{meeting}"  # disappears with this process, however it ends
        self.ring = RingLeader(self._ring_fds)
        self.is_closing = False  # failures after this are expected
        start = link.Start(
            role, msgspec.json.encode(asdict(config)), incarnation, 0, config.tp, self.rendezvous,
            list(self._ring_fds.all), list(self.pool_fds),
        )  # fmt: skip
        self._children = [self._start(msgspec.structs.replace(start, rank=rank)) for rank in range(1, config.tp)]

    def _start(self, start: link.Start) -> "RankChild":
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), *self.pool_fds, *self._ring_fds.all)
            command = [sys.executable, "-P", "-m", "worker.rank_main", str(theirs.fileno())]
            popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        ours.sendall(link.encode(start))
        threading.Thread(target=self._watch, args=(start.rank, popen), name="rank-watch", daemon=True).start()
        return RankChild(start.rank, popen, ours, lambda: self.is_closing)

    def _watch(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        status = popen.wait()
        if not self.is_closing:
            log.error("a rank ended; its worker ends with it", rank=rank, status=status)
            end_process()

    async def connect(self, timeout_s: float) -> list[tuple[kv_pb2.Rank, kv_pb2.Rank]]:
        """Wait until all children serve their pages and slots; returns how peers reach them. `timeout_s`: of a read."""
        return [await child.connect(timeout_s + MARGIN_S) for child in self._children]

    async def open(self, transport: str, peer: kv_pb2.Peer, is_states: bool) -> list["ChildReader"]:
        """Open a reader in each child. Raises ReadError if one cannot be opened, and closes the others."""
        readers = [ChildReader(child, is_states) for child in self._children]
        try:
            await run_all([reader.open(transport, peer) for reader in readers])
        except BaseException:
            await run_all([reader.close() for reader in readers])
            raise
        return readers

    async def compute_checksums(
        self, rank: int, pages: Sequence[int], begin: int, num_bytes: int, is_states: bool
    ) -> list[int]:
        """See kvtransfer/checksums.py; of the pool of `rank`. Raises ReadError with the driver's message."""
        child = self._children[rank - 1]
        done = await child.ask(link.Checksum(child.next_number(), list(pages), begin, num_bytes, is_states))
        if done.reason:
            raise ReadError(done.reason, done.detail)
        return done.checksums

    async def close(self) -> None:
        self.is_closing = True
        for child in self._children:
            child.hang_up()
        await asyncio.gather(*(asyncio.to_thread(child.wait) for child in self._children))


class RankChild:
    """One process. Its methods run on the asyncio thread."""

    def __init__(
        self, rank: int, popen: subprocess.Popen[bytes], sock: socket.socket, is_closing: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._rank = rank
        self._is_closing = is_closing
        self._popen = popen
        self._sock = sock
        self._writer: asyncio.StreamWriter | None = None
        self._calls: dict[int, asyncio.Future[link.Done]] = {}
        self._numbers = itertools.count()
        self._timeout_s = 0.0
        self._receiving: asyncio.Task[None] | None = None

    async def connect(self, timeout_s: float) -> tuple[kv_pb2.Rank, kv_pb2.Rank]:
        """See `RankChildren.connect`. `timeout_s`: of any answer. If a child fails at start, this process ends."""
        self._timeout_s = timeout_s
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
        ready = await link.receive(reader)
        assert isinstance(ready, link.Ready)
        self._receiving = asyncio.create_task(self._receive(reader))
        return kv_pb2.Rank.FromString(ready.rank), kv_pb2.Rank.FromString(ready.states_rank)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the watcher thread reports it
            while True:
                done = await link.receive(reader)
                assert isinstance(done, link.Done)
                self._calls.pop(done.call).set_result(done)

    def next_number(self) -> int:
        return next(self._numbers)

    async def ask(self, call: link.Call) -> link.Done:
        """Send a call and return its answer. Afterwards the child no longer works on it, even if this is cancelled.

        Pages that a child may still write to can be neither used nor freed: if it does not answer, this process ends.
        """
        assert self._writer is not None
        answer = self._calls[call.call] = asyncio.get_running_loop().create_future()
        self._writer.write(link.encode(call))
        waiting = asyncio.ensure_future(asyncio.wait([answer], timeout=self._timeout_s))
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await waiting
            raise
        finally:
            if not answer.done() and not self._is_closing():
                log.error("a rank does not answer; this process ends", rank=self._rank, timeout_s=self._timeout_s)
                end_process()
        done: link.Done = answer.result()
        return done

    def hang_up(self) -> None:
        """Close the connection; the child then ends."""
        if self._receiving is not None:
            self._receiving.cancel()
        if self._writer is not None:
            self._writer.close()

    def wait(self) -> None:
        """Wait until it has ended. From any thread."""
        try:
            self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()


class ChildReader:
    """One child's reader of one peer; see kvtransfer's Reader."""

    def __init__(self, child: RankChild, is_states: bool) -> None:
        self._child = child
        self._is_states = is_states
        self.transport = ""  # the one in use
        self._number = child.next_number()
        self._is_gone = False

    async def open(self, transport: str, peer: kv_pb2.Peer) -> None:
        self.transport = transport
        number, packed = self._child.next_number(), peer.SerializeToString()
        await self._ask(link.Open(number, self._number, transport, packed, self._is_states))

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        pages, generations = [source.page for source in sources], [source.generation for source in sources]
        await self._ask(link.Read(self._child.next_number(), self._number, pages, generations, list(into)))

    async def probe(self, num_pages: int) -> None:
        await self._ask(link.Probe(self._child.next_number(), self._number, num_pages))

    def is_gone(self) -> bool:
        return self._is_gone

    async def close(self) -> None:
        await self._ask(link.Close(self._child.next_number(), self._number))

    async def _ask(self, call: link.Call) -> None:
        done = await self._child.ask(call)
        self._is_gone = self._is_gone or done.is_gone
        if done.reason:
            raise ReadError(done.reason, done.detail)
