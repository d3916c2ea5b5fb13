"""How long the KV of a session is kept, by when it asked before."""

from pytest import approx

from gateway.policies.session_gaps import (
    FADING,
    FIRST_KEEP_S,
    JUDGED_S,
    MARGIN,
    MAX_KEEP_S,
    MAX_SESSIONS,
    SessionGaps,
)
from gateway.router.request import YIELDING_S
from tests.gateway.router.test_placer import request
from wire.retention import ALL_TOKENS, KeptPart


def test_a_session_is_kept_for_twice_its_longest_gap_which_fades() -> None:
    gaps = SessionGaps()
    times = [0.0, 3.0, 13.0, 14.0, 15.0, 2000.0]
    kept = [gaps.expect("s", f"call {at}", at) for at in times]
    assert kept == approx(
        [FIRST_KEEP_S, *(MARGIN * gap for gap in (3.0, 10.0, FADING * 10.0, FADING**2 * 10.0)), MAX_KEEP_S]
    )


def test_choices_of_one_request_are_no_turns_and_sessions_do_not_mix() -> None:
    gaps = SessionGaps()
    assert [gaps.expect("s", "one", at) for at in (0.0, 1.0)] == [FIRST_KEEP_S] * 2
    assert gaps.expect("other", "x", 4.0) == FIRST_KEEP_S
    assert [gaps.expect("s", "two", at) for at in (5.0, 5.5)] == [MARGIN * 5.0] * 2
    assert gaps.expect("", "one", 6.0) == gaps.expect("", "two", 9.0) == 0.0, "no session"


def test_the_session_is_forgotten_that_asked_longest_ago() -> None:
    gaps = SessionGaps()
    for number in range(MAX_SESSIONS):
        gaps.expect(str(number), "a", 0.0)
    gaps.expect("0", "b", 1.0)
    gaps.expect("new", "a", 1.0)
    assert gaps.expect("1", "b", 2.0) == FIRST_KEEP_S
    assert gaps.expect("0", "c", 2.0) == MARGIN


def test_a_first_turn_is_kept_while_most_sessions_come_back() -> None:
    gaps, now = SessionGaps(), 0.0

    def see(*num_turns: int) -> float:
        """Sessions of so many turns; what the first turn of another one is kept for, once they are judged."""
        nonlocal now
        for number, count in enumerate(num_turns):
            for turn in range(count):
                gaps.expect(f"{now} {number}", f"{turn}", now + turn)
        now += JUDGED_S + 10.0
        return gaps.expect(f"{now}", "a", now)

    assert see(*[2] * 6, 3, 4, 5) == FIRST_KEEP_S
    assert see(1, 1, 1) == FIRST_KEEP_S, "most came back"
    assert see(1, 1) == 0.0
    assert see(*[2] * 9) == FIRST_KEEP_S


def test_a_request_that_has_waited_long_is_no_session_to_workers() -> None:
    one = request()
    assert one.retention is None
    one.keep_s = 7.0
    assert one.retention is not None and one.retention.parts == [KeptPart(ALL_TOKENS, 7.0)]
    one.queue_s = YIELDING_S
    assert one.retention is None, "so it need not wait for its own key's sessions"
