"""How long the KV of a session is kept, by when it asked before."""

from pytest import approx

from gateway.router.session_gaps import FADING, MARGIN, MAX_KEEP_S, MAX_SESSIONS, SessionGaps


def test_a_session_is_kept_for_twice_its_longest_gap_which_fades() -> None:
    gaps = SessionGaps()
    times = [0.0, 3.0, 13.0, 14.0, 15.0, 2000.0]
    kept = [gaps.expect("s", f"call {at}", at) for at in times]
    assert kept == approx([0.0, *(MARGIN * gap for gap in (3.0, 10.0, FADING * 10.0, FADING**2 * 10.0)), MAX_KEEP_S])


def test_choices_of_one_request_are_no_turns_and_sessions_do_not_mix() -> None:
    gaps = SessionGaps()
    assert [gaps.expect("s", "one", at) for at in (0.0, 1.0)] == [0.0, 0.0]
    assert gaps.expect("other", "x", 4.0) == 0.0
    assert [gaps.expect("s", "two", at) for at in (5.0, 5.5)] == [MARGIN * 5.0] * 2
    assert gaps.expect("", "one", 6.0) == gaps.expect("", "two", 9.0) == 0.0, "no session"


def test_the_session_is_forgotten_that_asked_longest_ago() -> None:
    gaps = SessionGaps()
    for number in range(MAX_SESSIONS):
        gaps.expect(str(number), "a", 0.0)
    gaps.expect("0", "b", 1.0)
    gaps.expect("new", "a", 1.0)
    assert gaps.expect("1", "b", 2.0) == 0.0
    assert gaps.expect("0", "c", 2.0) > 0.0
