"""Bodies under way and answers not read are bounded together."""

import pytest

from gateway.errors import ApiError
from gateway.held import IDLE_S, Held, Holder


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_oldest_idle_gives_way() -> None:
    clock, gone = Clock(), list[int]()
    held = Held(10, clock)
    holders = [Holder("", lambda number=number: gone.append(number)) for number in range(6)]  # type: ignore[misc]
    for holder in holders[:5]:
        held.hold(holder, 2)
    with pytest.raises(ApiError, match="too much at once"):
        held.hold(holders[5], 1)
    held.end(holders[5])
    clock.now += IDLE_S
    held.hold(holders[0], 2)
    held.hold(holders[5], 3)
    assert gone == [1, 2] and held.bytes.total == 9
    for holder in holders:
        held.end(holder)
    assert held.bytes.total == 0


def test_a_key_beyond_its_share_makes_room_itself() -> None:
    clock, gone = Clock(), list[str]()
    held = Held(16, clock)
    mine, other = Holder("a", lambda: gone.append("a")), Holder("b", lambda: gone.append("b"))
    held.hold(other, 1)
    held.hold(mine, 11)
    clock.now += IDLE_S
    more = Holder("a", lambda: gone.append("more"))
    held.hold(more, 5)
    assert gone == ["a"]
    with pytest.raises(ApiError):
        held.hold(more, 12)
