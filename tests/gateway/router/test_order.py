"""Which request is next: no starvation, fair shares; and when a new one would get its first token."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.policies.forecast import Forecast
from gateway.router import order as order_module
from gateway.router.order import TURNS, Order
from gateway.router.request import Request
from gateway.router.worker_view import ChunkCosts, WorkerView
from tests.support.combinations import examples
from tests.support.virtual_fleet import wanted
from tests.support.worker_views import DECODE, PREFILL


def expect(request: Request) -> float:
    return request.wanted.max_tokens


@dataclass(eq=False)
class Asked:
    request: Request
    tokens: int  # that it takes


def asked(at: float, priority: int = 5, owner: str = "", tokens: int = 10) -> Asked:
    request = Request(wanted(prompt=(1,), max_tokens=tokens, priority=priority, owner=owner), 1e9, 0.0, at)
    return Asked(request, tokens)


def serve(order: Order[Asked]) -> Asked:
    """The next one comes and goes."""
    one = next(order.walk())
    order.place(one, expect(one.request))
    order.leave_place(one.request, one.tokens - expect(one.request))
    order.check()
    return one


def starves(order: Order[Asked], priorities: Sequence[int], owners: int, watched: int, seed: int) -> bool:
    """Whether those behind a request get more than TURNS places for it and each before it.

    Clients come all the time with priority 0, as owners that were never served.
    """
    rng = random.Random(seed)
    waiting = [asked(at, priority, f"owner {rng.randrange(owners)}") for at, priority in enumerate(priorities)]
    for one in waiting:
        order.add(one)
    for number in range((TURNS + 1) * (watched + 1)):
        for _ in range(2):
            order.add(asked(1000 + number, 0, f"new {number} {rng.random()}"))
        if serve(order) is waiting[watched]:
            return False
    return True


def share_out(
    order: Order[Asked], costs: Sequence[int], burst: int, running: int, seed: int, most: int = 40_000
) -> list[int]:
    """Tokens of each owner, after about `most` requests at the latest.

    Each always has some waiting; expectations are wrong, and requests keep places a while.
    """
    rng, served, clock = random.Random(seed), [0 for _ in costs], 0
    placed: list[tuple[Asked, float]] = []
    while min(served) < 200 * max(costs) and clock < most:
        waiting = Counter(one.request.wanted.owner for one in order)
        for owner, cost in enumerate(costs):
            for _ in range(burst + 1 if waiting[str(owner)] < 2 else 0):
                clock += 1
                order.add(asked(clock, 5, str(owner), rng.randint(1, 2 * cost)))
        one = next(order.walk())
        guess = one.tokens * rng.uniform(0.3, 3) * (1 + int(one.request.wanted.owner) / 4)
        order.place(one, guess)
        placed.append((one, guess))
        if len(placed) > running:
            gone, guess = placed.pop(rng.randrange(len(placed)))
            order.leave_place(gone.request, gone.tokens - guess)
            served[int(gone.request.wanted.owner)] += gone.tokens
    return served


def is_fair(served: Sequence[int]) -> bool:
    """Within 15 %."""
    mean = sum(served) / len(served)
    return all(abs(one - mean) <= 0.15 * mean for one in served)


@settings(max_examples=examples(40))
@given(
    priorities=st.lists(st.integers(0, 9), min_size=1, max_size=30), owners=st.integers(1, 4),
    watched=st.integers(0, 29), seed=st.integers(0, 99),
)  # fmt: skip
def test_no_request_starves(priorities: Sequence[int], owners: int, watched: int, seed: int) -> None:
    assert not starves(Order[Asked](expect), priorities, owners, min(watched, len(priorities) - 1), seed)


@settings(max_examples=10)
@example(costs=[1, 150], burst=20, running=4, seed=0)
@given(
    costs=st.lists(st.integers(1, 10), min_size=2, max_size=5), burst=st.integers(1, 20), running=st.integers(1, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_owners_get_equal_shares_whatever_their_requests_cost(
    costs: Sequence[int], burst: int, running: int, seed: int
) -> None:
    assert is_fair(share_out(Order[Asked](expect), costs, burst, running, seed))


class WithoutAge(Order[Asked]):
    """Broken: no request is next because it is the oldest."""

    def place(self, waiter: Asked, num_tokens: float) -> None:
        super().place(waiter, num_tokens)
        self._passed = 0.0


class WithoutShares(Order[Asked]):
    """Broken: what owners got is forgotten."""

    def place(self, waiter: Asked, num_tokens: float) -> None:
        super().place(waiter, 0)


class WithGuesses(Order[Asked]):
    """Broken: what a request was expected to take counts, not what it took."""

    def leave_place(self, request: Request, num_more: float) -> None:
        super().leave_place(request, 0)


def test_broken_rules_are_noticed() -> None:
    assert starves(WithoutAge(expect), [9], 1, 0, 0)
    assert not is_fair(share_out(WithoutShares(expect), [10, 100], 1, 1, 0, most=4000))
    assert not is_fair(share_out(WithGuesses(expect), [50] * 5, 1, 1, 0, most=4000))


def test_priorities_then_shares_then_arrival() -> None:
    order = Order[Asked](expect)
    requests = [
        asked(at, priority, owner) for at, (priority, owner) in enumerate([(5, "a"), (5, "a"), (5, "b"), (0, "a")])
    ]
    for one in requests:
        order.add(one)
    assert [serve(order).request.silent_since for _ in range(4)] == [3, 2, 0, 1]
    assert not len(order)


def test_retries_go_first_and_the_one_silent_for_longest_before_them() -> None:
    order = Order[Asked](expect)
    for at in (3, 1, 2):
        one = asked(at, 9)
        one.request.attempt = 2
        order.add(one)
    order.add(asked(0, 0))
    assert [one.request.silent_since for one in order.walk()] == [1, 2, 3, 0]


def test_an_owner_that_was_away_has_saved_nothing() -> None:
    order = Order[Asked](expect)
    for at in range(100):
        order.add(asked(at, 5, "busy"))
    for _ in range(50):
        serve(order)
    for at in range(100, 140):
        order.add(asked(at, 5, "late"))
    found = Counter(serve(order).request.wanted.owner for _ in range(40))
    assert found["busy"] in range(17, 24)


def test_owners_that_ask_for_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "MAX_IDLE", 50)
    order = Order[Asked](expect)
    for number in range(150):
        order.add(asked(number, 5, f"owner {number}", tokens=5 + number % 7))
        serve(order)
    assert len(order._owners) <= 50 + 1


@given(
    waiting=st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), max_size=30),
    priority=st.integers(0, 9), owner=st.sampled_from("abcd"),
)  # fmt: skip
def test_how_many_go_before_a_new_request(waiting: Sequence[tuple[int, str]], priority: int, owner: str) -> None:
    order = Order[Asked](expect)
    for at, (one, name) in enumerate(waiting):
        order.add(asked(at, one, name))
    new = asked(1000, priority, owner)
    predicted = order.count_before(new.request)
    order.add(new)
    real = next(count for count in range(100) if serve(order) is new)
    assert abs(predicted - real) <= 2 + real / TURNS * 2


# -- forecasts -------------------------------------------------------------------------------------------------------


def decode(num_mine: int = 4, **fields: object) -> WorkerView:
    return replace(DECODE, num_mine=num_mine, max_running=4, costs=ChunkCosts(quiet_s=0.1), **fields)  # type: ignore[arg-type]


def test_the_wait_for_a_place_follows_from_places_given_while_requests_waited() -> None:
    forecast = Forecast()
    assert forecast.predict_wait_s(5, [], [decode()]) == 0.0, "nothing is known"
    assert forecast.predict_wait_s(2, [], [decode(num_mine=1)]) == 0.0, "a place is free"
    for second in range(200):
        forecast.note_places(float(second), 2, is_waited_for=True)
    assert forecast.predict_wait_s(9, [], [decode()]) == pytest.approx(5, rel=0.05)
    forecast.note_places(200.0, 0, is_waited_for=False)
    forecast.note_places(1000.0, 2, is_waited_for=True)
    forecast.note_places(1001.0, 1, is_waited_for=True)
    assert forecast.predict_wait_s(9, [], [decode()]) == pytest.approx(10, rel=0.1), "what was long ago is forgotten"


def test_before_places_were_given_answers_are_taken_to_be_as_long_as_others() -> None:
    forecast, running = Forecast(), [asked(0, tokens=100).request for _ in range(4)]
    assert forecast.predict_wait_s(0, running, [decode()]) == pytest.approx(100 * 0.1 / 4)
    for _ in range(100):
        forecast.note_answer(20)
    assert forecast.predict_wait_s(0, running, [decode()]) == pytest.approx(20 * 0.1 / 4)


def test_the_wait_for_a_prompt_follows_from_the_fastest_worker() -> None:
    views = [decode(tokens_waiting=100, tokens_per_s=100.0), replace(PREFILL, tokens_per_s=50.0)]
    assert Forecast().predict_prompt_s(150, views) == 2.5 and Forecast().predict_prompt_s(10, views) == 0.2
    assert Forecast().predict_prompt_s(150, [decode()]) == 0.0
    assert Forecast().predict_prompt_s(150, [replace(one, is_alive=False) for one in views]) == 0.0
