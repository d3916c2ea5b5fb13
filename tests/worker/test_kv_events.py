"""KV events as vLLM's: a subscriber that decodes them by a copy of its structs knows what is in the cache."""

import asyncio
from threading import Lock
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from runtime.config import DecodeConfig
from runtime.settings import ConfigError
from tests.support.fleet import free_ports
from tests.support.sequence_params import answer, build_scheduler, prompt, run
from wire.images import ImageSpan
from wire.page_keys import PageKey
from worker.params import SequenceParams
from worker.sequences import Sequence
from worker.tiers import events
from worker.tiers.events import NO_MORE, KVEvents
from worker.tiers.plans import begin_restore, end_restore

PAGE = 4
WAIT_S = 20.0


# as in vllm/distributed/kv_events.py
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """A router: the tokens of each page from a prompt's beginning on, by hash."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"kv@")
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.number = -1
        self.pages: dict[int, tuple[int, ...]] = {}
        self.events: list[KVCacheEvent] = []

    async def follow(self, tokens: set[tuple[int, ...]]) -> None:
        """Until the pages known are these, by all tokens up to their ends."""
        async with asyncio.timeout(WAIT_S):
            while set(self.pages.values()) != tokens:
                topic, number, payload = await self.socket.recv_multipart()
                assert topic == b"kv@127.0.0.1:9001@tiny"
                self.take(number, payload)

    def take(self, number: bytes, payload: bytes) -> None:
        assert len(number) == 8 and int.from_bytes(number, "big") > self.number
        self.number = int.from_bytes(number, "big")
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):
                self.pages.clear()
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    del self.pages[int(one)]  # each was stored
            elif isinstance(event, BlockStored):
                self.store(event)

    def store(self, event: BlockStored) -> None:
        assert event.block_size == PAGE and len(event.token_ids) == PAGE * len(event.block_hashes)
        before = () if event.parent_block_hash is None else self.pages[int(event.parent_block_hash)]
        for at, one in enumerate(event.block_hashes):
            before += tuple(event.token_ids[at * PAGE : (at + 1) * PAGE])
            self.pages[int(one)] = before

    def close(self) -> None:
        self.context.destroy(linger=0)


class Published:
    """A scheduler whose cache's changes are published to a subscriber."""

    def __init__(self, num_pages: int, subscriber: Subscriber, replay: str = "") -> None:
        self.scheduler = build_scheduler(num_pages, PAGE)
        me = SimpleNamespace(address="127.0.0.1:9001", model="tiny")
        thread: Any = SimpleNamespace(lock=Lock())
        self.thread = thread
        worker: Any = SimpleNamespace(scheduler=self.scheduler, me=me)
        self.tokens: dict[PageKey, tuple[int, ...]] = {}
        self.events = KVEvents(worker, thread, f"tcp://127.0.0.1:{subscriber.port}", replay)

    async def join(self, subscriber: Subscriber) -> None:
        """Until what is sent arrives: ZeroMQ drops it before."""
        async with asyncio.timeout(WAIT_S):
            while not await subscriber.socket.poll(50):
                self.events._sender.send([events.AllBlocksCleared()])

    def admit(self, params: SequenceParams) -> Sequence:
        with self.thread.lock:
            sequence = self.scheduler.admit(params, 0.0)
            self.events.seen.note(sequence)
        return sequence

    def ask(self, params: SequenceParams, is_published: bool = True) -> None:
        """Answered."""
        sequence = self.admit(params)
        run(self.scheduler)
        for at, key in enumerate(sequence.keys if is_published else ()):
            self.tokens[key] = tuple(sequence.tokens[: (at + 1) * PAGE])

    def find_there(self) -> set[tuple[int, ...]]:
        """What is in the cache of the prompts and answers that are published, by all tokens up to a page's end."""
        return {self.tokens[key] for key in self.scheduler.kv.cache._page if key in self.tokens}


async def test_a_subscriber_follows_what_is_stored_evicted_and_read_from_elsewhere() -> None:
    subscriber = Subscriber()
    published = Published(12, subscriber)
    try:
        await published.join(subscriber)
        published.ask(answer(1, 17, 6))
        await subscriber.follow(published.find_there())
        stored = [event for event in subscriber.events if isinstance(event, BlockStored)]
        assert stored[0].parent_block_hash is None and len(stored[0].block_hashes) > 1, "a run of pages is one event"
        assert (stored[0].medium, stored[0].lora_name) == ("GPU", None)
        published.ask(answer(2, 17, 9, first=10_001))
        published.ask(answer(3, 9, 9, cache_salt="mine"), is_published=False)
        published.ask(answer(4, 9, 1, images=(ImageSpan(1, 5, b"d" * 32, 2, 2),)), is_published=False)
        published.ask(answer(5, 21, 2))
        assert len(published.tokens) > len(published.find_there()) > 0, "some were evicted"
        await subscriber.follow(published.find_there())
        assert any(isinstance(event, BlockRemoved) for event in subscriber.events)
        assert len(subscriber.pages) < len(published.scheduler.kv.cache._page), "not those with a salt or images"
        scheduler = published.scheduler  # pages that come before the prompt that has their tokens
        params = prompt(6, 9)
        keys = scheduler.kv.keys_of(params)
        restore = begin_restore(scheduler, keys, ())
        end_restore(scheduler.kv, restore, [True] * len(keys), 0)
        published.events._publish()
        published.ask(params)
        assert published.scheduler.kv.num_hit >= 2 * PAGE
        await subscriber.follow(published.find_there())
    finally:
        await published.events.close()
        subscriber.close()


async def test_what_was_missed_is_sent_again() -> None:
    subscriber = Subscriber()
    (port,) = free_ports(1)
    published = Published(20, subscriber, f"tcp://127.0.0.1:{port}")
    asking = subscriber.context.socket(zmq.DEALER)
    try:
        await published.join(subscriber)
        published.ask(answer(1, 17, 6))
        await subscriber.follow(published.find_there())
        asking.connect(f"tcp://127.0.0.1:{port}")
        await asking.send_multipart((b"", (0).to_bytes(8, "big")))
        late = Subscriber()
        async with asyncio.timeout(WAIT_S):
            while True:
                _, number, payload = await asking.recv_multipart()
                if number == NO_MORE:
                    break
                late.take(number, payload)
        assert isinstance(late.events[0], AllBlocksCleared) and late.number == subscriber.number
        assert late.pages == subscriber.pages
        late.close()
    finally:
        await published.events.close()
        subscriber.close()


async def test_an_endpoint_that_cannot_be_used_is_named() -> None:
    context = zmq.Context[Any]()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://*")
    subscriber = Subscriber()
    try:
        with pytest.raises(OSError, match=f"cannot be published at tcp://127.0.0.1:{subscriber.port} tcp://.*{port}"):
            Published(4, subscriber, f"tcp://*:{port}")
    finally:
        taken.close(linger=0)
        subscriber.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "--kv-events"),
        ({"kv_events": "ipc:///tmp/x"}, "--kv-events"),
        ({"kv_events": "tcp://*"}, "--kv-events"),
        ({"kv_events_replay": "tcp://*:5558"}, "--kv-events-replay"),
    ],
)
def test_what_cannot_be_an_endpoint_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**settings)
    DecodeConfig(kv_events="tcp://*:5557", kv_events_replay="tcp://*:5558")
