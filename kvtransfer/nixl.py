"""Transport "nixl": reads pages through NIXL, by RDMA between hosts. Checks the peer and bounds all waits.

Has not yet run over GPU memory or RDMA devices.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import structlog
from numpy.typing import NDArray

from kvtransfer.grpc_bytes import is_unreachable
from kvtransfer.layout import process_of
from kvtransfer.memory_file import GENERATION_BYTES
from kvtransfer.nixl_agent import NOT_INSTALLED, NixlAgent, NixlError, is_fast, is_installed
from kvtransfer.reader import Advert, Landing, Local, PageRef, ReadError, TransportReader, check_generations
from protos import kv_pb2

log = structlog.get_logger()
LANDING_BYTES = 64 << 20  # of both halves: a half is the KV of a 256-token chunk of an 8B model
MIN_PAUSE_S, MAX_PAUSE_S, PAUSE_SHARE = 20e-6, 2e-3, 0.1  # between polls: this share of the time waited so far
MAX_METADATA_BYTES = 64 << 10  # typically a few hundred, plus some per network device
MAX_PAGES = 1 << 22  # of a peer, divided by the runs read from each: a list takes 24 bytes per page here
MAX_DEVICES = 1024
ADDRESS_END = 1 << 64


class NixlMemory(Advert, frozen=True):
    """A registered pool. Only its agent uses the addresses."""

    metadata: bytes  # of its agent, named by Local.name: UCX's addresses, and keys to the registered memory
    pages_address: int  # of the first page; the others follow without gaps
    generations_address: int  # in its main memory: one uint64 per page, in host order
    device_index: int  # of the pages' GPU in its process; -1 for main memory

    def check(self, num_pages: int, page_bytes: int, num_runs: int) -> None:
        """Raise ReadError("layout") if a rank cannot have such a pool. NIXL itself checks whether it has."""
        most, num_bytes = MAX_PAGES // num_runs, len(self.metadata)
        if not 0 < num_pages <= most:
            raise ReadError("layout", f"a pool of {num_pages} pages cannot be read through NIXL, expected 1 to {most}")
        if not 0 < num_bytes <= MAX_METADATA_BYTES:
            raise ReadError("layout", f"NIXL metadata of {num_bytes} bytes, expected 1 to {MAX_METADATA_BYTES}")
        for name, address, size in (
            ("pages", self.pages_address, page_bytes),
            ("generations", self.generations_address, GENERATION_BYTES),
        ):
            if address <= 0 or address % GENERATION_BYTES or address + num_pages * size > ADDRESS_END:
                raise ReadError("layout", f"{num_pages} {name} cannot lie at address {address:#x}")
        if not -1 <= self.device_index < MAX_DEVICES:
            raise ReadError("layout", f"there is no GPU {self.device_index}")


class NixlReader(TransportReader):
    """Reads into a landing area, compares generations, and only then copies into the store.

        a half of the landing:  free ──begin──► being written ──done, copied──► free
                                                     └──deadline──► stuck ──done──► free

    The next pages arrive in one half while those in the other are copied. A transfer cannot be cancelled: a stopped
    peer's bytes arrive when it resumes. So they go to memory that nothing else uses. While a half is stuck, reads are
    refused. The landing is freed after the agent, whose end ends all transfers.

    An agent and a thread per peer: a peer that hangs delays no other, and closing it ends its transfers.
    """

    name, why = "nixl", "the peer's pool is open to NIXL"

    @staticmethod
    def advertise(local: Local) -> bytes | None:
        """Empty if it only reads. With --transport nixl opens the pool to peers, or warns that it cannot."""
        if local.wanted == NixlReader.name:
            try:
                if is_installed():
                    return open_pool(local).pack()
                obstacle = NOT_INSTALLED
            except NixlError as error:
                obstacle = str(error)
            log.warning("the pool is not open to NIXL", reason=obstacle)
        return b"" if is_installed() else None

    @staticmethod
    def find_obstacle(ours: kv_pb2.Peer, theirs: kv_pb2.Peer) -> str | None:
        if not all(NixlReader.name in rank.transports for rank in ours.ranks):
            return NOT_INSTALLED
        if not all(rank.transports.get(NixlReader.name) for rank in theirs.ranks):
            return "the peer's pool is not open to NIXL: start the peer with --transport nixl, and look into its log"
        return None

    def __init__(self, local: Local, peer: kv_pb2.Peer) -> None:
        super().__init__(local, peer)
        self._executor = self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-nixl")
        self._channel = local.open_channel(peer.address)  # only to check that the peer is alive
        self._timeout_s = local.timeout_s
        self._half = max(1, min(self._store.num_pages, LANDING_BYTES // self._store.page_bytes) // 2)  # pages
        self._found: NDArray[np.uint64] = np.zeros(2 * self._half, np.uint64)  # target of generations
        self._landing: Landing  # this, agent and lists exist after `_open_agent`
        self._agent: NixlAgent
        self._lists: list[tuple[int, int]]  # prepared lists of each run over all pages: (ours, theirs)
        self._generations: tuple[int, int]
        self._opened = ExitStack()  # the agent, then the landing; used only on the thread
        self._end = threading.Event()  # once set, all waits end
        self._is_lost = False
        self._link = ""  # UCX's transport, such as "rc_mlx5" or "tcp"

    @property
    def transport(self) -> str:
        return f"nixl:{self._link}"

    async def _connect(self, local: Local) -> None:
        """ReadError also if UCX has only TCP and that is not allowed."""
        name = f"{local.name}-{next(local.numbers)}"
        await self._run(lambda deadline: self._open_agent(name, local.is_loopback, deadline))
        if not is_fast(self._link) and not local.nixl_allow_tcp:
            raise ReadError("transport", f"UCX reads by {self._link}: set --nixl-allow-tcp, or use RDMA on both hosts")

    def _open_agent(self, name: str, is_local: bool, deadline: float) -> None:
        store, num_pages, num_slots = self._store, self._peer.num_pages, 2 * self._half
        entries = [NixlMemory.read(rank, self.name) for rank in self._peer.ranks]
        there = [memory for memory in entries if memory is not None]
        if len(there) < len(entries):
            raise ReadError("layout", "a rank of the peer has no pool open to NIXL")
        for memory in there:
            memory.check(num_pages, self._page_bytes, len(self._runs))
        self._landing = store.open_landing(num_slots)  # first: on a GPU it gives UCX the CUDA context it needs
        self._opened.callback(self._landing.close)
        self._agent = agent = NixlAgent(name, answers_alone=False, is_local=is_local)
        self._opened.callback(agent.close)
        found, size = int(self._found.ctypes.data), GENERATION_BYTES
        agent.register(self._landing.address, num_slots * store.page_bytes, store.device_index)
        agent.register(found, num_slots * size, -1)
        names = {rank: self._connect_rank(rank, there[rank]) for rank in sorted({0, *(run.rank for run in self._runs)})}
        self._lists = []
        for rank, source, target, count in self._runs:
            memory, here = there[rank], self._landing.address + target
            ours = agent.prepare(None, here, num_slots, store.page_bytes, count, store.device_index)
            address, device = memory.pages_address + source, memory.device_index
            theirs = agent.prepare(names[rank], address, num_pages, self._page_bytes, count, device)
            self._lists.append((ours, theirs))
        theirs = agent.prepare(names[0], there[0].generations_address, num_pages, size, size, -1)  # rank 0 changes them
        self._generations = agent.prepare(None, found, num_slots, size, size, -1), theirs
        self._transfer(self._lists, range(1), 0, deadline)  # UCX logs its transport at the first read
        self._link = agent.find_link()

    def _connect_rank(self, rank: int, memory: NixlMemory) -> str:
        """Returns the name of the rank's agent."""
        name, expected = self._agent.connect(memory.metadata), f"{process_of(self._peer.incarnation)}.{rank}"
        if name != expected:
            raise NixlError(f"the metadata is of agent {name[:64]!r}, not of {expected}")
        return name

    async def read(self, sources: Sequence[PageRef], into: Sequence[int]) -> None:
        self._check_bounds(sources)

        def read(deadline: float) -> None:
            pages = [source.page for source in sources]
            parts = [slice(begin, begin + self._half) for begin in range(0, len(pages), self._half)]
            for number, part in enumerate(parts):
                first = number % 2 * self._half
                if not number:
                    self._begin(self._lists, pages[part], first)
                check_generations(sources[part], self._finish(pages[part], first, deadline))
                if number + 1 < len(parts):
                    self._begin(self._lists, pages[parts[number + 1]], self._half - first)
                self._landing.copy(range(first, first + len(pages[part])), into[part])

        await self._run(read)

    async def probe(self, num_pages: int) -> None:
        def probe(deadline: float) -> None:
            for first in range(0, num_pages, self._half):
                self._transfer(self._lists, range(first, min(first + self._half, num_pages)), 0, deadline)

        await self._run(probe)

    def _finish(self, pages: Sequence[int], first: int, deadline: float) -> list[int]:
        """Wait for pages, then read their generations; returns these.

        The owner raises a generation before it writes to the page, so a read with new bytes sees the new generation.
        """
        self._wait(len(pages), deadline)
        self._transfer([self._generations], pages, first, deadline)
        return [int(generation) for generation in self._found[first : first + len(pages)]]

    def _transfer(self, lists: Sequence[tuple[int, int]], pages: Sequence[int], first: int, deadline: float) -> None:
        self._begin(lists, pages, first)
        self._wait(len(pages), deadline)

    def _begin(self, lists: Sequence[tuple[int, int]], pages: Sequence[int], first: int) -> None:
        """Begin reads of all lists, of several ranks perhaps by several network cards, into slots from `first` on."""
        if self._agent.is_reading():
            raise TimeoutError("an earlier read has not ended yet: the peer does not answer")
        for here, there in lists:
            self._agent.begin_read(there, pages, here, first)

    def _wait(self, num_pages: int, deadline: float) -> None:
        began = time.monotonic()
        while self._agent.is_reading():
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"{num_pages} pages were not there in time: the peer does not answer")
            pause = min(max((now - began) * PAUSE_SHARE, MIN_PAUSE_S), MAX_PAUSE_S)
            if self._end.wait(min(pause, deadline - now)):
                raise TimeoutError("closed during the read")

    async def _run(self, work: Callable[[float], None]) -> None:
        """Run `work(deadline)` on the thread. Errors become ReadErrors.

        After a NIXL error nothing more is read: parts of the failed read may still arrive.
        """
        deadline = time.monotonic() + self._timeout_s  # includes the wait for the thread

        def run() -> None:
            if self._is_lost:
                raise NixlError("an earlier read failed; the peer has to shake hands again")
            try:
                work(deadline)
            except NixlError:
                self._is_lost = True
                raise

        try:
            await self._copy(run)
        except (NixlError, TimeoutError, RuntimeError) as error:
            raise ReadError("transport", f"{self._peer.address}: {error}") from error

    def is_gone(self) -> bool:
        """A read failed, or the peer's address does not answer."""
        return self._is_lost or is_unreachable(self._channel)

    async def close(self) -> None:
        """Also ends a running read."""
        self._end.set()
        await self._copy(self._opened.close)
        self._thread.shutdown()
        await self._channel.close()


def open_pool(local: Local) -> NixlMemory:
    """Register the pool with an agent that serves it until `local` is closed. Raises NixlError."""
    store, generations = local.store, int(local.store.generations.ctypes.data)
    agent = NixlAgent(local.name, answers_alone=True, is_local=local.is_loopback)
    local.cleanup.callback(agent.close)  # ends all access by peers
    agent.register(store.address, store.num_pages * store.page_bytes, store.device_index)
    agent.register(generations, store.num_pages * GENERATION_BYTES, -1)
    return NixlMemory(agent.metadata(), store.address, generations, store.device_index)
