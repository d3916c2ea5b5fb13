"""Turns go to keys one after another."""

import asyncio

from gateway.fair_turns import FairTurns


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
    await asyncio.wait_for(third, 5)
    assert second.cancelled() and not turns._waiting
