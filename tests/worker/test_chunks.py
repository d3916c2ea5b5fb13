"""How many prompt tokens a step computes, learnt from the step times of made-up devices."""

import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.chunks import CHUNK_S, MOST_SHRINKING, STRETCH, ChunkSizer
from worker.itl_goal import MOST_MARGIN, STARVED, GoalSizer
from worker.plan import FEWEST, TokenBudget


@given(quiet_s=st.floats(0.001, 1), token_s=st.floats(1e-6, 0.1), most=st.integers(1, 2048), waste=st.floats(0, 1))
def test_steps_with_prompts_become_as_long_as_they_may_be(
    quiet_s: float, token_s: float, most: int, waste: float
) -> None:
    sizer = ChunkSizer(most)
    for _ in range(5):
        sizer.note_step(4, 0, quiet_s)
    for _ in range(60):
        assert min(FEWEST, most) <= sizer.beside <= most
        sizer.note_step(4, sizer.beside, max(quiet_s, token_s * sizer.beside) + waste * quiet_s * 0.5)
    taken = max(quiet_s, token_s * sizer.beside) + waste * quiet_s * 0.5
    if FEWEST < sizer.beside < most:
        assert 0.5 * STRETCH * quiet_s < taken < 1.2 * STRETCH * quiet_s + 2 * token_s
    else:
        assert sizer.beside == most or taken + 2 * token_s > 0.9 * STRETCH * quiet_s


def compute(sizer: ChunkSizer, num_tokens: int, cost: Callable[[int], float]) -> list[int]:
    """The chunks of a prompt without answers; `cost`: seconds of a step by its tokens."""
    sizes = []
    while num_tokens:
        sizes.append(min(sizer.alone, num_tokens))
        sizer.note_step(0, sizes[-1], cost(sizes[-1]))
        num_tokens -= sizes[-1]
    return sizes


@pytest.mark.parametrize(
    ("token_s", "sizes", "num_later"),
    [
        (0.001, [16, 32, 64, 128, 256, 512, 512, 480], 4),
        (0.01, [16, 32, 64, 128, *[200] * 8, 160], 10),
        (0.1, [16, *[20] * 99, 4], 100),
        (0.5, [16] * 125, 125),
    ],
)
def test_chunks_begin_small_on_any_machine_and_grow_as_measured(
    token_s: float, sizes: list[int], num_later: int
) -> None:
    sizer = ChunkSizer(512)
    assert compute(sizer, 2000, lambda size: size * token_s) == sizes
    assert len(compute(sizer, 2000, lambda size: size * token_s)) == num_later, "the next prompt"


@given(base_s=st.floats(0, 1.5), token_s=st.floats(1e-6, 0.1), share=st.floats(0, 1))
def test_no_step_without_answers_is_long(base_s: float, token_s: float, share: float) -> None:
    """Also where attention takes a token's time again for every 2,000 tokens before it, or more rarely."""
    sizer, begin = ChunkSizer(512), 0
    while begin < 4000:
        size = sizer.alone
        seconds = base_s + size * token_s * (1 + share * begin / 2000)
        assert seconds <= 1.5 * CHUNK_S or size == FEWEST
        assert seconds <= 1.5 * max(sizer.predict(0, size), CHUNK_S) or not begin
        sizer.note_step(0, size, seconds)
        begin += size


def test_sizes_that_took_far_too_long_are_rarely_tried_again() -> None:
    """A device without the instructions that large products need."""
    sizes = compute(ChunkSizer(512), 4000, lambda size: size * (0.01 if size < 128 else 0.25))
    assert 0 < sum(size >= 128 for size in sizes) <= len(sizes) / 10


def test_other_steps_may_be_longer() -> None:
    """Those of models without answers."""
    longer = ChunkSizer(512, chunk_s=4 * CHUNK_S)
    assert compute(longer, 2000, lambda size: size * 0.01) == [16, 32, 64, 128, 256, 512, 512, 480]
    longer.note_step(0, 512, 12 * CHUNK_S)
    assert longer.alone == pytest.approx(512 / 3, abs=1)


def test_a_pause_costs_a_few_small_chunks() -> None:
    sizer = ChunkSizer(512)
    compute(sizer, 2000, lambda size: size * 0.001)
    sizer.note_step(0, 512, 60.0)
    sizes = compute(sizer, 2000, lambda size: size * 0.001)
    assert sizes[0] == 17 and min(sizes[1:-1]) >= 256
    sizer.note_step(4, 0, 0.01)
    sizer.note_step(4, 0, 60.0)
    assert sizer.predict(4, 0) < 0.02


def test_answers_and_prompts_share_what_was_learnt() -> None:
    sizer = ChunkSizer(512)
    assert sizer.predict(3, 16) == 0.0
    sizer.note_step(1, 0, 0.1)
    assert sizer.predict(3, 16) == pytest.approx(1.7), "before the first prompt: a step for each token"
    sizer.note_step(1, 16, 16.1)  # far longer than it may be: believed at once
    assert sizer.predict(3, 16) == pytest.approx(16.1)
    assert (sizer.alone, sizer.beside) == (FEWEST, FEWEST)


def test_what_any_chunk_adds_is_told_apart_from_its_tokens() -> None:
    sizer = ChunkSizer(512)
    sizer.note_step(4, 0, 0.1)
    for size in (16, 64) * 20:
        sizer.note_step(4, size, 0.1 + 0.05 + 0.001 * size)
    assert sizer.fixed_s == pytest.approx(0.05, rel=0.02) and sizer.token_s == pytest.approx(0.001, rel=0.02)
    assert sizer.predict(4, 200) == pytest.approx(0.35, rel=0.02) and sizer.predict(4, 0) == pytest.approx(0.1)
    for _ in range(20):
        sizer.note_step(4, 16, 0.1 + 0.016)
    assert sizer.fixed_s <= 0.017, "a chunk cannot cost less than its fixed part"


def test_prompts_get_more_where_many_of_them_wait() -> None:
    budget = TokenBudget(256, "--flag", beside_answers=40)
    cases = ((1, 0), (2, 4), (4, 4), (5, 4), (30, 1), (2, 16), (5, 30))
    assert [budget.beside(prompts, answers) for prompts, answers in cases] == [256, 40, 80, 100, 256, 40, 100]
    assert TokenBudget(256, "--flag").beside(1, 9) == 256


NOISE, LATE = 1.05, 1.3  # times what a step takes: of any, and of one in 50


class Device:
    """Steps of `base_s`, `answer_s` for each answer and `token_s` for each prompt token, of which some take longer."""

    def __init__(self, base_s: float, answer_s: float, token_s: float, seed: int) -> None:
        self.base_s, self.answer_s, self.token_s = base_s, answer_s, token_s
        self.rng = random.Random(seed)

    def seconds(self, num_answers: int, num_tokens: int) -> float:
        exact = self.base_s + self.answer_s * num_answers + self.token_s * num_tokens
        return exact * self.rng.uniform(2 - NOISE, NOISE) * (LATE if self.rng.random() < 0.02 else 1.0)


@given(
    base_s=st.floats(0.002, 0.05), answer_share=st.floats(0.0, 0.5), token_share=st.floats(0.005, 0.05),
    goal_share=st.floats(2.5, 20), seed=st.integers(0, 9),
)  # fmt: skip
def test_steps_keep_the_goal_with_as_many_answers_as_are_taken_and_prompts_go_on(
    base_s: float, answer_share: float, token_share: float, goal_share: float, seed: int
) -> None:
    device, goal_s = Device(base_s, answer_share * base_s, token_share * base_s, seed), goal_share * base_s
    sizer, num_answers, steps, num_tokens, taken = GoalSizer(256, FEWEST, goal_s=goal_s), 0, [], 0, []
    for number in range(1500):
        if number % 4 == 0:
            num_answers = min(sizer.most_answers(64), num_answers + 1)
        size = sizer.beside_by_goal(num_answers)
        assert size is not None
        seconds = device.seconds(num_answers, size)
        sizer.note_step(num_answers, size, seconds)
        steps.append(seconds)
        taken.append(num_answers)
        num_tokens += size
    settled = sorted(steps[500:])
    assert settled[int(0.97 * len(settled))] <= 1.02 * goal_s
    assert settled[int(0.99 * len(settled))] <= LATE * NOISE * goal_s, "only late steps are beyond it"
    assert num_tokens >= FEWEST * len(steps) / STARVED
    chunk_s = MOST_SHRINKING * FEWEST * device.token_s  # as it may be believed after a late one
    fitting = (goal_s / MOST_MARGIN - base_s - chunk_s) / max(device.answer_s, 1e-9)
    assert median(taken[500:]) >= min(int(fitting * 0.9), 64), "no more are refused than the goal asks for"


def test_where_the_goal_cannot_be_kept_one_answer_and_every_prompt_go_on() -> None:
    sizer = GoalSizer(256, FEWEST, goal_s=0.01)
    sizes = []
    for _ in range(20 * STARVED):
        sizes.append(sizer.beside_by_goal(4) or 0)
        sizer.note_step(4, sizes[-1], 0.05 + 0.001 * sizes[-1])
    assert sizer.most_answers(64) == 1 and set(sizes[STARVED:]) == {0, FEWEST}
    assert all(any(sizes[at : at + STARVED]) for at in range(STARVED, len(sizes) - STARVED))


def test_without_a_goal_nothing_is_limited_by_it() -> None:
    sizer = ChunkSizer(256)
    sizer.note_step(4, 0, 100.0)
    assert (sizer.beside_by_goal(4), sizer.most_answers(64), sizer.has_goal) == (None, 64, False)
