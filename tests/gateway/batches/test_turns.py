"""The answers of a batch's line: no more run than are allowed, whatever ends when."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway.batches.turns import LineTurns


class Answers:
    """Answers of one line, each until it may end."""

    def __init__(self, count: int) -> None:
        self.num_ended_turns = 0
        self.turns = LineTurns(self.count)
        self.running: set[int] = set()
        self.may_end = [asyncio.Event() for _ in range(count)]
        self.tasks = [asyncio.create_task(self.read(index)) for index in range(count)]

    def count(self) -> None:
        self.num_ended_turns += 1

    async def read(self, index: int) -> None:
        async for _ in self.turns.hold(self.answer(index)):
            pass

    async def answer(self, index: int) -> AsyncGenerator[int, None]:
        self.running.add(index)
        try:
            yield index
            await self.may_end[index].wait()
        finally:
            self.running.remove(index)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_runs_and_more_as_they_are_allowed() -> None:
    answers = Answers(5)
    await settle()
    assert (answers.running, answers.turns.num_waiting) == ({0}, 4)
    answers.turns.allow()
    await settle()
    assert (answers.running, answers.turns.num_allowed) == ({0, 1}, 2)
    for event in answers.may_end:
        event.set()
        await settle()
    assert (answers.turns.num_allowed, answers.num_ended_turns) == (1, 1)
    await asyncio.gather(*answers.tasks)


@pytest.mark.parametrize("is_cancelled_first", [True, False])
async def test_a_turn_is_never_lost(is_cancelled_first: bool) -> None:
    answers = Answers(3)
    await settle()
    if is_cancelled_first:
        answers.tasks[1].cancel()
        answers.may_end[0].set()
    else:
        answers.turns.allow()
        answers.tasks[1].cancel()
        answers.may_end[0].set()
    await settle()
    assert answers.running == {2} and answers.turns.num_waiting == 0
    answers.may_end[2].set()
    await asyncio.gather(*answers.tasks, return_exceptions=True)
    assert answers.turns.num_allowed == 1
