"""Slots of adapters: given out, kept and freed; and that a sequence has its own from admission to its end."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sequence_params import answer, awaited, build_scheduler, plan, prompt, run, step
from worker.adapters.slots import AdapterSlots
from worker.interfaces import NoSlotError, UnknownAdapterError
from worker.prefix_cache import NoRoomError
from worker.scheduler import Scheduler
from worker.sequences import HeldAdapter, Phase

PAGE = 4


def load(slots: AdapterSlots, *digests: str) -> None:
    for digest in digests:
        if not slots.rename(digest, "name"):
            slots.add(digest, slots.new_key(digest), "name", 10)


def build(num_slots: int, *digests: str, num_pages: int = 60) -> Scheduler:
    scheduler = build_scheduler(num_pages, PAGE)
    scheduler.adapters = AdapterSlots(num_slots)
    load(slots_of(scheduler), *digests)
    return scheduler


def slots_of(scheduler: Scheduler) -> AdapterSlots:
    assert isinstance(scheduler.adapters, AdapterSlots)
    return scheduler.adapters


@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_held_slot_keeps_its_adapter_and_memory_is_freed_once_without_holders(rng: Random, num_slots: int) -> None:
    slots, held = AdapterSlots(num_slots), list[tuple[str, HeldAdapter]]()
    hosted, known, used = set[str](), set[str](), list[str]()  # keys; digests; digests with a slot, latest use last
    for _ in range(40):
        digest = rng.choice("abcde")
        match rng.randrange(5):
            case 0:
                load(slots, digest)
                known.add(digest)
                hosted |= {one.key for one in slots._loaded.values()}
            case 1:
                slots.unload(digest)
                known.discard(digest)
            case 2 if held:
                digest, _one = held.pop(rng.randrange(len(held)))
                slots.release(digest)
                used = [other for other in used if other != digest] + [digest]
            case _:
                before = {other: one.slot for other, one in slots._loaded.items()}
                busy = {one.slot for _, one in held}
                try:
                    one = slots.acquire(digest)
                except UnknownAdapterError:
                    assert digest not in known
                    continue
                except NoRoomError:
                    assert digest in known and len(busy) == num_slots and before[digest] < 0
                    continue
                lost = [other for other, slot in before.items() if slot == one.slot and other != digest]
                idle = [other for other in used if before.get(other, -1) not in {-1, *busy}]
                assert lost in ([], idle[:1]), "the least recently used one"
                assert one.key in hosted and (before[digest] in (-1, one.slot))
                assert all((one.slot == two.slot) == (one.key == two.key) for _, two in held)
                held.append((digest, one))
                used = [other for other in used if other != digest] + [digest]
        slots.check([one for _, one in held])
        assert slots.names.keys() == known and slots.num_bytes == 10 * slots.num_loaded
        for key in slots.take_dropped():
            hosted.remove(key)
            assert key not in {one.key for _, one in held}
        assert hosted == {one.key for one in slots._loaded.values()}
        assert Counter(digest for digest, _ in held).keys() <= slots._loaded.keys()


def test_requests_for_more_adapters_than_slots_wait() -> None:
    scheduler = build(1, "a", "b")
    first = scheduler.admit(answer(1, 5, 3, adapter="a"), 0.0)
    second = scheduler.admit(answer(2, 5, 3, adapter="a"), 0.0)
    plain = scheduler.admit(answer(3, 5, 3), 0.0)
    assert first.adapter == second.adapter != plain.adapter
    for digest, error in (("b", NoSlotError), ("c", UnknownAdapterError)):
        with pytest.raises(error, match="--max-loras" if digest == "b" else "'c' is not loaded here"):
            scheduler.admit(answer(4, 5, 3, adapter=digest), 0.0)
    scheduler.check()
    run(scheduler)
    assert scheduler.admit(answer(4, 5, 3, adapter="b"), 0.0).adapter.slot == first.adapter.slot
    with pytest.raises(UnknownAdapterError, match="which takes none"):
        build_scheduler(60, PAGE).admit(answer(4, 5, 3, adapter="b"), 0.0)


def test_its_slot_is_held_in_every_phase() -> None:
    scheduler = build(1, "a", num_pages=9)
    scheduler.admit(answer(1, 3, 30), 0.0)
    preempted = scheduler.admit(answer(2, 15, 12, adapter="a"), 0.0)
    while preempted.phase is not Phase.PREEMPTED:
        step(scheduler)
    assert slots_of(scheduler).num_held == 1
    scheduler.abort("g")
    assert slots_of(scheduler).num_held == 0
    received = scheduler.admit(awaited(3, 9, 2, adapter="a"), 0.0)
    assert received.phase is Phase.RECEIVING and slots_of(scheduler).num_held == 1
    scheduler.abort("g")
    kept = scheduler.admit(prompt(4, 9, adapter="a"), 0.0, is_kept=True)
    planned = plan(scheduler, 99)
    slots_of(scheduler).unload("a")
    scheduler.end(kept)
    assert slots_of(scheduler).num_held == 1 and not scheduler.adapters.take_dropped(), "a step is launched"
    for one in planned:
        scheduler.finish_step(one, [], 0.0)
    scheduler.check()
    assert scheduler.adapters.take_dropped() == [kept.adapter.key]


def test_prompts_share_pages_only_within_an_adapter() -> None:
    scheduler = build(2, "a", "b")
    found = []
    for handle, digest in enumerate(("a", "", "b", "a", "b", ""), 1):
        found.append(scheduler.admit(answer(handle, 9, 1, first=7, adapter=digest), 0.0).num_cached)
        run(scheduler)
    assert found == [0, 0, 0, 8, 8, 8]
    salted = answer(9, 9, 1, first=7, cache_salt=f"{'a'}\0")  # what a client may send
    assert scheduler.admit(salted, 0.0).num_cached == 0
