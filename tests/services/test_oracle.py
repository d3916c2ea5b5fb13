"""The oracle returns the same answer whatever candidates it is given."""

import pytest

from demo.paths import TARGET_DIR
from tests.support.oracle import Oracle, random_prompt

NUM_TOKENS = 40
PROMPT = random_prompt(30, 300, seed=1)


@pytest.fixture(scope="module")
def answer() -> list[int]:
    return Oracle(TARGET_DIR).answer(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("place", [0, 17, NUM_TOKENS - 1])
def test_a_guess_with_a_wrong_token_changes_nothing(answer: list[int], place: int) -> None:
    wrong = [*answer[:place], answer[place] + 1, *answer[place + 1 :]]
    assert Oracle(TARGET_DIR).answer(PROMPT, NUM_TOKENS, guess=wrong) == answer
