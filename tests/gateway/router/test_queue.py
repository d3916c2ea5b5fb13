"""Which requests wait, go next and are refused, and when workers get some: the real router in virtual time."""

from unittest import mock

import pytest
from structlog.testing import capture_logs

from gateway.router.request import Request
from gateway.router.worker_client import POLL_S
from gateway.router.worker_view import Role
from runtime.config_parts import NoPrefill
from tests.gateway.router.test_requests import (
    COMPILING,
    LONG,
    NO_ROOM,
    OVER_GOAL,
    answer,
    bound,
    check_error,
    finish,
    open_sessions,
)
from tests.support.fake_workers import FakeDecode
from tests.support.virtual_fleet import HEARTBEAT_S, VirtualFleet, virtual_fleet, wanted


def names(worker: FakeDecode) -> list[str]:
    """Names of the requests that came to a worker, in order."""
    return [one.request.request_id for one in worker.sessions]


def asked(fleet: VirtualFleet) -> list[str]:
    """Requests that came to prefill workers."""
    return [run.request_id for prefill in fleet.prefills for run in prefill.runs]


def finish_all(fleet: VirtualFleet) -> None:
    """Sessions end one after the other until none is left."""
    while open_ := [one for worker in fleet.decodes for one in worker.sessions if not one.is_over]:
        open_[0].emit(open_[0].request.max_tokens, "length")
        fleet.run(0.1)


# -- the limit -------------------------------------------------------------------------------------------------------


def test_a_request_comes_in_with_all_its_choices_or_with_none() -> None:
    with virtual_fleet(max_running=1) as fleet:
        fleet.ask("running")
        fleet.ask(*(wanted(f"five {number}") for number in range(5)))
        four = fleet.ask(*(wanted(f"four {number}") for number in range(4)))
        check_error(four, 429, "5 requests are waiting, and 4 more exceed --max-queue, which is 8; try again")
        assert four.error and (four.error.code, four.error.retry_after_s) == ("overloaded", 1)
        three = fleet.ask(*(wanted(f"three {number}") for number in range(3)))
        check_error(fleet.ask(), 429, "8 requests are waiting, the most allowed by --max-queue; try again")
        three.leave()
        fleet.run()
        assert fleet.router.admission.num_waiting == 5
        finish_all(fleet)


def test_an_empty_queue_admits_any_number_of_choices() -> None:
    with virtual_fleet(max_queue=2, max_running=4) as fleet:
        fleet.ask(*(wanted(f"r{number}") for number in range(7)))
        assert len(fleet.decodes[0].sessions) == 4 and fleet.router.admission.num_waiting == 3
        check_error(fleet.ask(), 429, "3 requests are waiting")
        finish_all(fleet)


# -- the order -------------------------------------------------------------------------------------------------------


def test_a_request_whose_place_fails_still_waits_and_holds_nothing() -> None:
    with virtual_fleet() as fleet, capture_logs() as logs:
        with mock.patch.object(fleet.placer, "begin", side_effect=KeyError("a bug")):
            client = fleet.ask()
            fleet.router.queue.check()
        assert fleet.router.queue.num_placed == 0 and fleet.router.queue.num_tokens_waiting
        fleet.run(POLL_S)
        finish_all(fleet)
        assert client.finish_reason == "length"
        assert {one["event"] for one in logs} == {"a change was not followed"}


def test_retries_keep_their_order_before_new_requests() -> None:
    with virtual_fleet(max_running=3) as fleet:
        (decode,) = fleet.decodes
        decode.may_answer.clear()
        decode.refusals.extend([NO_ROOM] * 3)
        for name in "abcde":
            fleet.ask(name)
            fleet.run(0.1)
        decode.may_answer.set()
        fleet.run(0.3)
        assert names(decode) == ["a", "b", "c"]
        finish_all(fleet)
        assert names(decode) == ["a", "b", "c", "d", "e"]


def test_tokens_of_a_refused_try_do_not_count_as_placed() -> None:
    """Else retries would look like demand for prefill workers."""
    with virtual_fleet() as fleet:
        (decode,) = fleet.decodes
        decode.refusals.extend([NO_ROOM] * 3)
        fleet.ask("r")
        fleet.run(2.0)
        assert len(decode.sessions) == 1
        finish_all(fleet)
        assert fleet.router.queue.num_tokens_placed == 2, "all but the last are needed"


def test_priorities_then_owners_in_turn_then_arrival() -> None:
    with virtual_fleet(max_running=1) as fleet:
        (decode,) = fleet.decodes
        fleet.ask(wanted("first", owner="a"))
        for name, owner, priority in (
            ("a1", "a", 5),
            ("a2", "a", 5),
            ("b1", "b", 5),
            ("late", "b", 9),
            ("soon", "a", 0),
        ):
            fleet.ask(wanted(name, owner=owner, priority=priority))
        finish_all(fleet)
        assert names(decode) == ["first", "soon", "b1", "a1", "a2", "late"]


def test_a_refused_request_waits_for_its_turn_as_before() -> None:
    with virtual_fleet(max_running=1) as fleet:
        (decode,) = fleet.decodes
        decode.refusals.append(OVER_GOAL)
        fleet.ask(wanted("late", priority=9))
        fleet.ask(wanted("soon", priority=0))
        fleet.run(1.0)
        finish_all(fleet)
        assert names(decode) == ["soon", "late"]


# -- deadlines and goals ---------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_that_waits_and_no_answer_that_has_begun() -> None:
    with virtual_fleet(max_running=1) as fleet:
        (decode,) = fleet.decodes
        begun = fleet.ask(wanted("begun", deadline_s=2.0))
        waiting = fleet.ask(wanted("waiting", deadline_s=3.0))
        decode.sessions[0].emit(1)
        fleet.run(2.9)
        assert waiting.error is None
        fleet.run(0.2)
        check_error(waiting, 429, "deadline_ms has passed before the answer began", "deadline_ms")
        assert waiting.error and (waiting.error.code, waiting.error.retry_after_s) == ("deadline", 1)
        fleet.run(20.0)
        finish(fleet, 3)
        assert begun.finish_reason == "length" and begun.error is None
        assert names(decode) == ["begun"]


def test_a_deadline_ends_a_request_whose_prompt_takes_too_long() -> None:
    with virtual_fleet() as fleet:
        (decode,) = fleet.decodes
        asked = fleet.ask(wanted(deadline_s=2.0))
        fleet.run(2.1)
        check_error(asked, 429, "deadline_ms has passed", "deadline_ms")
        fleet.run(1.0)
        assert decode.aborted == {1}


def test_an_answer_that_begins_in_time_ends_at_the_timeout_only() -> None:
    with virtual_fleet(timeout_s=10.0) as fleet:
        asked = fleet.ask(wanted(deadline_s=2.0))
        fleet.run(1.0)
        fleet.decodes[0].sessions[0].emit(1)
        fleet.run(8.5)
        assert asked.error is None and len(asked.tokens) == 1
        fleet.run(1.0)
        check_error(asked, 504, "--request-timeout-s")


@pytest.mark.parametrize(
    ("age_s", "deadline_s", "status"), [(7.0, None, 504), (12.0, None, 504), (7.0, 9.0, 429), (7.0, 6.0, 429)]
)
def test_times_count_from_the_requests_arrival(age_s: float, deadline_s: float | None, status: int) -> None:
    """Its texts and images took `age_s` to prepare."""
    with virtual_fleet(timeout_s=10.0) as fleet:
        asked = fleet.ask(wanted(age_s=age_s, deadline_s=deadline_s))
        left_s = (deadline_s or 10.0) - age_s
        fleet.run(max(left_s - 0.1, 0.0))
        assert (asked.error is None) == (left_s > 0)
        fleet.run(0.2)
        assert asked.error is not None and asked.error.status == status


def test_a_deadline_holds_over_all_attempts_before_the_first_token() -> None:
    with virtual_fleet() as fleet:
        (decode,) = fleet.decodes
        asked = fleet.ask(wanted(deadline_s=2.0))
        for _ in range(3):
            decode.refusals.append(NO_ROOM)
        decode.sessions[0].say([], "error", "a step failed")
        fleet.run(2.1)
        check_error(asked, 429, "deadline_ms has passed", "deadline_ms")


def test_a_request_whose_deadline_cannot_be_kept_is_refused_at_once() -> None:
    with virtual_fleet(max_running=1) as fleet:
        (decode,) = fleet.decodes
        fleet.ask("first")
        for number in range(4):
            fleet.ask(f"r{number}")
        for _ in range(3):  # a place every 2 s
            fleet.run(2.0)
            open_sessions(decode)[0].emit(4, "length")
            fleet.run()
        late = fleet.ask(wanted("late", deadline_s=2.5))
        check_error(
            late,
            429,
            "the answer cannot begin within deadline_ms: about 3.9 s are predicted, 2.5 s are left",
            "deadline_ms",
        )
        assert late.error and (late.error.code, late.error.retry_after_s) == ("deadline", 2)
        in_time = fleet.ask(wanted("in time", deadline_s=5.0))
        urgent = fleet.ask(wanted("urgent", deadline_s=2.5, priority=0))
        assert in_time.error is None and urgent.error is None
        finish_all(fleet)
        assert "late" not in names(decode)


def test_prompts_that_take_too_long_for_their_deadline_are_refused_unless_cached() -> None:
    with virtual_fleet() as fleet:
        (decode,) = fleet.decodes
        decode.status = {"prompt_tokens_per_second": 10.0, "prompt_tokens_waiting": 0}
        fleet.run(1.0)
        late = fleet.ask(wanted("late", prompt=LONG, deadline_s=2.0))
        check_error(late, 429, "about 3.9 s are predicted, 2.0 s are left", "deadline_ms")
        fleet.ask(wanted("first", prompt=LONG))
        finish(fleet)
        again = fleet.ask(wanted("again", prompt=LONG, deadline_s=2.0))
        assert again.error is None
        finish_all(fleet)


@pytest.mark.parametrize("itl_goal_s", [0.0, 0.1])
def test_with_a_goal_no_request_waits_for_longer_than_patience(itl_goal_s: float) -> None:
    """The worker takes fewer answers than it could, by its last status."""
    with virtual_fleet(max_running=8, patience_s=5.0, itl_goal_s=itl_goal_s) as fleet:
        (decode,) = fleet.decodes
        decode.status = {"goal_answers": 1}
        fleet.run(1.0)
        for number in range(5):
            fleet.ask(f"r{number}")
        assert names(decode) == ["r0"]
        for _ in range(2):
            fleet.run(2.0)
            open_sessions(decode)[0].emit(4, "length")
            fleet.run()
        last = fleet.ask("last")
        if itl_goal_s:
            check_error(last, 429, "as many answers run as keep --itl-goal-ms, and this one would wait for about 6 s")
            assert last.error and (last.error.code, last.error.retry_after_s) == ("goal", 1)
        finish_all(fleet)
        assert ("last" in names(decode)) == (not itl_goal_s)


def test_the_answer_that_has_been_silent_for_longest_goes_first() -> None:
    with virtual_fleet(patience_s=5.0) as fleet:
        (decode,) = fleet.decodes
        for name in "abc":
            fleet.ask(name)
        for number in (1, 0):
            fleet.run(1.0)
            decode.sessions[number].emit(1)
            fleet.run()
        decode.break_streams()
        fleet.run(1.0)
        assert names(decode)[3:] == ["c", "b", "a"]
        finish_all(fleet)


def test_a_request_that_waited_for_its_grammar_goes_last_unless_its_client_has_tokens() -> None:
    with virtual_fleet(max_running=2) as fleet:
        (decode,) = fleet.decodes
        fleet.ask(bound("started"))
        decode.sessions[0].emit(1)
        decode.sessions[0].say([], "error", "a step failed")
        decode.refusals.extend([COMPILING] * 2)
        fleet.run()
        fleet.ask(bound("new"))
        for name in ("r1", "r2", "r3"):
            fleet.ask(name)
        fleet.run(0.6)
        finish_all(fleet)
        assert names(decode) == ["started", "r1", "r2", "started", "r3", "new"]


def test_a_request_lets_others_pass_only_on_workers_that_it_cannot_use() -> None:
    with virtual_fleet(decode=2, max_running=1) as fleet:
        first, second = fleet.decodes
        for name in ("first", "second", "passing", "staying"):
            fleet.ask(name)
        second.sessions[0].say([], "error", "one bad moment")
        fleet.run()
        assert (names(first), names(second)) == (["first"], ["second", "passing"])
        finish(fleet)
        assert names(first) == ["first", "second"]
        finish_all(fleet)


# -- equal prompts at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["its KV is there", "it ended before"])
def test_equal_prompts_wait_until_one_was_computed_and_others_pass_them(end: str) -> None:
    with virtual_fleet(max_running=8) as fleet:
        (decode,) = fleet.decodes
        first = fleet.ask(wanted("first", prompt=LONG))
        for name in ("second", "third"):
            fleet.ask(wanted(name, prompt=(*LONG[:-1], 99)))
        fleet.ask(wanted("salted", prompt=LONG, cache_salt="s"))
        fleet.ask(wanted("short", prompt=LONG[:16]))  # no whole page: the last token belongs to the first step
        assert names(decode) == ["first", "salted", "short"]
        if end == "its KV is there":
            decode.sessions[0].emit(1)
            fleet.run()
            assert names(decode)[3:] == ["second", "third"], "both find its pages"
        else:
            first.leave()
            fleet.run()
            assert names(decode)[3:] == ["second"], "the third waits for the second"
        finish_all(fleet)


@pytest.mark.parametrize("end", ["its KV is there", "it ended before"])
def test_sub_agents_wait_until_their_prefix_was_computed_once(end: str) -> None:
    prefix = tuple(range(640))
    with virtual_fleet(prefill=2, decode=2, max_running=8) as fleet:
        for prefill in fleet.prefills:
            prefill.may_finish.clear()
        first = fleet.ask(wanted("first", prompt=(*prefix, 1000)))
        for number in range(1, 6):
            fleet.ask(wanted(f"agent {number}", prompt=(*prefix, *[1000 + number] * 40)))
        fleet.ask(wanted("other", prompt=[7] * 640))
        assert sorted(asked(fleet)) == ["first", "other"]
        if end == "it ended before":
            first.leave()
            fleet.run()
            assert sorted(asked(fleet)) == ["agent 1", "first", "other"], "the rest wait for the next one"
        for prefill in fleet.prefills:
            prefill.may_finish.set()
        fleet.run()
        assert sorted(asked(fleet)) == [*(f"agent {number}" for number in range(1, 6)), "first", "other"]
        finish_all(fleet)


# -- workers that cannot serve ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_refused_gets_nothing_until_a_place_is_free_or_it_answers_a_poll_soon(role: Role) -> None:
    with virtual_fleet(prefill=1) as fleet:
        worker = fleet.decodes[0] if role == "decode" else fleet.prefills[0]
        for one in fleet.prefills:
            one.may_finish.clear()
        fleet.ask("running")
        fleet.run(0.3)
        worker.refusals.append(NO_ROOM)
        refused, num_polls = fleet.ask("refused"), worker.num_status_calls
        assert names(fleet.decodes[0])[-1] == ("running" if role == "decode" else "refused")
        fleet.run(0.15)
        assert worker.num_status_calls == num_polls and fleet.router.admission.num_waiting == 1
        fleet.run(0.1)
        assert worker.num_status_calls == num_polls + 1 and fleet.router.admission.num_waiting == 0, (
            "long before a second"
        )
        worker.refusals.append(NO_ROOM)
        fleet.ask("next")
        assert fleet.router.admission.num_waiting == 1
        fleet.prefills[0].may_finish.set()
        fleet.decodes[0].sessions[0].emit(4, "length")
        fleet.run()
        assert fleet.router.admission.num_waiting == 0, "a place is free"
        finish_all(fleet)
        assert refused.tokens == answer(4)


@pytest.mark.parametrize("expects_prefill", [True, False])
def test_standing_in_counts_where_prefill_workers_are_expected(expects_prefill: bool) -> None:
    with virtual_fleet(expects_prefill=expects_prefill) as fleet:
        fleet.ask()
        assert fleet.router.queue.num_fallbacks == expects_prefill
        finish(fleet)


@pytest.mark.parametrize("no_prefill", ["fallback", "wait", "fail"])
def test_prompts_without_a_prefill_worker(no_prefill: NoPrefill) -> None:
    with virtual_fleet(prefill=1, patience_s=20.0, no_prefill=no_prefill, timeout_s=500.0) as fleet:
        (decode,), (prefill,) = fleet.decodes, fleet.prefills
        begun = fleet.ask("begun")
        decode.sessions[0].emit(1)
        fleet.kill(prefill)
        fleet.run(HEARTBEAT_S + 1)
        decode.sessions[0].say([], "error", "a step failed")
        fleet.run()
        assert names(decode) == ["begun", "begun"], "an answer that has begun goes on"
        long, _short = fleet.ask("long"), fleet.ask(wanted("short", prompt=(1,)))
        assert names(decode)[2:] == (["long", "short"] if no_prefill == "fallback" else ["short"])
        fleet.run(30.0)
        finish_all(fleet)
        assert begun.tokens == answer(4)
        if no_prefill == "fallback":
            assert long.tokens == answer(4)
            return
        check_error(long, 503, "no prefill worker is alive: P1 does not answer (UNAVAILABLE)")
        fleet.workers["P1"] = prefill
        fleet.run(1.0)
        again = fleet.ask("again")
        assert len(prefill.runs) == 2
        finish_all(fleet)
        assert again.tokens == answer(4)


def test_what_other_gateways_have_on_a_worker_counts() -> None:
    with virtual_fleet(decode=2) as fleet:
        first, second = fleet.decodes
        fleet.ask("mine")
        second.status = {"num_running": 1}
        fleet.run(1.0)
        fleet.ask("next")
        assert names(first) == ["mine", "next"], "its own request there is no other's"
        first.status = {"num_running": 8}
        fleet.run(1.0)
        fleet.ask("last")
        assert names(second) == ["last"]
        finish_all(fleet)


@pytest.mark.parametrize("was_ready", [False, True])
def test_requests_wait_for_a_worker_to_come_back_but_not_for_ever(was_ready: bool) -> None:
    with virtual_fleet(patience_s=20.0) as fleet:
        (decode,) = fleet.decodes
        if not was_ready:
            fleet.router.queue._last_ready.clear()
        fleet.kill(decode)
        fleet.run(HEARTBEAT_S + 1)
        client = fleet.ask()
        assert (client.error is None) == was_ready
        fleet.run(20.0)
        check_error(client, 503, "no decode worker is alive: D1 does not answer (UNAVAILABLE)")
        assert client.error and (client.error.code, client.error.retry_after_s) == ("not_ready", 1)
        assert fleet.router.readiness() == client.error.message
        fleet.workers["D1"] = decode
        fleet.run(1.0)
        again = fleet.ask("again")
        finish(fleet)
        assert again.tokens == answer(4) and fleet.router.readiness() is None


def test_started_answers_go_first_when_their_only_worker_comes_back_with_an_empty_cache() -> None:
    with virtual_fleet(patience_s=30.0) as fleet:
        before, (client,) = fleet.decodes[0], fleet.fleet.decode.values()
        prompt = Request(wanted(prompt=LONG), deadline=1.0, patience_s=0.0, silent_since=0.0)
        started = fleet.ask(wanted("started", prompt=LONG))
        before.sessions[0].emit(1)
        fleet.run()
        assert client.keys.count(prompt.page_keys(client.view())) == 2
        fleet.kill(before)
        for name in ("r1", "r2"):
            fleet.ask(name)
        after = fleet.replace(before, "D2")
        fleet.run(1.0)
        assert names(after) == ["started", "r1", "r2"]
        assert client.keys.count(prompt.page_keys(client.view())) == 0
        after.sessions[0].emit(3, "length")
        fleet.run()
        assert len(started.tokens) == 4
        finish_all(fleet)


@pytest.mark.parametrize(
    ("fields", "trouble", "is_lost"),
    [
        ({"draining": True}, "is draining", False),  # it finishes its requests
        ({"step_age_s": 61.0}, "has been in one engine step for 61 s (--stall-s 60)", True),
        ({"step_age_s": 61.0, "step_predicted_s": 13.0}, None, False),  # slow
    ],
)
def test_a_worker_says_why_it_gets_no_work(fields: dict[str, float], trouble: str | None, is_lost: bool) -> None:
    with virtual_fleet(patience_s=50.0) as fleet:
        (decode,) = fleet.decodes
        client = fleet.ask()
        decode.status = fields
        fleet.run(1.0)
        assert fleet.fleet.decode["D1"].find_trouble() == trouble
        assert (client.attempts[0].ended_s is not None) == is_lost
        decode.status = {}
        fleet.run(1.0)
        finish(fleet)
        assert client.tokens == answer(4)


def test_trouble_of_a_stream_or_a_call_is_over_once_it_answers() -> None:
    with virtual_fleet(patience_s=50.0) as fleet:
        worker, (decode,) = fleet.fleet.decode["D1"], fleet.decodes
        decode.break_streams()
        fleet.run()
        assert worker.find_trouble() == "is draining"  # a worker that ends closes its streams
        fleet.run(0.5)
        assert worker.find_trouble() is None
        decode.refusals.append((NO_ROOM[0].UNAVAILABLE, "connection refused"))
        client = fleet.ask()
        assert worker.find_trouble() == "did not take a call"
        fleet.run(0.3)
        finish(fleet)
        assert client.tokens == answer(4) and worker.find_trouble() is None
        fleet.kill(decode)
        fleet.run(HEARTBEAT_S + 1)
        assert worker.find_trouble() == "does not answer (UNAVAILABLE)"
