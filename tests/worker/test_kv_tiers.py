"""What is read from files, and whether that pays. Pure."""

import pytest

from worker.kv_cache import RestorePlan, plan_restore
from worker.reading import prefers_reading

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


def test_what_takes_less_time_is_done() -> None:
    assert prefers_reading(1000, 0, 0.0, 500.0) and prefers_reading(1000, 0, 500.0, 0.0)  # not measured
    assert prefers_reading(1000, 0, 501.0, 500.0) and not prefers_reading(1000, 0, 499.0, 500.0)
    assert prefers_reading(1000, 1000, 251.0, 500.0)  # it would wait for the tokens of others
    assert prefers_reading(10, 0, 1000.0, 1e6)  # short
