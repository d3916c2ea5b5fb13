"""How many prompt tokens run beside answers, learnt from the step times of a made-up device."""

from hypothesis import given
from hypothesis import strategies as st

from worker.chunks import FEWEST, STRETCH, ChunkSizer
from worker.plan import Budget


@given(quiet_s=st.floats(0.001, 1), token_s=st.floats(1e-6, 0.1), most=st.integers(1, 2048), waste=st.floats(0, 1))
def test_steps_with_prompts_become_as_long_as_they_may_be(
    quiet_s: float, token_s: float, most: int, waste: float
) -> None:
    sizer = ChunkSizer(most)
    for _ in range(5):
        sizer.note_step(4, 0, quiet_s)
    for _ in range(60):
        assert min(FEWEST, most) <= sizer.size <= most
        sizer.note_step(4, sizer.size, max(quiet_s, token_s * sizer.size) + waste * quiet_s * 0.5)
    taken = max(quiet_s, token_s * sizer.size) + waste * quiet_s * 0.5
    if FEWEST < sizer.size < most:
        assert 0.5 * STRETCH * quiet_s < taken < 1.2 * STRETCH * quiet_s + 2 * token_s
    else:
        assert sizer.size == most or taken > 0.9 * STRETCH * quiet_s


def test_a_short_prompt_does_not_let_it_grow_and_a_slow_step_shrinks_it() -> None:
    sizer = ChunkSizer(256)
    first = sizer.size
    sizer.note_step(0, 100, 0.1)  # no answers: not counted
    sizer.note_step(2, first, 9.0)  # before anything is known
    sizer.note_step(2, 0, 0.1)
    sizer.note_step(2, 5, 0.1)
    assert sizer.size == first
    sizer.note_step(2, first, 0.34)
    assert FEWEST < sizer.size < first, "one slow step may be chance"
    sizer.note_step(2, sizer.size, 0.34)
    assert sizer.size == FEWEST


def test_prompts_get_more_where_many_of_them_wait() -> None:
    budget = Budget(256, "--flag", beside_answers=40)
    cases = ((1, 0), (2, 4), (4, 4), (5, 4), (30, 1), (2, 16), (5, 30))
    assert [budget.beside(prompts, answers) for prompts, answers in cases] == [256, 40, 80, 100, 256, 40, 100]
    assert Budget(256, "--flag").beside(1, 9) == 256
