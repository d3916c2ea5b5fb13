"""KV in files: which of it is read, in what order, and whether that pays."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from protos import kv_pb2
from tests.support.sequence_params import build_scheduler
from wire.page_keys import TOKEN_BYTES
from worker.kv_cache import Restore
from worker.metrics import WorkerMetrics
from worker.params import SequenceParams
from worker.prefix_cache import NoRoomError
from worker.scheduler import Scheduler
from worker.thread import EngineThread
from worker.tiers import reading
from worker.tiers.files import KVTiers
from worker.tiers.plans import RestorePlan, begin_restore, end_restore, plan_restore
from worker.tiers.reading import Fresh, Reading, prefers_reading

WAIT_S = 10.0
PAGE_TOKENS = 4
KEYS = [bytes([number]) * 16 for number in range(8)]


@pytest.mark.parametrize(
    ("num_there", "num_usable", "num_found", "slots", "expected"),
    [
        (0, 0, 0, None, ((), ())),
        (2, 2, 6, None, (KEYS[2:6], ())),
        (6, 6, 6, None, ((), ())),
        (0, 0, 6, (), ((), ())),  # without a checkpoint no page helps
        (0, 0, 6, (3, 5), (KEYS[:5], KEYS[4:5])),
        (0, 0, 4, (3, 5), (KEYS[:3], KEYS[2:3])),
        (6, 2, 6, (3, 5), ((), KEYS[4:5])),  # the pages are there, their checkpoint is not
        (6, 5, 6, (3, 5), ((), ())),  # it is there, too
    ],
)
def test_pages_are_read_as_far_as_a_prompt_can_continue_behind_them(
    num_there: int,
    num_usable: int,
    num_found: int,
    slots: tuple[int, ...] | None,
    expected: tuple[list[bytes], list[bytes]],
) -> None:
    has_slot = None if slots is None else {KEYS[count - 1] for count in slots}.__contains__
    plan = plan_restore(KEYS, num_there, num_usable, num_found, has_slot)
    assert (tuple(plan.keys), tuple(plan.slot_keys)) == (tuple(expected[0]), tuple(expected[1]))
    assert isinstance(plan, RestorePlan)


def test_what_is_read_does_not_evict_what_it_continues() -> None:
    """The oldest cached pages are the beginning of the prompt that is read."""
    scheduler = build_scheduler(6, 4)
    cache = scheduler.kv.cache
    for keys in (KEYS[:2], [key * 2 for key in KEYS[:4]]):
        pages = cache.allocate(len(keys))
        for page, key in zip(pages, keys, strict=True):
            cache.name(page, key)
        cache.release(pages)
    with pytest.raises(NoRoomError):
        begin_restore(scheduler, *plan_restore(KEYS, 2, 2, 7, None))
    scheduler.check()
    restore = begin_restore(scheduler, *plan_restore(KEYS, 2, 2, 5, None))
    scheduler.check()
    assert cache.find(KEYS) == restore.before and len(restore.before) == 2
    end_restore(scheduler.kv, restore, [False] * 3, 0)
    scheduler.check()
    assert len(cache.find(KEYS)) == 5 and not cache.num_held


def test_what_takes_less_time_is_done() -> None:
    assert prefers_reading(1000, 0, 0.0, 500.0) and prefers_reading(1000, 0, 500.0, 0.0)  # not measured
    assert prefers_reading(1000, 0, 501.0, 500.0) and not prefers_reading(1000, 0, 499.0, 500.0)
    assert prefers_reading(1000, 1000, 251.0, 500.0)  # it would wait for the tokens of others
    assert prefers_reading(10, 0, 1000.0, 1e6)  # short


class Readings:
    """A reading of a worker that computes 1,000 tokens a second, in a time that only its reads take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._keys = 100.0, count()
        scheduler = build_scheduler(200, 16)
        thread, metrics = EngineThread(lambda: False), WorkerMetrics(scheduler)
        metrics.prompt_speed.count(1000, 1.0)
        self._reading = Reading("files", scheduler, thread, metrics, Fresh(scheduler.kv.cache.generations))
        monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: self.now))

    def read(self, num_tokens: int, seconds: float) -> None:
        async def read(restore: Restore) -> tuple[list[bool], int]:
            self.now += seconds
            return [True] * len(restore.pages), 0

        keys = [next(self._keys).to_bytes(16) for _ in range(num_tokens // 16)]
        asyncio.run(self._reading.fill(RestorePlan(keys, ()), read))

    def is_preferred(self) -> bool:
        """Over computing 1,600 tokens, in 1.6 s."""
        return self._reading.is_preferred(1600)


def test_a_small_read_says_little_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = Readings(monkeypatch)
    for _ in range(20):
        readings.read(48, 0.052)
    assert readings.is_preferred()


def test_a_slow_read_is_believed_for_ten_times_as_long_as_it_took_but_a_minute_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = Readings(monkeypatch)
    for seconds, believed_s in ((0.4, 4.0), (4.0, 40.0), (40.0, 60.0)):
        readings.read(64, seconds)
        readings.now += 0.9 * believed_s
        assert not readings.is_preferred()
        readings.now += 0.2 * believed_s
        assert readings.is_preferred()
    readings.read(1600, 0.3)
    assert readings.is_preferred(), "what was slow before is forgotten"


def test_one_slow_read_among_many_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = Readings(monkeypatch)
    for _ in range(10):
        readings.read(1600, 0.1)
    readings.now += 300
    readings.read(64, 1.0)
    assert readings.is_preferred()


class Files:
    """A pool and its only tier, with files of these prompts' pages. A read of the first page of all waits."""

    def __init__(self, prompts: Sequence[str], is_bad: bool = False) -> None:
        self.tiers, self._keys, self._is_bad = self, {key for text in prompts for key in name(text)}, is_bad
        self.read: list[bytes] = []
        self.lent: list[str] = []
        self.has_begun, self.may_read = asyncio.Event(), asyncio.Event()

    def __iter__(self) -> Iterator[Any]:
        return iter([self])

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def report_to(self, _follower: Any) -> None: ...

    def find(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._keys), len(keys))

    own = SimpleNamespace(fd=None)

    async def restore(self, keys: Sequence[bytes], into: Sequence[int]) -> list[bool]:
        self.has_begun.set()
        if not self.read:
            await self.may_read.wait()
        self.read += keys
        return [] if self._is_bad else [False] * len(into)

    async def borrow(self, source: kv_pb2.PageSource, keys: Sequence[bytes]) -> None:
        """From another worker, which has nothing of it."""
        self.has_begun.set()
        await self.may_read.wait()
        self.lent.append(source.address)

    def close(self) -> None: ...


def name(text: str) -> list[bytes]:
    """A page's key is all letters up to it."""
    return [text[: end + 1].encode().rjust(16) for end in range(len(text))]


def want(text: str) -> SequenceParams:
    """A prompt of so many whole pages and a token."""
    num_prompt = len(text) * PAGE_TOKENS + 1
    return SequenceParams(text, bytes(num_prompt * TOKEN_BYTES), num_prompt - 1, 1)


def build_tiers(scheduler: Scheduler, pools: Sequence[Files]) -> KVTiers:
    trust = SimpleNamespace(open_channel=None)
    worker: Any = SimpleNamespace(scheduler=scheduler, pools=pools, me=None, trust=trust)
    peers: Any = None
    return KVTiers(worker, peers, EngineThread(lambda: False), WorkerMetrics(scheduler))


async def restore_all(prompts: Sequence[str], files: Files, *, is_borrowed: bool = False) -> list[int]:
    """The others are asked for while the first one is read. Returns how many pages of each are cached then."""
    scheduler = build_scheduler(40, PAGE_TOKENS)
    tiers = build_tiers(scheduler, [] if is_borrowed else [files])
    tiers.borrower.borrow = files.borrow  # type: ignore[method-assign]
    asked = []
    for text in prompts:
        source = kv_pb2.PageSource(address=text) if is_borrowed else None
        asked.append(asyncio.create_task(tiers.restore(want(text), name(text), WAIT_S, source)))
        await files.has_begun.wait()
    files.may_read.set()
    assert all(await asyncio.gather(*asked))
    await tiers.close()
    return [len(scheduler.kv.cache.find(name(text))) for text in prompts]


def test_prompts_that_share_a_beginning_are_all_restored_and_what_they_share_is_read_once() -> None:
    async def run() -> None:
        prompts = ["saaa", "sabb", "sc", "saaaa", "sabbb"]
        files = Files(prompts)
        assert await restore_all(prompts, files) == [4, 4, 2, 5, 5]
        assert sorted(files.read) == sorted({key for text in prompts for key in name(text)})

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_what_cannot_be_read_for_one_prompt_is_tried_for_each_and_then_computed() -> None:
    async def run() -> None:
        files = Files(prompts := ["saa", "sab", "sac"], is_bad=True)
        assert await restore_all(prompts, files) == [0] * 3
        assert files.read.count(name("s")[0]) == 3

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_prompt_without_room_is_refused_and_not_computed_when_some_comes() -> None:
    async def run() -> None:
        files = Files(prompts := ["abcd", "x" * 9])
        files.may_read.set()
        scheduler = build_scheduler(8, PAGE_TOKENS)
        tiers = build_tiers(scheduler, [files])
        held = scheduler.kv.cache.allocate(5)
        with pytest.raises(NoRoomError):
            await tiers.restore(want(prompts[0]), name(prompts[0]), WAIT_S)
        scheduler.kv.cache.release(held)
        assert await tiers.restore(want(prompts[0]), name(prompts[0]), WAIT_S)
        assert len(scheduler.kv.cache.find(name(prompts[0]))) == 4
        assert await tiers.restore(want(prompts[1]), name(prompts[1]), WAIT_S), (
            "it never fits, which its admission says"
        )
        await tiers.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_nothing_is_read_for_a_prompt_that_would_be_refused() -> None:
    """It would evict pages that others come back for, and be read again at each try."""

    async def run() -> None:
        files = Files(["abcd"])
        files.may_read.set()
        scheduler = build_scheduler(8, PAGE_TOKENS)
        tiers = build_tiers(scheduler, [files])
        held = scheduler.kv.cache.allocate(4)  # the four pages that could be read fit, the fifth does not
        with pytest.raises(NoRoomError):
            await tiers.restore(want("abcd"), name("abcd"), WAIT_S)
        assert not files.read
        scheduler.kv.cache.release(held[:1])
        assert await tiers.restore(want("abcd"), name("abcd"), WAIT_S)
        assert len(files.read) == 4
        await tiers.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_each_prompt_asks_its_own_source() -> None:
    async def run() -> None:
        files = Files(prompts := ["saa", "sab"])
        await restore_all(prompts, files, is_borrowed=True)
        assert sorted(files.lent) == prompts

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
