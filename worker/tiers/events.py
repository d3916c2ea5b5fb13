"""Publishes what the prefix cache gains and loses as vLLM's KV events, by which other routers place requests.

    [topic, number (8 bytes, big-endian), batch (msgpack)]      by ZeroMQ, as vLLM's ZmqEventPublisher sends it

The structs have vLLM's names and order of fields. A page's hash is the beginning of its key, so that it is the same on
all workers. Pages of prompts with a salt or with images are not published: their tokens do not tell what they are.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import msgspec

from runtime.tasks import keep_running
from wire.page_keys import SENT_KEY_BYTES, PageKey
from worker.role import Worker
from worker.sequences import Phase, Sequence
from worker.thread import EngineThread
from worker.tiers.key_log import MAX_KEYS, KeyLog

FLUSH_S = 0.1  # between two looks at what changed
PAGES_AT_ONCE = 512  # of an event, and of tokens read under the lock
KEPT_BYTES = 64 << 20  # of batches sent again on request
KEPT_BATCHES = 10_000  # as vLLM
MAX_UNSENT = 100_000  # messages for a subscriber that does not read; as vLLM
NO_MORE = (-1).to_bytes(8, "big", signed=True)  # ends what is sent again


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pages after one another, the first of which continues the parent; None: it begins a prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pages that are found no more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker has just started."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message."""

    ts: float
    events: Seq[Event]
    data_parallel_rank: int = 0


MEDIUM = "GPU"  # vLLM's word for the pool, also where it is a CPU's


@dataclass(frozen=True, slots=True)
class Page:
    """One page, as an event describes it."""

    parent: bytes | None
    tokens: Seq[int]
    adapter: str  # its name


class Part(NamedTuple):
    """Pages of a sequence after one another."""

    keys: Seq[PageKey]  # the one before them, or b"", then theirs
    tokens: Seq[int]
    adapter: str  # digest
    num_found: int  # of the first pages: they were cached when it was admitted


class SeenPages:
    """The tokens of pages that sequences fill, until these are published."""

    def __init__(self, page_tokens: int, find_name: Callable[[str], str]) -> None:
        """`find_name`: of an adapter, by its digest."""
        self._page_tokens = page_tokens
        self._find_name = find_name
        self._sequences: dict[int, tuple[Sequence, int, int]] = {}  # id |-> (it, its keys read, its preemptions then)
        self._pages: OrderedDict[bytes, Page] = OrderedDict()

    def note(self, sequence: Sequence) -> None:
        """It was admitted. The caller holds the scheduler's lock, as for `read`."""
        params = sequence.params
        if not params.cache_salt and not params.images:
            self._sequences[sequence.id] = (sequence, 0, 0)

    def read(self, limit: int) -> list[Part]:
        """At most so many pages that are new, or were taken from their sequence, which fills them again."""
        found, size = list[Part](), self._page_tokens
        for number, (sequence, begin, num_preemptions) in list(self._sequences.items()):
            begin = begin if num_preemptions == sequence.num_preemptions else 0
            end = min(len(sequence.keys), begin + limit)
            if begin < end:
                limit -= end - begin
                keys = [sequence.keys[begin - 1] if begin else b"", *sequence.keys[begin:end]]
                tokens, num_found = sequence.tokens[begin * size : end * size], sequence.num_cached // size - begin
                found.append(Part(keys, tokens, sequence.params.adapter, num_found))
            self._sequences[number] = (sequence, end, sequence.num_preemptions)
            if sequence.phase is Phase.ENDED and end == len(sequence.keys):
                del self._sequences[number]
        return found

    def keep(self, parts: Seq[Part], published: set[bytes]) -> list[bytes]:
        """All but what was found and is published; returns their keys."""
        size, kept = self._page_tokens, list[bytes]()
        for keys, tokens, digest, num_found in parts:
            sent = [key[:SENT_KEY_BYTES] for key in keys]
            name = self._find_name(digest) if digest else ""
            for at, one in enumerate(sent[1:]):
                if at >= num_found or one not in published:
                    self._pages[one] = Page(sent[at] or None, tokens[at * size : (at + 1) * size], name)
                    kept.append(one)
        while len(self._pages) > MAX_KEYS:
            self._pages.popitem(last=False)
        return kept

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def take(self, key: bytes) -> Page:
        return self._pages.pop(key)


class KVEvents:
    """Owns what was published. On the asyncio thread."""

    def __init__(self, worker: Worker, thread: EngineThread, endpoint: str, replay: str) -> None:
        """`replay`: where batches are asked for again; empty: nowhere. OSError where an endpoint cannot be used."""
        kv, adapters = worker.scheduler.kv, worker.scheduler.adapters
        self._thread = thread
        self._page_tokens = kv.page_tokens
        self._log = KeyLog(Lock())
        self._number = 0  # of the last report
        kv.cache.watchers.append(self._log)
        self.seen = SeenPages(kv.page_tokens, lambda digest: adapters.names.get(digest, digest))
        self._published: set[bytes] = set()
        self._untold: set[bytes] = set()  # keys whose tokens are not known yet, or never
        self._sender = Sender(f"kv@{worker.me.address}@{worker.me.model}", endpoint, replay)
        self._sender.send([AllBlocksCleared()])
        self._task = asyncio.create_task(keep_running(self._run, "publishing KV events"))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0 if self._publish() else FLUSH_S)
            self._sender.answer()

    def _publish(self) -> bool:
        """Publishes changes. Returns whether more tokens are to be read at once."""
        with self._thread.lock:
            read = self.seen.read(PAGES_AT_ONCE)
        changes = self._log.report(self._number)
        self._number = changes.number
        lost = set(changes.lost) if changes.since else (self._published | self._untold).difference(changes.gained)
        self._untold -= lost
        removed = [key for key in lost if key in self._published]
        self._published.difference_update(removed)
        if removed:
            self._sender.send([BlockRemoved(list(map(_hash, removed)), MEDIUM)])
        new = self.seen.keep(read, self._published)
        self._untold.update(key for key in changes.gained if key not in self._published)
        known = [key for key in dict.fromkeys([*changes.gained, *new]) if key in self._untold and key in self.seen]
        self._untold.difference_update(known)
        self._published.update(known)
        for begin in range(0, len(known), PAGES_AT_ONCE):
            self._sender.send(self._group(known[begin : begin + PAGES_AT_ONCE]))
        return len(read) > 0

    def _group(self, keys: Seq[bytes]) -> list[BlockStored]:
        """One event for pages that follow each other."""
        events: list[BlockStored] = []
        last = b""
        for key in keys:
            page = self.seen.take(key)
            if not events or page.parent != last:
                parent = None if page.parent is None else _hash(page.parent)
                events.append(BlockStored([], parent, [], self._page_tokens, None, MEDIUM, page.adapter or None))
            events[-1].block_hashes.append(_hash(key))
            events[-1].token_ids.extend(page.tokens)
            last = key
        return events

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._sender.close()


class Sender:
    """Owns the sockets, and the batches that may be asked for again."""

    def __init__(self, topic: str, endpoint: str, replay: str) -> None:
        import zmq  # an extra

        self._zmq = zmq
        self._topic = topic.encode()
        self._num_sent = self._kept_bytes = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER) if replay else None
        self._socket.set_hwm(MAX_UNSENT)
        try:
            (self._socket.bind if "*" in endpoint else self._socket.connect)(endpoint)
            if self._replay is not None:
                self._replay.bind(replay)
        except zmq.ZMQError as error:
            raise OSError(f"KV events cannot be published at {endpoint} {replay}: {error}") from error

    def send(self, events: Seq[Event]) -> None:
        """A subscriber that does not read loses messages, and sees that by their numbers."""
        payload = msgspec.msgpack.encode(Batch(time.time(), events))
        self._socket.send_multipart((self._topic, self._num_sent.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
        if self._replay is not None:
            self._kept.append((self._num_sent, payload))
            self._kept_bytes += len(payload)
            while self._kept_bytes > KEPT_BYTES or len(self._kept) > KEPT_BATCHES:
                self._kept_bytes -= len(self._kept.popleft()[1])
        self._num_sent += 1

    def answer(self) -> None:
        """Send the kept batches from a number on to each caller that asks."""
        while self._replay is not None and self._replay.poll(0):
            caller, *_, wanted = self._replay.recv_multipart()
            begin = int.from_bytes(wanted[:8], "big")
            again = [(number.to_bytes(8, "big"), payload) for number, payload in self._kept if number >= begin]
            for parts in (*again, (NO_MORE, b"")):
                self._replay.send_multipart((caller, b"", *parts), self._zmq.NOBLOCK)

    def close(self) -> None:
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close(linger=0)


def _hash(key: bytes) -> int:
    return int.from_bytes(key, "big")
