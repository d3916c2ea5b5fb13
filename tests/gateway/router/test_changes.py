"""Changes are looked at once, after whoever made them, by followers that do not depend on one another."""

import asyncio

from structlog.testing import capture_logs

from gateway.router.changes import Changes


def test_any_number_of_changes_is_one_look_and_a_follower_that_fails_hides_it_from_no_other() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        changes = Changes()
        changes.follow(lambda: [][0])
        changes.follow(lambda: seen.append("look"))
        waiting = asyncio.create_task(changes.until(lambda: "look" in seen))
        await asyncio.sleep(0)
        for _ in range(3):
            changes.mark()
        seen.append("changed")
        with capture_logs() as logs:
            assert await waiting, "the waiting see what followers have done"
        assert seen == ["changed", "look"] and [one["event"] for one in logs] == ["a change was not followed"]

    asyncio.run(scenario())


def test_a_change_that_a_follower_makes_is_looked_at_after_all_have_seen_the_first() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        changes = Changes()

        def change_again() -> None:
            seen.append("first")
            if len(seen) == 1:
                changes.mark()

        changes.follow(change_again)
        changes.follow(lambda: seen.append("second"))
        changes.mark()
        assert await changes.until(lambda: len(seen) == 4, 10.0)

    asyncio.run(scenario())
    assert seen == ["first", "second"] * 2


def test_a_condition_that_fails_is_its_waiters_error_and_holds_up_no_other() -> None:
    async def scenario() -> None:
        changes, seen = Changes(), list[str]()

        def fail_later() -> bool:
            return bool(seen) and seen[1] == "never"

        failing = asyncio.create_task(changes.until(fail_later))
        other = asyncio.create_task(changes.until(lambda: bool(seen)))
        await asyncio.sleep(0)
        seen.append("changed")
        changes.mark()
        assert await asyncio.wait_for(other, 10.0)
        await asyncio.gather(failing, return_exceptions=True)
        assert isinstance(failing.exception(), IndexError) and not changes._waiting

    asyncio.run(scenario())


def test_a_wait_ends_at_its_time_and_is_then_forgotten() -> None:
    async def scenario() -> None:
        changes = Changes()
        assert not await changes.until(lambda: False, 0.0) and await changes.until(lambda: True, 0.0)
        leaving = asyncio.create_task(changes.until(lambda: False))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled() and not changes._waiting

    asyncio.run(scenario())
