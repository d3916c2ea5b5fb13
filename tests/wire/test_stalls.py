"""Which steps count as stuck."""

import pytest

from wire.stalls import PREDICTED_TIMES, find_stuck


@pytest.mark.parametrize(
    ("age_s", "predicted_s", "is_stuck"),
    [
        (0.0, 0.0, False),
        (30.0, 0.0, False),
        (30.1, 0.0, True),
        (29.0, 0.01, False),  # however far beyond what was predicted
        (30.1, 2.0, True),
        (99.0, 20.0, False),
        (PREDICTED_TIMES * 20.0 + 1, 20.0, True),
    ],
)
def test_a_step_is_stuck_far_beyond_what_was_predicted(age_s: float, predicted_s: float, is_stuck: bool) -> None:
    assert (find_stuck(age_s, predicted_s, stall_s=30.0) is not None) == is_stuck


def test_the_words_name_what_was_predicted_and_the_setting() -> None:
    assert find_stuck(31.0, 0.0, 30.0) == "has been in one engine step for 31 s (--stall-s 30)"
    assert find_stuck(31.0, 2.0, 30.0) == (
        "has been in one engine step for 31 s, predicted to take 2.00 s (--stall-s 30)"
    )
