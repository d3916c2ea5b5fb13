"""The page allocator against a model that only knows which pages it was given."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kvcache.allocator import NoRoomError, PageAllocator, num_pages_for


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates, shares and frees at random, in parts and out of order."""

    @initialize(num_pages=st.integers(1, 12))
    def create(self, num_pages: int) -> None:
        self.generations = [0] * num_pages
        self.allocator = PageAllocator(num_pages, self.generations)
        self.held: dict[int, int] = {}  # page |-> its generation when it was given out
        self.holders: Counter[int] = Counter()  # page |-> how many times it must be freed

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        free, before = self.allocator.num_free, list(self.generations)
        if count > free:
            with pytest.raises(NoRoomError, match=f"{count} pages wanted, {free} of {len(before)} free"):
                self.allocator.allocate(count)
            assert self.generations == before
            return
        pages = self.allocator.allocate(count)
        assert len(set(pages)) == count
        assert not self.held.keys() & set(pages)
        for page in pages:
            assert self.generations[page] == before[page] + 1
            self.held[page] = self.generations[page]
            self.holders[page] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held))))
        self.allocator.share(pages)
        self.holders.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        held = sorted(self.holders.elements())
        pages = [held[at] for at in data.draw(st.lists(st.integers(0, len(held) - 1), unique=True))]
        self.allocator.free(pages)
        self.holders.subtract(pages)
        self.held = {page: generation for page, generation in self.held.items() if self.holders[page]}

    @rule(data=st.data())
    def touch_what_nobody_holds(self, data: st.DataObject) -> None:
        strangers = sorted(set(range(self.allocator.num_pages)) - self.held.keys())
        if strangers:
            touch = data.draw(st.sampled_from([self.allocator.free, self.allocator.share]))
            with pytest.raises(ValueError, match="nobody holds it"):
                touch([data.draw(st.sampled_from(strangers))])

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check(self.holders.elements())
        assert self.allocator.num_used == len(self.held)
        assert self.allocator.num_free == self.allocator.num_pages - len(self.held)
        for page, generation in self.held.items():
            assert self.generations[page] == generation, "a held page got another owner"


AllocatorMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestAllocatorMachine = AllocatorMachine.TestCase


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_page_begun_is_a_page(tokens: int, pages: int) -> None:
    assert num_pages_for(tokens, 16) == pages


def test_check_finds_a_page_that_is_free_twice() -> None:
    allocator = PageAllocator(2, [0, 0])
    allocator._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        allocator.check()


def test_check_finds_a_holder_too_many_and_one_too_few() -> None:
    allocator = PageAllocator(2, [0, 0])
    (page,) = allocator.allocate(1)
    allocator.check([page])
    for wrong in ([page, page], [], [page, 1 - page]):
        with pytest.raises(AssertionError, match="holders"):
            allocator.check(wrong)


def test_a_shared_page_keeps_its_generation_until_its_last_holder_is_gone() -> None:
    generations = [0]
    allocator = PageAllocator(1, generations)
    pages = allocator.allocate(1)
    allocator.share(pages)
    allocator.free(pages)
    with pytest.raises(NoRoomError):
        allocator.allocate(1)
    assert generations == [1]
    allocator.free(pages)
    assert allocator.allocate(1) == pages
    assert generations == [2]
