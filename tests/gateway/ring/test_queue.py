"""Which requests wait, go next and are refused: the queue alone, in the test's time."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.router.engine_client import Admitted
from gateway.ring.queue import Waiter
from gateway.ring.reasons import Reason, as_error
from gateway.ring.request_machine import GRAMMAR_PAUSE_S, Phase, Request
from gateway.ring.request_steps import Refused, SessionLost, SessionUpdate
from runtime.config_parts import NoPrefill
from tests.support.dispatching import generation
from tests.support.ring_states import HEARTBEAT_S, Hall, Try

LONG = tuple(range(40))  # two whole pages and a part
NO_ROOM = Refused("decode", "no room", "no pages")


def again(attempt: Try, event: Any = NO_ROOM) -> Request:
    """The attempt fails, and its request waits again."""
    attempt.step(event)
    attempt.state.close()
    assert attempt.request.phase is Phase.WAITING
    return attempt.request


def full(hall: Hall) -> list[Try]:
    """A hall with all places taken."""
    return [hall.begin(f"running {number}") for number in range(hall.max_running * len(hall.decodes))]


# -- the limit -------------------------------------------------------------------------------------------------------


def refusal(admitted: Admitted | Reason) -> str:
    assert isinstance(admitted, Reason)
    error = as_error(admitted)
    assert (error.status, error.code, error.retry_after_s) == (429, "overloaded", 1)
    return error.message


def admit(hall: Hall, num_choices: int) -> Admitted:
    admitted = hall.queue.admit(num_choices)
    assert isinstance(admitted, Admitted)
    return admitted


def test_a_request_comes_in_with_all_its_choices_or_with_none() -> None:
    hall = Hall(max_running=1)
    full(hall)
    five = admit(hall, 5)
    message = refusal(hall.queue.admit(4))
    assert message == "5 requests are waiting, and 4 more exceed --max-queue, which is 8; try again"
    admit(hall, 3)
    assert refusal(hall.queue.admit(1)) == "8 requests are waiting, the most allowed by --max-queue; try again"
    hall.queue.begin_choice(five)
    waiter = hall.join("r")
    assert hall.queue.num_waiting == 8, "choices still to come count"
    hall.queue.leave(waiter)
    hall.queue.dismiss(five)
    hall.queue.dismiss(five)
    assert hall.queue.num_waiting == 3


def test_more_choices_than_the_queue_has_places_come_in_while_none_waits() -> None:
    hall = Hall(max_queue=2)
    admitted = admit(hall, 6)
    assert refusal(hall.queue.admit(1))
    for _ in range(6):
        hall.queue.begin_choice(admitted)
        hall.join("r")
    hall.queue.begin_choice(admitted)
    assert hall.queue.num_waiting == 6 and len(hall.decide()) == 4


# -- the order -------------------------------------------------------------------------------------------------------


def test_retries_keep_their_order_before_new_requests() -> None:
    hall, tries = Hall(max_running=3), list[Try]()
    for name in "abc":
        tries.append(hall.begin(name))
        hall.now += 1
    new = [hall.join(name) for name in "de"]
    for one in (tries[2], tries[0], tries[1]):
        hall.rejoin(again(one))
    assert hall.decide() == [], "the worker is full until it answers a poll"
    hall.poll(hall.decodes[0])
    assert hall.decide() == ["a", "b", "c"] and all(one.places is None for one in new)


def test_the_answer_that_has_been_silent_for_longest_goes_first() -> None:
    hall = Hall()
    tries = [hall.begin(name) for name in "abc"]
    for number in (1, 0):
        hall.now += 1
        tries[number].reserved()
        tries[number].deliver([7])
        tries[number].read()
    tries[2].reserved()
    lost = list[str]()
    for one in tries:
        one.state.session.on_event = lambda one=one: lost.append(one.request.generation.request_id)  # type: ignore[misc]
    hall.decodes[0].close_stream("closed its stream")
    assert lost == ["c", "b", "a"]
    for one in tries:
        assert one.read() == []
        one.state.close()
        hall.rejoin(one.request)
    hall.decodes[0].open_stream("another", "D1")
    assert hall.decide() == ["c", "b", "a"]


def test_a_request_that_waited_for_its_grammar_goes_last_unless_its_client_has_tokens() -> None:
    hall = Hall(max_running=2)
    compiling = Refused("decode", "compiling", "still compiled")
    new, started = hall.begin("new"), hall.begin("started")
    started.reserved()
    started.deliver([7])
    started.read()
    started.deliver([], "error", "a step failed")
    started.read()
    started.state.close()
    second = hall.begin(hall.rejoin(started.request))
    requests = [again(one, compiling) for one in (new, second)]
    assert [one.resumes_at for one in requests] == [GRAMMAR_PAUSE_S] * 2 and not hall.decodes[0].is_full
    hall.max_running = 4
    hall.poll(hall.decodes[0], max_running=1)
    hall.join("waiting")
    for request in requests:
        hall.rejoin(request)
    order = hall.decide()
    for _ in range(2):
        order += hall.begin(hall_waiter(hall, order[-1])).close()
    assert order == ["started", "waiting", "new"]


def hall_waiter(hall: Hall, name: str) -> Waiter:
    return next(one for one in hall.queue._placed if one.request.generation.request_id == name)


def test_a_request_lets_others_pass_only_on_workers_that_it_cannot_use() -> None:
    hall = Hall(decode=2, max_running=1)
    first, second = hall.begin("first"), hall.begin("second")
    avoiding = again(second, Refused("decode", "failed", "one bad moment"))
    assert avoiding.avoid == {"D2"}
    hall.rejoin(avoiding)
    passing = [hall.join(name) for name in ("passing", "staying")]
    assert hall.decide() == ["passing"] and passing[0].places is not None
    assert passing[0].places.placement.decode.address == "D2"
    assert first.close() == ["second"]


# -- equal prompts at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["its KV is there", "it ended before"])
def test_equal_prompts_wait_until_one_was_computed_and_others_pass_them(end: str) -> None:
    hall = Hall(decode=1)
    first = hall.begin(generation("first", prompt=LONG))
    equal = [hall.join(generation(name, prompt=(*LONG[:-1], 99))) for name in ("second", "third")]
    salted = hall.join(replace(generation("salted", prompt=LONG), cache_salt="s"))
    short = hall.join(generation("short", prompt=LONG[:16]))  # no whole page: the last token belongs to the first step
    assert hall.decide() == ["salted", "short"]
    for one in (salted, short):
        hall.begin(one).state.close()
    if end == "its KV is there":
        first.reserved()
        first.deliver([7])
        first.read()
        assert hall.decide() == ["second", "third"], "both find its pages"
        assert all(one.places and one.places.placement.num_cached == 32 for one in equal)
    else:
        assert first.close() == ["second"], "the third waits for the second"


# -- workers that cannot serve ---------------------------------------------------------------------------------------


def test_a_worker_that_refused_gets_nothing_until_a_place_is_free_or_it_answers_a_poll_soon() -> None:
    hall = Hall(prefill=1)
    running, refused = hall.begin("running"), hall.begin("refused")
    refused.reserved(needs_prefill=True)
    calm = hall.prefills[0].next_poll
    refused.step(Refused("prefill", "no room", "no pages"))
    assert hall.prefills[0].is_full and hall.prefills[0].next_poll < calm
    refused.state.close()
    hall.rejoin(refused.request)
    assert hall.decide() == []
    running.reserved(needs_prefill=False)  # its place at prefill is free
    assert hall.decide() == ["refused"]


@pytest.mark.parametrize("expects_prefill", [True, False])
def test_standing_in_counts_where_prefill_workers_are_expected(expects_prefill: bool) -> None:
    hall = Hall(expects_prefill=expects_prefill)
    hall.join("r")
    assert hall.decide() == ["r"] and hall.queue.num_fallbacks == expects_prefill


@pytest.mark.parametrize("no_prefill", ["wait", "fail"])
def test_an_answer_that_has_begun_goes_on_without_a_prefill_worker(no_prefill: NoPrefill) -> None:
    hall = Hall(prefill=1, no_prefill=no_prefill)
    attempt = hall.begin("r")
    attempt.reserved()
    attempt.step(SessionUpdate(1, (5,)))
    hall.now = HEARTBEAT_S + 1
    hall.poll(hall.decodes[0])
    attempt.step(SessionLost("gone"))
    attempt.state.close()
    waiter = hall.rejoin(attempt.request)
    assert hall.decide() == ["r"] and waiter.places is not None and waiter.places.prefill is None


@pytest.mark.parametrize("no_prefill", ["fallback", "wait", "fail"])
def test_prompts_without_a_prefill_worker(no_prefill: NoPrefill) -> None:
    hall = Hall(prefill=1, patience_s=20.0, no_prefill=no_prefill)
    assert hall.decide() == []
    hall.now = HEARTBEAT_S + 1
    hall.poll(hall.decodes[0])  # only decode answers
    waiter, short = hall.join("long"), hall.join(generation("short", prompt=(1,)))
    assert hall.decide() == {"fallback": ["long", "short"], "wait": ["short"], "fail": ["long", "short"]}[no_prefill]
    assert hall.queue.num_fallbacks == (no_prefill == "fallback") and short.places is not None
    if no_prefill == "wait":
        assert hall.decide() == [] and hall.queue._stuck == {waiter}, "it is not looked at again"
        hall.now = 20.0
        hall.poll(hall.decodes[0])
        assert hall.decide() == ["long"]
    if no_prefill == "fallback":
        assert waiter.places is not None and waiter.places.prefill is None
        return
    assert waiter.reason is not None and "no prefill worker is alive: P1 has been silent" in waiter.reason.detail
    hall.poll(hall.prefills[0])
    again = hall.join("again")
    assert hall.decide() == ["again"] and again.places is not None and again.places.prefill is hall.prefills[0]


def test_what_other_gateways_have_on_a_worker_counts() -> None:
    hall = Hall(decode=2)
    running = hall.join("mine")
    assert hall.decide() == ["mine"] and running.places is not None
    mine = running.places.decode
    other = next(state for state in hall.decodes if state is not mine)
    hall.poll(mine, num_running=1)  # that is ours
    hall.poll(other, num_running=3)
    busier = hall.join("next")
    assert hall.decide() == ["next"] and busier.places is not None and busier.places.decode is mine
    hall.poll(mine, num_running=8)
    last = hall.join("last")
    assert hall.decide() == ["last"] and last.places is not None and last.places.decode is other


@pytest.mark.parametrize("was_ready", [False, True])
def test_requests_wait_for_a_worker_to_come_back_but_not_for_ever(was_ready: bool) -> None:
    hall = Hall(patience_s=20.0)
    if was_ready:
        hall.decide()
    else:
        hall.queue._last_ready.clear()
        hall.poll(hall.decodes[0], draining=True)
    hall.now = HEARTBEAT_S + 1
    waiter = hall.join("r")
    if was_ready:
        assert hall.decide() == []
        hall.now = 21
    assert hall.decide() == ["r"] and waiter.reason is not None
    error = as_error(waiter.reason)
    assert (error.status, error.code, error.retry_after_s) == (503, "not_ready", 1)
    assert error.message.startswith("no decode worker is alive: D1 has been silent")
    again = hall.join("again")
    hall.poll(hall.decodes[0])
    assert hall.decide() == ["again"] and again.places is not None


@pytest.mark.parametrize(
    ("fields", "trouble"),
    [
        ({"draining": True}, "is draining"),
        ({"step_age_s": 61.0}, "has been in one engine step for 61 s (--stall-s 60)"),
        ({"step_age_s": 61.0, "step_predicted_s": 13.0}, None),  # slow
        ({}, None),
    ],
)
def test_a_worker_says_why_it_gets_no_work(fields: dict[str, Any], trouble: str | None) -> None:
    hall = Hall()
    (state,) = hall.decodes
    attempt = hall.begin("r")
    attempt.reserved()
    hall.poll(state, **fields)
    assert state.find_trouble(0) == trouble
    is_stuck = trouble is not None and "step" in trouble
    assert bool(attempt.state.session.inbox) == is_stuck, "a draining worker finishes its requests"
    state.doubt(0)
    assert state.find_trouble(0) == (trouble or "did not take a call")
    hall.poll(state)
    assert state.find_trouble(0) is None, "it answered"
    state.close_stream("closed its stream")
    assert state.find_trouble(0) == "has no open stream of tokens"
    state.miss("does not answer (UNAVAILABLE)", HEARTBEAT_S + 1)
    assert state.find_trouble(HEARTBEAT_S + 1) == "does not answer (UNAVAILABLE)"
