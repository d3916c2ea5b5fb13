"""Turns go to keys one after another."""

import asyncio
import time

import pytest

from gateway import fair_turns
from gateway.fair_turns import SHORT_BYTES, FairTurns, LoopTurn

WAIT_S = 60.0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_keys_take_turns_and_one_turn_is_never_a_keys() -> None:
    turns, began = FairTurns(3), list[str]()

    async def work(owner: str) -> None:
        await turns.take(owner)
        began.append(owner)

    tasks = [asyncio.create_task(work(owner)) for owner in "aaaaaabb"]
    await settle()
    assert began == ["a", "a", "b"], "two of three are the most of one key"
    tasks[2].cancel()
    await settle()
    for _ in range(3):
        turns.give_back("a")
        await settle()
    turns.give_back("b")
    await settle()
    assert "".join(began) == "aababaa", "the third of a left; b's second one comes before a's last two"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not turns._waiting


async def test_without_keys_all_turns_are_given() -> None:
    turns = FairTurns(2)
    await turns.take("")
    await turns.take("")
    third = asyncio.create_task(turns.take(""))
    await settle()
    assert not third.done()
    turns.give_back("")
    await third


async def test_a_turn_that_comes_with_a_cancel_is_given_on() -> None:
    turns = FairTurns(1)
    await turns.take("a")
    second, third = (asyncio.create_task(turns.take(owner)) for owner in "bc")
    await settle()
    turns.give_back("a")
    second.cancel()
    await third
    assert second.cancelled()


async def test_a_turn_is_not_given_to_one_that_is_cancelled_just_before() -> None:
    turns = FairTurns(1)
    await turns.take("a")
    second, third = (asyncio.create_task(turns.take(owner)) for owner in "bc")
    await settle()
    second.cancel()
    turns.give_back("a")
    await asyncio.wait_for(third, WAIT_S)
    assert second.cancelled() and not turns._waiting


LONG = SHORT_BYTES + 1
STEP_S = 0.01


def work() -> None:
    """A step."""
    until = time.thread_time() + STEP_S
    while time.thread_time() < until:
        pass


async def test_others_run_between_any_two_steps_of_long_requests() -> None:
    turns, events, is_over = FairTurns(1), list[str](), False

    async def request(name: str) -> None:
        turn = LoopTurn(turns, "a", LONG)
        for at in range(3):
            await (turn.step() if at < 2 else turn.last_step())
            events.append(name)
            work()

    async def other() -> None:
        while not is_over:
            await asyncio.sleep(0)
            events.append("-")

    others = asyncio.create_task(other())
    await asyncio.gather(*map(request, "abcd"))
    is_over = True
    await others
    assert [name for name in events if name != "-"] == list("aaabbbcccddd"), "no two are half read"
    assert all(len(few) <= 1 for few in "".join(events).split("-")), "others run between any two steps"


async def test_short_requests_wait_for_no_turn() -> None:
    turns = FairTurns(1)
    await LoopTurn(turns, "a", LONG).step()
    await asyncio.wait_for(LoopTurn(turns, "b", SHORT_BYTES).step(), WAIT_S)


@pytest.mark.parametrize("how", ["cancelled", "ended twice", "forgotten"])
async def test_a_turn_at_the_loop_is_given_back(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(fair_turns, "MOST_TURN_S", 0.01 if how == "forgotten" else 60.0)
    turns = FairTurns(1)
    turn, following = LoopTurn(turns, "a", LONG), LoopTurn(turns, "b", LONG)
    await turn.step()
    waiting = asyncio.create_task(following.step())
    await settle()
    assert how == "forgotten" or not waiting.done()
    if how == "cancelled":
        waiting.cancel()
        await settle()
        following.end()
        waiting = asyncio.create_task(LoopTurn(turns, "b", LONG).step())
    if how != "forgotten":
        turn.end()
        turn.end()
    await asyncio.wait_for(waiting, WAIT_S)
    assert turns._running.total() == 1
