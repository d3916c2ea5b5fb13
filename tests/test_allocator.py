"""The page allocator against a model that only knows which pages it was given."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kvcache.allocator import NoRoomError, PageAllocator, num_pages_for


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates and frees at random, in parts and out of order."""

    @initialize(num_pages=st.integers(1, 12))
    def create(self, num_pages: int) -> None:
        self.generations = [0] * num_pages
        self.allocator = PageAllocator(num_pages, self.generations)
        self.held: dict[int, int] = {}  # page |-> its generation when it was given out

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

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.allocator.free(pages)
        for page in pages:
            del self.held[page]

    @rule(data=st.data())
    def free_what_nobody_holds(self, data: st.DataObject) -> None:
        strangers = sorted(set(range(self.allocator.num_pages)) - self.held.keys())
        if strangers:
            with pytest.raises(ValueError, match="nobody holds it"):
                self.allocator.free([data.draw(st.sampled_from(strangers))])

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        assert self.allocator.num_used == len(self.held)
        assert self.allocator.num_free == self.allocator.num_pages - len(self.held)
        for page, generation in self.held.items():
            assert self.generations[page] == generation, "a held page got another owner"


AllocatorMachine.TestCase.settings = settings(derandomize=True, deadline=None, max_examples=50, stateful_step_count=30)
TestAllocatorMachine = AllocatorMachine.TestCase


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_page_begun_is_a_page(tokens: int, pages: int) -> None:
    assert num_pages_for(tokens, 16) == pages


def test_check_finds_a_page_that_is_free_twice() -> None:
    allocator = PageAllocator(2, [0, 0])
    allocator._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        allocator.check()
