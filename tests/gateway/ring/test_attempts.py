"""An attempt's calls to workers, and its reaction to each answer. Pure: the test plays the workers."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.router.engine_client import Generation, Grammar, Tokens
from gateway.ring.policy import NO_LIMIT
from gateway.ring.reasons import Reason, as_error
from gateway.ring.request_machine import GRAMMAR_PAUSE_S, Phase
from gateway.ring.request_steps import Prefilled, Refused, SessionLost
from protos import decode_pb2, prefill_pb2
from tests.support.dispatching import PROMPT, generation
from tests.support.ring_states import TIMEOUT_S, Hall, Try
from wire.logprobs import TokenLogprobs
from wire.messages import pack_logprobs, unpack_prefill_timing, unpack_tokens
from wire.timing import Timing

PARAM = "structured_outputs.regex"
SESSION = decode_pb2.SessionTiming(
    kv_seconds=9, first_step_seconds=0.0625, decode_seconds=2, draft_tokens=7, accepted_tokens=3, steps=5,
    preemptions=1, cached_tokens=1,
)  # fmt: skip
PREFILLED = prefill_pb2.RunResponse(
    queue_seconds=0.25, prefill_seconds=0.5, transfer_seconds=0.125, transfer_bytes=4096, transport="shm",
    cached_tokens=2,
)  # fmt: skip


def bound(name: str = "r") -> Generation:
    """A request whose answer must match a grammar."""
    return replace(generation(name), grammar=Grammar("regex", "a+", PARAM))


def scored(max_tokens: int = 4) -> Generation:
    """A request with log-probabilities: of the answer's tokens and of the two prompt tokens that have them."""
    return replace(generation(max_tokens=max_tokens), num_logprobs=1, num_prompt_logprobs=1)


def logprobs(*values: float) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value, (5,), (value / 2,)) for value in values)


def packed(*values: float) -> list[decode_pb2.TokenLogprobs]:
    return [pack_logprobs(one) for one in logprobs(*values)]


def retry(attempt: Try) -> Try:
    """The request's next attempt."""
    attempt.state.close()
    return attempt.hall.begin(attempt.hall.rejoin(attempt.request))


# -- calls to workers ------------------------------------------------------------------------------------------------


def test_the_first_attempt_and_one_that_goes_on() -> None:
    hall = Hall(prefill=1)
    first = hall.begin(replace(bound(), stop_token_ids=frozenset((9, 8)), min_tokens=1, cache_salt="s"))
    asked = first.reserve
    assert unpack_tokens(asked.prompt).tolist() == list(PROMPT)
    assert (asked.request_id, asked.attempt, asked.max_tokens, asked.num_emitted) == ("r", 1, 4, 0)
    assert (asked.gateway, asked.handle, asked.local_prefill_max_tokens) == ("to D1", 1, 0)
    assert (list(asked.stop_token_ids), asked.min_tokens, asked.cache_salt) == ([8, 9], 1, "s")
    assert (asked.grammar.kind, asked.grammar.text, asked.speculation.drafter) == ("regex", "a+", "auto")
    assert not asked.HasField("num_logprobs") and not asked.HasField("num_prompt_logprobs")
    (run,) = first.reserved(needs_prefill=True)
    assert isinstance(run, prefill_pb2.RunRequest)
    assert (run.request_id, run.prompt, run.cache_salt, run.ticket.session) == ("r", asked.prompt, "s", 1)
    first.deliver([7, 8])
    first.deliver([], "error", "the engine step failed")
    first.read()
    again = retry(first).reserve
    assert unpack_tokens(again.prompt).tolist() == [*PROMPT, 7, 8]
    assert (again.attempt, again.max_tokens, again.num_emitted, again.handle) == (2, 2, 2, 2)


@pytest.mark.parametrize(("prefill", "needs_prefill", "asked"), [(0, False, 0), (1, False, 0), (1, True, 1)])
def test_prefill_is_asked_where_the_prompt_is_long_and_gives_its_place_back_early(
    prefill: int, needs_prefill: bool, asked: int
) -> None:
    hall = Hall(prefill=prefill)
    attempt = hall.begin("r")
    assert attempt.reserve.local_prefill_max_tokens == (0 if prefill else NO_LIMIT)
    assert len(attempt.reserved(needs_prefill)) == asked
    assert [state.num_mine for state in hall.prefills] == [asked] * prefill
    if asked:
        attempt.state.take_prefill(Prefilled())
        assert hall.prefills[0].num_mine == 0 and attempt.state.session.inbox, "free before the client reads"
    assert hall.decodes[0].num_mine == 1


# -- reactions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "has_tokens", "status", "message"),
    [
        (Refused("decode", "invalid", "too long"), True, None, {"D1"}),  # it was accepted before
        (Refused("prefill", "invalid", "too long"), True, None, {"P1"}),
        (Refused("prefill", "absent", "connection refused"), False, None, {"P1"}),
        (SessionLost("D1 closed its stream"), True, None, {"D1"}),
        (("error", "a step failed"), True, None, {"D1"}),
        (("expired", "no KV came"), False, None, {"P1"}),
        (("grammar_error", "none is allowed"), False, 400, f"the answer cannot follow {PARAM}: none is allowed"),
        (("grammar_error", "none is allowed"), True, 400, f"the answer cannot follow {PARAM}: none is allowed"),
    ],
)
def test_an_attempt_ends_the_request_or_it_tries_again_avoiding_the_culprit(
    event: Any, has_tokens: bool, status: int | None, message: Any
) -> None:
    hall = Hall(prefill=1, patience_s=1.0)
    attempt = hall.begin(bound())
    attempt.reserved(needs_prefill=True)
    if has_tokens:
        attempt.deliver([7])
        attempt.read()
    if isinstance(event, tuple):
        attempt.deliver([], *event)
        attempt.read()
    else:
        attempt.step(event)
    request = attempt.request
    if status is None:
        assert (request.phase, request.failure, request.avoid) == (Phase.WAITING, None, message)
    else:
        assert request.phase is Phase.ENDED and request.failure is not None
        error = as_error(request.failure)
        assert (error.status, error.message, error.param) == (status, message, PARAM)
    attempt.state.close()
    has_session = not isinstance(event, tuple)
    assert hall.decodes[0].take_unwanted() == [1] * has_session and not hall.decodes[0].sessions


def test_failures_in_a_row_are_bounded_and_a_token_forgives_them() -> None:
    hall = Hall()
    attempt = hall.begin("r")
    for number in (1, 2, 3, 4):
        attempt.reserved()
        if number == 2:
            attempt.deliver([7])
        attempt.deliver([8], "error", f"failure {number}")
        parts = attempt.read()
        assert [one.token_ids for one in parts] == ([(7,)] if number == 2 else []), (
            "a failure's own tokens do not count"
        )
        if number == 4:
            break
        assert attempt.state.end is not None and attempt.state.end.is_failure
        attempt = retry(attempt)
    assert attempt.request.failure is not None
    error = as_error(attempt.request.failure)
    assert (error.status, error.code, error.retry_after_s) == (503, "failed", 1)
    assert error.message == "gave up after 3 attempts; the last: D1: failure 4"


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_request_that_meets_stuck_workers_is_begun_again_twice_and_its_end_names_them(role: str) -> None:
    hall = Hall(prefill=1)
    attempt = hall.begin("r")
    for number in (1, 2, 3):
        attempt.reserved(needs_prefill=role == "prefill")
        hall.now += 1
        stuck = hall.decodes[0] if role == "decode" else hall.prefills[0]
        if role == "decode":
            attempt.deliver([7])
        hall.poll(stuck, step_age_s=61.0, step_predicted_s=0.25)
        if role == "prefill":
            attempt.deliver([], "expired", "no KV came")
        attempt.read()
        hall.poll(stuck)
        if number < 3:
            attempt.request.avoid.clear()
            attempt = retry(attempt)
    assert attempt.request.failure is not None
    error = as_error(attempt.request.failure)
    assert (error.status, error.code) == (503, "failed")
    words = f"{stuck.address} has been in one engine step for 61 s, predicted to take 0.25 s (--stall-s 60)"
    assert error.message == f"gave up after 3 attempts; the last: {words}"


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_request_out_of_time_after_a_stuck_worker_names_it(is_placed: bool) -> None:
    hall = Hall()
    attempt = hall.begin("r")
    attempt.reserved()
    hall.poll(hall.decodes[0], step_age_s=61.0)
    attempt.read()
    hall.poll(hall.decodes[0])
    if is_placed:
        attempt = retry(attempt)
        attempt.reserved()
        hall.now = TIMEOUT_S
        attempt.read()
    else:
        attempt.request.step(Reason("not ready", "no worker had room within 40 s"), TIMEOUT_S)
    assert attempt.request.failure is not None
    error = as_error(attempt.request.failure)
    assert error.status == 503 and "D1 has been in one engine step for 61 s (--stall-s 60)" in error.message


@pytest.mark.parametrize(
    ("why", "seconds", "ends"), [("absent", 0.4, 503), ("failed", 0.0, 503), ("compiling", 30.0, 504)]
)
def test_a_request_that_finds_no_worker_gives_up_in_time(why: Any, seconds: float, ends: int) -> None:
    """A missing worker costs only time, a failing one an attempt; compiling a grammar may use the request's time."""
    hall = Hall(patience_s=2.0)
    attempt = hall.begin(bound())
    number = 0
    while True:
        hall.now += seconds
        attempt.step(Refused("decode", why, "D1: refused"))
        if attempt.request.phase is Phase.ENDED:
            break
        if why == "compiling":
            assert attempt.request.resumes_at == hall.now + GRAMMAR_PAUSE_S
        hall.poll(hall.decodes[0])
        attempt, number = retry(attempt), number + 1
    assert attempt.request.failure is not None
    error = as_error(attempt.request.failure)
    assert error.status == ends and number == {"absent": 5, "failed": 2, "compiling": 3}[why]
    if why == "absent":
        assert error.message == "found no worker for 2 s; the last: D1: refused" and error.code == "not_ready"


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_slow_reader_keeps_no_place_and_gets_after_its_time_only_a_whole_answer(has_ended: bool) -> None:
    hall = Hall(max_running=1)
    attempt = hall.begin("r")
    attempt.reserved()
    attempt.deliver([7])
    attempt.read()
    attempt.deliver([8, 9])
    waiting = hall.join("waiting")
    assert hall.decide() == []
    if has_ended:
        attempt.deliver([10], "length")
        assert hall.decide() == ["waiting"] and waiting.places is not None
    hall.now = TIMEOUT_S
    parts = attempt.read()
    assert [token for part in parts for token in part.token_ids] == ([8, 9, 10] if has_ended else [])
    failure = attempt.request.failure
    assert (failure is None) == has_ended and (failure is None or as_error(failure).status == 504)
    attempt.state.close()
    assert hall.decodes[0].take_unwanted() == ([] if has_ended else [1])


def test_a_lost_worker_has_no_place_though_its_tokens_are_not_read_yet() -> None:
    hall = Hall(max_running=1)
    attempt = hall.begin("r")
    attempt.reserved()
    attempt.deliver([7, 8])
    hall.join("waiting")
    hall.decodes[0].close_stream("closed its stream")
    hall.decodes[0].open_stream("another", "D1")
    assert hall.decide() == ["waiting"]
    assert [one.token_ids for one in attempt.read()] == [(7, 8)]
    assert attempt.request.phase is Phase.WAITING and attempt.request.packed_tokens[-4:] == bytes([8, 0, 0, 0])
    attempt.state.close()
    assert hall.decodes[0].take_unwanted() == [], "the worker ends it with its stream"


def test_tokens_of_unknown_sessions_and_old_attempts() -> None:
    hall = Hall()
    (decode,) = hall.decodes
    for finish_reason in ("", "stop"):
        decode.deliver(decode_pb2.SessionDelta(handle=77, token_ids=[1], finish_reason=finish_reason), 0)
    assert decode.take_unwanted() == [77], "a session that has ended needs no abort"
    attempt = hall.begin("r")
    attempt.reserved()
    attempt.request.attempt += 1
    attempt.deliver([7])
    assert attempt.read() == []


# -- log-probabilities and timing ------------------------------------------------------------------------------------


def contents(parts: list[Tokens]) -> list[tuple[Any, ...]]:
    return [(part.token_ids, part.logprobs, part.prompt_logprobs) for part in parts]


@pytest.mark.parametrize("has_ended", [False, True])
def test_tokens_wait_for_the_prompts_log_probabilities(has_ended: bool) -> None:
    hall = Hall(prefill=1)
    attempt = hall.begin(scored())
    (run,) = attempt.reserved(needs_prefill=True)
    assert isinstance(run, prefill_pb2.RunRequest)
    assert attempt.reserve.num_logprobs == attempt.reserve.num_prompt_logprobs == run.num_prompt_logprobs == 1
    attempt.deliver([7], logprobs=packed(-3))
    attempt.deliver([8], "length" if has_ended else "", logprobs=packed(-4))
    assert attempt.read() == []
    attempt.state.take_prefill(Prefilled(prompt_logprobs=logprobs(-1, -2)))
    whole = ((7, 8), logprobs(-3, -4), logprobs(-1, -2))
    assert contents(attempt.read()) == [whole]
    if not has_ended:
        attempt.deliver([9, 10], "length", logprobs=packed(-5, -6))
        assert contents(attempt.read()) == [((9, 10), logprobs(-5, -6), None)]
    assert attempt.request.phase is Phase.ENDED


def test_decode_reports_the_prompts_part_by_part_where_it_prefills() -> None:
    attempt = Hall().begin(scored())
    attempt.reserved()
    attempt.deliver(prompt_logprobs=packed(-1))
    attempt.deliver([7], prompt_logprobs=packed(-2), logprobs=packed(-3))
    attempt.deliver([8], logprobs=packed(-4))
    assert contents(attempt.read()) == [((7,), logprobs(-3), logprobs(-1, -2)), ((8,), logprobs(-4), None)]


def test_a_prompt_of_one_token_has_none() -> None:
    attempt = Hall().begin(replace(scored(), prompt_ids=(5,)))
    attempt.reserved()
    attempt.deliver([7], logprobs=packed(-3))
    assert contents(attempt.read()) == [((7,), logprobs(-3), ())]


def test_a_retry_repeats_none_and_loses_no_token_held_back() -> None:
    first = Hall(prefill=1).begin(scored())
    first.reserved(needs_prefill=True)
    first.deliver([7], logprobs=packed(-3))  # held back, so the next attempt begins before it
    first.deliver([], "error", "a step failed")
    assert first.read() == []
    second = retry(first)
    assert (second.reserve.num_emitted, second.reserve.num_prompt_logprobs) == (0, 1)
    second.reserved()
    second.deliver([7], prompt_logprobs=packed(-1, -2), logprobs=packed(-3))
    second.deliver([], "error", "a step failed")
    assert contents(second.read()) == [((7,), logprobs(-3), logprobs(-1, -2))]
    third = retry(second).reserve
    assert (third.num_emitted, third.HasField("num_prompt_logprobs"), third.num_logprobs) == (1, False, 1)


def test_timing_comes_with_the_first_and_the_last_tokens() -> None:
    attempt = Hall(prefill=1).begin("r")
    attempt.request.queue_s = 0.5
    attempt.reserved(needs_prefill=True)
    attempt.state.take_prefill(Prefilled(unpack_prefill_timing(PREFILLED)))
    for ids, finish_reason in (([7], ""), ([8], ""), ([9, 10], "length")):
        attempt.deliver(ids, finish_reason, timing=SESSION if finish_reason else None)
    first, middle, last = (part.timing for part in attempt.read())
    known = Timing(
        queue_s=0.5, prefill_s=0.75, transfer_s=0.125, transfer_bytes=4096, transport="shm", cached_tokens=2
    )  # fmt: skip
    assert first == known and middle is None
    assert last == replace(
        known, first_step_s=0.0625, decode_s=2, draft_tokens=7, accepted_tokens=3, steps=5, preemptions=1
    )


@pytest.mark.parametrize("prefill", [0, 1])
def test_timing_tells_why_the_prompt_was_computed_there(prefill: int) -> None:
    attempt = Hall(prefill=prefill).begin("r")
    attempt.reserved(needs_prefill=bool(prefill))
    attempt.deliver([7], "length", timing=SESSION)
    (only,) = attempt.read()
    assert only.timing is not None
    assert only.timing.prefill_reason == ("" if prefill else "no prefill worker is alive")


def test_timing_is_the_last_attempts() -> None:
    first = Hall(prefill=1).begin("r")
    first.reserved(needs_prefill=True)
    first.state.take_prefill(Prefilled(unpack_prefill_timing(PREFILLED)))
    first.deliver([], "error", "a step failed")
    first.read()
    second = retry(first)
    second.reserved(num_cached=1)
    second.deliver([7], "length", timing=SESSION)
    (only,) = second.read()
    assert only.timing is not None
    timing = only.timing
    assert (timing.attempts, timing.prefill_s, timing.transfer_bytes, timing.cached_tokens) == (2, 9, 0, 1)
