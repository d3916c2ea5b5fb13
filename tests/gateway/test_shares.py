"""A key can never take a shared bound from the others."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.shares import Shared


def fill(shared: Shared, owner: str) -> int:
    while shared.has_room(owner):
        shared.add(owner)
    return shared.held_by(owner)


def test_one_key_gets_three_quarters_and_the_next_three_quarters_of_the_rest() -> None:
    shared = Shared(1600)
    assert [fill(shared, owner) for owner in ("a", "b", "c")] == [1200, 300, 75]


def test_without_keys_all_of_it_is_given() -> None:
    shared = Shared(10)
    assert fill(shared, "") == 10
    with Shared(10).held("", 4):
        pass


@given(st.integers(16, 5000), st.lists(st.sampled_from("abc"), max_size=60))
def test_a_key_that_holds_nothing_finds_room(most: int, order: list[str]) -> None:
    """Unless three others hold nearly all of a small bound."""
    shared = Shared(most)
    for owner in order:
        amount = max(most // 20, 1)
        if shared.has_room(owner, amount):
            shared.add(owner, amount)
    if most >= 4**4:
        assert shared.has_room("new")
    assert shared.total <= most
    for owner in "abc":
        shared.add(owner, -shared.held_by(owner))
    assert shared.total == 0
