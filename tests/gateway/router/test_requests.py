"""What a client gets, and what workers are asked, whatever workers do: the real router in virtual time."""

from asyncio import Event, sleep
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from gateway.router import attempt
from gateway.router.admission import CUT_OFF, DRAINING
from gateway.router.engine_client import Grammar, TokenizedRequest
from gateway.router.placement import NO_LIMIT
from protos import decode_pb2, kv_pb2, prefill_pb2
from runtime import rpc
from tests.support.fake_workers import PAGE_TOKENS, FakeDecode, FakeSession, Refusal, token_at
from tests.support.virtual_fleet import HEARTBEAT_S, PROMPT, TIMEOUT_S, Client, VirtualFleet, virtual_fleet, wanted
from wire.logprobs import TokenLogprobs
from wire.messages import pack_logprobs, unpack_tokens
from wire.timing import Timing

PARAM = "structured_outputs.regex"
Status = grpc.StatusCode
BAD_PART = ((rpc.FIELD_AT_FAULT, "grammar"), (rpc.PARAM_AT_FAULT, "tools[1].function.parameters"))
INVALID = (Status.INVALID_ARGUMENT, "too long")
BAD_GRAMMAR = (Status.INVALID_ARGUMENT, "not a regex", ((rpc.FIELD_AT_FAULT, "grammar"),))
BAD_SCHEMA = (Status.INVALID_ARGUMENT, "bad at #/x", BAD_PART)
NO_ROOM = (Status.RESOURCE_EXHAUSTED, "no pages", ((rpc.REFUSED_FOR, rpc.NO_ROOM),))
OVER_GOAL = (Status.RESOURCE_EXHAUSTED, "1 answers run", ((rpc.REFUSED_FOR, rpc.OVER_GOAL),))
COMPILING = (Status.RESOURCE_EXHAUSTED, "still compiled", ((rpc.REFUSED_FOR, rpc.GRAMMAR_BUSY),))
TOO_LARGE = (Status.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (67108870 vs. 67108864)")
GONE = (Status.UNAVAILABLE, "connection refused")
UNKNOWN = (Status.FAILED_PRECONDITION, "no Steps stream")
BEGAN = "the answer began with the weights w, which no decode worker that is alive has"
ABORTED = (Status.ABORTED, "offer refused")
LONG = tuple(range(2 * PAGE_TOKENS + 8))  # two whole pages and a part
SESSION = decode_pb2.SessionTiming(
    kv_seconds=9, first_step_seconds=0.0625, decode_seconds=2, draft_tokens=7, accepted_tokens=3, steps=5,
    preemptions=1, cached_tokens=1,
)  # fmt: skip
PREFILLED = prefill_pb2.RunResponse(
    queue_seconds=0.25, prefill_seconds=0.5, transfer_seconds=0.125, transfer_bytes=4096, transport="shm",
    cached_tokens=2,
)  # fmt: skip


def bound(name: str = "r") -> TokenizedRequest:
    """A request whose answer must match a grammar."""
    return wanted(name, grammar=Grammar("regex", "a+", PARAM))


def scored() -> TokenizedRequest:
    """A request with log-probabilities: of the answer's tokens and of the two prompt tokens that have them."""
    return wanted(num_logprobs=1, num_prompt_logprobs=1)


def answer(count: int, start: int = 0) -> list[int]:
    """The tokens that any fake worker answers to PROMPT."""
    return [token_at(len(PROMPT) + at) for at in range(start, count)]


def open_sessions(worker: FakeDecode) -> list[FakeSession]:
    return [one for one in worker.sessions if not one.is_over]


def finish(fleet: VirtualFleet, count: int = 4, number: int = -1) -> None:
    """The latest session of any worker, or the `number`-th of the first, gives its last tokens."""
    worker = next(one for one in fleet.decodes if one.sessions)
    worker.sessions[number].emit(count, "length")
    fleet.run()


def check_error(client: Client, status: int, message: str, param: str | None = None) -> None:
    assert client.error is not None
    assert (client.error.status, client.error.param) == (status, param) and message in client.error.message


# -- one attempt -----------------------------------------------------------------------------------------------------


def test_a_request_is_reserved_prefilled_and_answered() -> None:
    with virtual_fleet(prefill=1) as fleet:
        (decode,), (prefill,) = fleet.decodes, fleet.prefills
        prefill.may_finish.clear()
        client = fleet.ask(replace(bound(), stop_token_ids=frozenset((9, 8)), min_tokens=1, cache_salt="s"))
        (session,), (run,) = decode.sessions, prefill.runs
        asked = session.request
        assert session.prompt_ids == unpack_tokens(run.prompt).tolist() == list(PROMPT)
        assert (asked.request_id, asked.attempt, asked.max_tokens, asked.num_emitted) == ("r", 1, 4, 0)
        assert (asked.gateway in decode.streams, asked.handle, asked.local_prefill_max_tokens) == (True, 1, 0)
        assert (list(asked.stop_token_ids), asked.min_tokens, asked.cache_salt) == ([8, 9], 1, "s")
        assert (asked.grammar.kind, asked.grammar.text, asked.speculation.drafter) == ("regex", "a+", "auto")
        assert not asked.HasField("num_logprobs") and not asked.HasField("num_prompt_logprobs")
        assert (run.request_id, run.cache_salt, run.ticket.session) == ("r", "s", 1)
        assert [one.num_mine for one in fleet.fleet.workers()] == [1, 1]
        client.reads.clear()
        session.emit(1)
        prefill.may_finish.set()
        fleet.run()
        assert [one.num_mine for one in fleet.fleet.workers()] == [0, 1], "free before its client reads"
        client.reads.set()
        session.emit(2)
        finish(fleet, 1)
        assert (client.tokens, client.finish_reason) == (answer(4), "length")
        assert not decode.aborted, "a session that ended by itself is not aborted"


@pytest.mark.parametrize(("prefill", "needs_prefill", "asked"), [(0, False, 0), (1, False, 0), (1, True, 1)])
def test_prefill_is_asked_where_decode_needs_it_and_else_gives_its_place_back(
    prefill: int, needs_prefill: bool, asked: int
) -> None:
    with virtual_fleet(prefill=prefill) as fleet:
        fleet.decodes[0].needs_prefill = needs_prefill
        for one in fleet.prefills:
            one.may_finish.clear()
        client = fleet.ask()
        assert fleet.decodes[0].sessions[0].request.local_prefill_max_tokens == (0 if prefill else NO_LIMIT)
        assert [len(one.runs) for one in fleet.prefills] == [asked] * prefill
        assert [one.num_mine for one in fleet.fleet.prefill.values()] == [asked] * prefill
        finish(fleet)
        assert client.tokens == answer(4)


@pytest.mark.parametrize("when", ["queued", "prefilling", "has tokens", "its tokens arrive", "its place is given"])
def test_a_client_that_leaves_ends_the_work_on_both_workers(when: str) -> None:
    with virtual_fleet(prefill=1, max_running=1) as fleet:
        (decode,), (prefill,) = fleet.decodes, fleet.prefills
        is_waiting = when in ("queued", "its place is given")
        before = fleet.ask("before") if is_waiting else None
        prefill.may_finish.clear()
        client = fleet.ask()
        if when == "has tokens":
            decode.sessions[0].emit(1)
            fleet.run()
        elif when in ("its tokens arrive", "its place is given"):
            decode.sessions[0].emit(1, "length" if before else "")
        client.leave()
        fleet.run()
        assert client.task.cancelled() and client.tokens == (answer(1) if when == "has tokens" else [])
        if when == "queued":
            finish(fleet)
        elif not is_waiting:
            assert decode.aborted == {decode.sessions[0].request.handle} and prefill.num_cancelled == 1


def test_a_bug_in_what_reads_prefills_answer_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "unpack_prefill_timing", lambda _response: 1 / 0)
    with virtual_fleet(prefill=1) as fleet:
        client = fleet.ask()
        assert isinstance(client.task.exception(), ZeroDivisionError)
        assert fleet.decodes[0].aborted == {1}


# -- refusals and failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "refusals", "status", "message", "param", "num_failed"),
    [
        ("decode", [INVALID], 400, "too long", None, 0),
        ("prefill", [INVALID], 400, "too long", None, 0),
        ("decode", [BAD_GRAMMAR], 400, f"{PARAM} cannot be used: not a regex", PARAM, 0),
        ("decode", [BAD_SCHEMA], 400, "cannot be used: bad at #/x", "tools[1].function.parameters", 0),
        ("decode", [NO_ROOM] * 3, 0, "", None, 0),
        ("prefill", [NO_ROOM] * 3, 0, "", None, 0),
        ("decode", [GONE, UNKNOWN] * 5, 0, "", None, 0),
        ("prefill", [GONE], 0, "", None, 1),
        ("prefill", [ABORTED], 0, "", None, 1),
        ("prefill", [TOO_LARGE], 0, "", None, 1),
        ("decode", [TOO_LARGE] * 9, 503, "gave up after 3 attempts; the last: D1: CLIENT: Received", None, 3),
        ("decode", [COMPILING] * 2, 0, "", None, 0),
    ],
)
def test_what_workers_refuse_with_decides_what_follows(
    role: str, refusals: list[Refusal], status: int, message: str, param: str | None, num_failed: int
) -> None:
    with virtual_fleet(prefill=1, patience_s=30.0) as fleet:
        (decode,), (prefill,) = fleet.decodes, fleet.prefills
        (decode if role == "decode" else prefill).refusals.extend(refusals)
        num_polls = decode.num_status_calls
        client = fleet.ask(bound())
        fleet.run(10.0)
        if status:
            check_error(client, status, message, param)
        else:
            limit = decode.sessions[-1].request.local_prefill_max_tokens
            assert limit == (NO_LIMIT if num_failed else 0), "decode prefills by itself after a failure of prefill"
            finish(fleet)
            assert client.tokens == answer(4)
        assert fleet.registry.get_sample_value("baton:attempts_failed_total") == num_failed
        assert GONE not in refusals or role == "prefill" or decode.num_status_calls > num_polls + 9, (
            "polled before each"
        )


Trouble = Callable[[VirtualFleet], None]


def say(finish_reason: str, error: str, tokens: int = 0) -> Trouble:
    return lambda fleet: fleet.decodes[0].sessions[0].say([9] * tokens, finish_reason, error)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    ("trouble", "is_ended", "avoids"),
    [
        (say("error", "a step failed", tokens=1), False, "D1"),  # its own tokens do not count
        (say("expired", "no KV came"), False, "P1"),
        (say("grammar_error", "none is allowed"), True, ""),
        (lambda fleet: fleet.decodes[0].break_streams(), False, "D1"),
        (lambda fleet: fleet.kill(fleet.decodes[0]), False, "D1"),
        (lambda fleet: fleet.kill(fleet.prefills[0]), False, ""),
    ],
)
def test_an_answer_goes_on_elsewhere_without_losing_or_repeating_a_token(
    trouble: Trouble, is_ended: bool, avoids: str, has_tokens: bool
) -> None:
    with virtual_fleet(decode=2, prefill=2, patience_s=1.0) as fleet:
        for one in fleet.prefills:
            one.may_finish.clear()
        client = fleet.ask(bound())
        (first,) = fleet.decodes[0].sessions
        if has_tokens:
            first.emit(2)
            fleet.run()
        trouble(fleet)
        fleet.run(2 * HEARTBEAT_S if avoids == "" else 1.0)
        if is_ended:
            check_error(client, 400, f"the answer cannot follow {PARAM}: none is allowed", PARAM)
            return
        count = 2 if has_tokens else 0
        assert client.tokens == answer(count)
        sessions = [one for worker in fleet.decodes for one in worker.sessions if one is not first]
        if sessions:
            (second,) = sessions
            request = second.request
            assert second.prompt_ids == [*PROMPT, *answer(count)]
            assert (request.max_tokens, request.attempt, request.num_emitted) == (4 - count, 2, count)
            asked = [name for name, one in fleet.workers.items() if getattr(one, "sessions", getattr(one, "runs", []))]
            assert not avoids or second.request.gateway not in getattr(fleet.workers.get(avoids), "streams", {})
            assert asked
        else:
            second = first  # a prefill worker that only stopped to answer polls
        second.emit(4 - count, "length")
        fleet.run()
        assert (client.tokens, client.finish_reason) == (answer(4), "length")


def test_failures_in_a_row_are_bounded_and_a_token_forgives_them() -> None:
    with virtual_fleet() as fleet:
        client = fleet.ask()
        for number in (1, 2, 3, 4):
            session = fleet.decodes[0].sessions[-1]
            if number == 2:
                session.emit(1)
            session.say([8], "error", f"failure {number}")
            fleet.run()
        check_error(client, 503, "gave up after 3 attempts; the last: D1: failure 4")
        assert client.error and (client.error.code, client.error.retry_after_s, client.tokens) == (
            "failed",
            1,
            answer(1),
        )
        assert [(one.number, one.is_failure) for one in client.attempts] == [(1, True), (2, True), (3, True), (4, True)]


@pytest.mark.parametrize("has_sent", ["tokens", "log-probabilities", "nothing"])
@pytest.mark.parametrize(
    "differs", [{"weights": "other"}, {"weights": "fp8:w"}, {"dtype": "float16"}, {"page_tokens": 2 * PAGE_TOKENS}]
)
def test_an_answer_stays_with_its_weights(differs: dict[str, Any], has_sent: str) -> None:
    """The second worker has another model, or computes the same one otherwise; other pages give the same tokens."""
    with virtual_fleet(decode=2, is_started=False, patience_s=5.0) as fleet:
        first, second = fleet.decodes
        second.peer.layout.MergeFrom(kv_pb2.KvLayout(**differs))
        second.status = {"num_running": 3}  # it is not the first choice
        fleet.start()
        scores = packed(-3, -4) if has_sent == "log-probabilities" else []
        client = fleet.ask(scored() if scores else wanted())
        first.sessions[0].say([], prompt_logprobs=scores)
        if has_sent == "tokens":
            first.sessions[0].emit(2)
            fleet.run()
        fleet.kill(first)
        fleet.run(3.0)
        is_free = has_sent == "nothing" or "page_tokens" in differs
        assert bool(second.sessions) == is_free
        if is_free:
            second.sessions[0].emit(2 if has_sent == "tokens" else 4, "length")
            fleet.run()
            assert client.tokens == answer(4)
            return
        other = fleet.ask("other")  # it is not held back
        second.sessions[0].emit(4, "length")
        fleet.run(3.0)
        assert other.finish_reason == "length"
        what = f"{differs.get('weights', 'w')} {differs.get('dtype', '')}".strip()
        check_error(client, 503, f"{BEGAN}: D2 has {what}")


def test_an_answer_goes_on_where_its_weights_come_back() -> None:
    with virtual_fleet(decode=2, is_started=False, patience_s=5.0) as fleet:
        first, second = fleet.decodes
        second.peer.layout.weights = "other"
        second.status = {"num_running": 3}
        fleet.start()
        client = fleet.ask()
        first.sessions[0].emit(2)
        fleet.run()
        fleet.kill(first)
        fleet.run(1.0)
        back = fleet.replace(first, "D3")
        fleet.run(2.0)
        back.sessions[0].emit(2, "length")
        fleet.run()
        assert client.tokens == answer(4) and not second.sessions


def test_a_worker_that_comes_back_with_other_weights_gets_nothing_before_it_has_said_so() -> None:
    with virtual_fleet(patience_s=5.0) as fleet:
        (first,) = fleet.decodes
        client = fleet.ask()
        first.sessions[0].emit(2)
        fleet.run()
        fleet.kill(first)
        after = fleet.replace(first, "D2")
        after.peer.layout.weights = "other"
        fleet.run(10.0)
        assert not after.sessions
        check_error(client, 503, f"{BEGAN}: D1 has other")


@pytest.mark.parametrize("others", [0, 1])
def test_a_silent_prefill_worker_is_given_up_like_a_silent_decode_worker(others: int) -> None:
    with virtual_fleet(prefill=1 + others) as fleet:
        for one in fleet.prefills:
            one.may_finish.clear()
        client = fleet.ask()
        silent = next(one for one in fleet.prefills if one.runs)
        silent.Status = lambda *_: Event().wait()  # type: ignore[method-assign,assignment]
        fleet.run(HEARTBEAT_S + 1.0)
        assert silent.num_cancelled == 1
        again = fleet.decodes[0].sessions[1]
        assert again.request.local_prefill_max_tokens == (0 if others else NO_LIMIT)
        assert sum(len(one.runs) for one in fleet.prefills) == 1 + others
        finish(fleet)
        assert client.tokens == answer(4)
        record = client.attempts[0]
        assert record.is_failure and f"{silent.incarnation} does not answer (DEADLINE_EXCEEDED)" == record.reason


def hang(*_: object) -> Any:
    return Event().wait()


def test_a_call_at_a_worker_that_falls_silent_ends_when_polls_notice_it() -> None:
    with virtual_fleet(decode=2, patience_s=5.0) as fleet:
        silent, other = fleet.decodes
        other.status = {"num_running": 3}
        fleet.run(1.0)
        silent.Status = silent.Reserve = hang  # type: ignore[method-assign,assignment]
        fleet.run(HEARTBEAT_S - 1.0)
        client = fleet.ask()
        assert fleet.fleet.decode["D1"].num_mine == 1
        fleet.run(2.5)
        finish(fleet)
        assert client.tokens == answer(4) and len(other.sessions) == 1


def test_no_run_begins_at_a_prefill_worker_that_fell_silent_meanwhile() -> None:
    with virtual_fleet(prefill=1) as fleet:
        (decode,), (prefill,) = fleet.decodes, fleet.prefills
        reserve = decode.Reserve

        async def reserve_late(*words: Any) -> Any:
            await sleep(5.0)
            return await reserve(*words)

        decode.Reserve = reserve_late  # type: ignore[method-assign,assignment]
        prefill.Status = hang  # type: ignore[method-assign,assignment]
        fleet.run(HEARTBEAT_S - 2.0)
        client = fleet.ask()
        assert fleet.fleet.prefill["P1"].num_mine == 1
        decode.Reserve = reserve  # type: ignore[method-assign]
        fleet.run(5.1)
        assert not prefill.runs and decode.sessions[1].request.local_prefill_max_tokens == NO_LIMIT
        finish(fleet)
        assert client.tokens == answer(4)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_request_that_meets_stuck_workers_is_begun_again_twice_and_its_end_names_them(role: str) -> None:
    with virtual_fleet(decode=3, prefill=3 if role == "prefill" else 0, patience_s=5.0) as fleet:
        for one in fleet.prefills:
            one.may_finish.clear()
        client = fleet.ask()
        for _ in range(3):
            decode, session = next((one, one.sessions[-1]) for one in fleet.decodes if open_sessions(one))
            stuck = decode if role == "decode" else next(one for one in fleet.prefills if one.runs and not one.status)
            if role == "decode":
                session.emit(1)
                fleet.run()
            stuck.status = {"step_age_s": 61.0, "step_predicted_s": 0.25}
            fleet.run(1.0)
            session.is_over = True
        words = f"{stuck.incarnation} has been in one engine step for 61 s, predicted to take 0.25 s (--stall-s 60)"
        check_error(client, 503, f"gave up after 3 attempts; the last: {words}")


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_request_out_of_time_after_a_stuck_worker_names_it(is_placed: bool) -> None:
    with virtual_fleet(decode=1, patience_s=2 * TIMEOUT_S) as fleet:
        (decode,) = fleet.decodes
        client = fleet.ask()
        decode.status = {"step_age_s": 61.0}
        fleet.run(1.1)
        if is_placed:
            decode.status = {}
        fleet.run(TIMEOUT_S)
        check_error(client, 503, "D1 has been in one engine step for 61 s (--stall-s 60)")


@pytest.mark.parametrize(
    ("refusal", "patience_s", "status", "code", "message"),
    [
        (GONE, 2.0, 503, "not_ready", "found no worker for 2 s; the last: D1: connection refused"),
        (COMPILING, 2.0, 504, "timeout", "the request took longer than --request-timeout-s allows"),
        (NO_ROOM, 2.0, 503, "not_ready", "no worker had room within "),
    ],
)
def test_a_request_that_finds_no_worker_gives_up_in_time(
    refusal: Refusal, patience_s: float, status: int, code: str, message: str
) -> None:
    with virtual_fleet(patience_s=patience_s) as fleet:
        fleet.decodes[0].refusals.extend([refusal] * 1000)
        client = fleet.ask(bound())
        fleet.run(1.9)
        assert client.error is None
        fleet.run(2 * TIMEOUT_S)
        check_error(client, status, message)
        assert client.error and client.error.code == code


def test_what_was_accepted_once_is_tried_elsewhere_when_a_worker_calls_it_invalid() -> None:
    with virtual_fleet() as fleet:
        (decode,) = fleet.decodes
        client = fleet.ask()
        decode.sessions[0].emit(1)
        decode.refusals.append(INVALID)
        decode.sessions[0].say([], "error", "a step failed")
        fleet.run()
        decode.sessions[1].emit(3, "length")
        fleet.run()
        assert client.tokens == answer(4) and client.attempts[1].reason == "too long"


def test_lost_streams_are_not_the_requests_fault_until_there_were_many() -> None:
    with virtual_fleet(patience_s=9.0) as fleet:
        (decode,) = fleet.decodes
        client = fleet.ask()
        for number in range(1, 11):
            assert client.error is None and len(decode.sessions) == number
            decode.break_streams()
            fleet.run(1.0)
        check_error(client, 503, "gave up after 10 attempts; the last: D1 closed its stream")


def test_patience_begins_anew_once_a_worker_took_the_request() -> None:
    with virtual_fleet(patience_s=2.0) as fleet:
        (decode,) = fleet.decodes
        decode.refusals.extend([GONE] * 5)  # asked five times a second
        client = fleet.ask()
        fleet.run(1.5)
        decode.refusals.extend([GONE] * 5)
        decode.sessions[0].say([], "error", "a step failed")
        fleet.run(1.5)
        finish(fleet)
        assert client.tokens == answer(4)


@pytest.mark.parametrize("where", ["reserve", "answer"])
def test_a_request_that_takes_too_long_ends_with_504(where: str) -> None:
    with virtual_fleet(timeout_s=5.0) as fleet:
        if where == "reserve":
            fleet.decodes[0].may_answer.clear()
        client = fleet.ask()
        fleet.run(5.1)
        check_error(client, 504, "took longer than --request-timeout-s allows")
        assert fleet.registry.get_sample_value("baton:attempts_failed_total") == 0


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_slow_reader_keeps_no_place_and_gets_after_its_time_only_a_whole_answer(has_ended: bool) -> None:
    with virtual_fleet(max_running=1) as fleet:
        client = fleet.ask()
        session = fleet.decodes[0].sessions[0]
        client.reads.clear()
        session.emit(1)
        fleet.run()
        waiting = fleet.ask("waiting")
        session.emit(2)
        if has_ended:
            session.emit(1, "length")
        fleet.run()
        assert len(fleet.decodes[0].sessions) == (2 if has_ended else 1)
        fleet.run(TIMEOUT_S)
        client.reads.set()
        fleet.run()
        assert client.tokens == answer(4 if has_ended else 1) and (client.error is None) == has_ended
        assert has_ended or (client.error and client.error.status == 504)
        assert (waiting.error is None) == has_ended
        fleet.decodes[0].sessions[-1].emit(4, "length")


def test_a_lost_worker_has_no_place_though_its_tokens_are_not_read_yet() -> None:
    with virtual_fleet(max_running=1, patience_s=9.0) as fleet:
        (decode,) = fleet.decodes
        client = fleet.ask()
        client.reads.clear()
        decode.sessions[0].emit(1)
        fleet.run()
        waiting = fleet.ask("waiting")
        decode.sessions[0].emit(1)
        decode.break_streams()
        fleet.run(1.0)
        assert [one.request.request_id for one in decode.sessions] == ["r", "waiting"]
        client.reads.set()
        finish(fleet)
        assert waiting.tokens == answer(4) and client.tokens == answer(2)
        assert decode.sessions[-1].prompt_ids == [*PROMPT, *answer(2)]
        finish(fleet, 2)
        assert client.tokens == answer(4) and not decode.aborted, "the worker ends sessions with their stream"


def test_tokens_of_unknown_sessions_and_old_attempts() -> None:
    with virtual_fleet() as fleet:
        (decode,) = fleet.decodes
        client = fleet.ask()
        session = decode.sessions[0]
        stream = decode.streams[session.request.gateway]
        for handle, attempt_, finish_reason in ((77, 1, ""), (78, 1, "stop"), (session.request.handle, 2, "")):
            delta = decode_pb2.SessionDelta(handle=handle, attempt=attempt_, token_ids=[1], finish_reason=finish_reason)
            stream.put_nowait(decode_pb2.StepEvents(deltas=[delta]))
        fleet.run()
        assert decode.aborted == {77}, "a session that has ended needs no abort"
        finish(fleet)
        assert client.tokens == answer(4)


def test_aborts_come_before_the_reservation_that_takes_their_room() -> None:
    with virtual_fleet(max_running=1) as fleet:
        (decode,) = fleet.decodes
        first, second = fleet.ask("first"), fleet.ask("second")
        first.leave()
        fleet.run()
        assert decode.calls[-2:] == ["Abort", "Reserve"]
        finish(fleet)
        assert second.tokens == answer(4)


# -- prompts cached by workers ---------------------------------------------------------------------------------------


def test_a_wrong_memory_costs_one_more_try_with_a_prefill_worker() -> None:
    with virtual_fleet(prefill=1) as fleet:
        (decode,), (prefill,) = fleet.decodes, fleet.prefills
        for number in range(3):
            client = fleet.ask(wanted(f"r{number}", prompt=LONG))
            decode.sessions[-1].emit(4, "length")
            fleet.run()
            (only,) = client.parts
            assert only.timing is not None and only.timing.cached_tokens == (2 * PAGE_TOKENS if number == 2 else 0)
            if number == 0:
                decode.cached.clear()  # evicted
        requests = [one.request for one in decode.sessions]
        assert [(one.request_id, one.attempt) for one in requests] == [("r0", 1), ("r1", 1), ("r1", 2), ("r2", 1)]
        assert requests[1].handle in decode.aborted and len(prefill.runs) == 2
        assert fleet.registry.get_sample_value("baton:attempts_failed_total") == 0


def test_what_a_worker_had_not_is_not_expected_of_it_again() -> None:
    with virtual_fleet(prefill=2) as fleet:
        (decode,), (first, second) = fleet.decodes, fleet.prefills
        first.status = {"num_running": 3}
        fleet.run(1.0)
        for number in range(3):
            client = fleet.ask(wanted(f"r{number}", prompt=LONG))
            if number == 0:
                decode.sessions[-1].emit(4, "length")
                fleet.run()
                decode.cached.clear()  # evicted
                first.status = {}
                second.may_finish.clear()
                fleet.run(1.0)
            elif number == 1:
                client.leave()  # in its second attempt, whose KV never came
                fleet.run()
        requests = [one.request for one in decode.sessions]
        assert [(one.request_id, one.attempt) for one in requests] == [("r0", 1), ("r1", 1), ("r1", 2), ("r2", 1)]
        assert (len(first.runs), len(second.runs)) == (0, 3), "prompts go where they were computed"
        finish(fleet)


# -- log-probabilities and timing ------------------------------------------------------------------------------------


def logprobs(*values: float) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value, (5,), (value / 2,)) for value in values)


def packed(*values: float) -> list[decode_pb2.TokenLogprobs]:
    return [pack_logprobs(one) for one in logprobs(*values)]


def contents(client: Client) -> list[tuple[Any, ...]]:
    return [(part.token_ids, part.logprobs, part.prompt_logprobs) for part in client.parts]


@pytest.mark.parametrize("has_ended", [False, True])
def test_tokens_wait_for_the_prompts_log_probabilities(has_ended: bool) -> None:
    with virtual_fleet(prefill=1) as fleet:
        (prefill,) = fleet.prefills
        prefill.may_finish.clear()
        client = fleet.ask(scored())
        (session,), (run,) = fleet.decodes[0].sessions, prefill.runs
        assert session.request.num_logprobs == session.request.num_prompt_logprobs == run.num_prompt_logprobs == 1
        session.say([7], logprobs=packed(-3))
        session.say([8], "length" if has_ended else "", logprobs=packed(-4))
        fleet.run()
        assert not client.parts
        prefill.response = prefill_pb2.RunResponse(prompt_logprobs=packed(-1, -2))
        prefill.may_finish.set()
        fleet.run()
        assert contents(client) == [((7, 8), logprobs(-3, -4), logprobs(-1, -2))]
        if not has_ended:
            session.say([9, 10], "length", logprobs=packed(-5, -6))
            fleet.run()
            assert contents(client)[1:] == [((9, 10), logprobs(-5, -6), None)]


def test_decode_reports_the_prompts_part_by_part_where_it_prefills() -> None:
    with virtual_fleet() as fleet:
        client = fleet.ask(scored())
        (session,) = fleet.decodes[0].sessions
        session.say([], prompt_logprobs=packed(-1))
        session.say([7], prompt_logprobs=packed(-2), logprobs=packed(-3))
        session.say([8], "length", logprobs=packed(-4))
        fleet.run()
        assert contents(client) == [((7,), logprobs(-3), logprobs(-1, -2)), ((8,), logprobs(-4), None)]


def test_a_prompt_of_one_token_has_none() -> None:
    with virtual_fleet() as fleet:
        client = fleet.ask(replace(scored(), prompt_ids=(5,)))
        fleet.decodes[0].sessions[0].say([7], "length", logprobs=packed(-3))
        fleet.run()
        assert contents(client) == [((7,), logprobs(-3), ())]


def test_a_retry_repeats_none_and_loses_no_token_held_back() -> None:
    with virtual_fleet(prefill=1) as fleet:
        fleet.prefills[0].may_finish.clear()
        (decode,) = fleet.decodes
        client = fleet.ask(scored())
        decode.sessions[0].say([7], logprobs=packed(-3))  # held back, so the next attempt begins before it
        decode.sessions[0].say([], "error", "a step failed")
        fleet.run()
        second = decode.sessions[1]
        assert not client.parts and (second.request.num_emitted, second.request.num_prompt_logprobs) == (0, 1)
        second.say([7], prompt_logprobs=packed(-1, -2), logprobs=packed(-3))
        second.say([], "error", "a step failed")
        fleet.run()
        third = decode.sessions[2].request
        assert contents(client) == [((7,), logprobs(-3), logprobs(-1, -2))]
        assert (third.num_emitted, third.HasField("num_prompt_logprobs"), third.num_logprobs) == (1, False, 1)
        decode.sessions[2].say([8], "stop", logprobs=packed(-4))
        fleet.run()
        assert client.finish_reason == "stop"


def test_timing_comes_with_the_first_and_the_last_tokens() -> None:
    with virtual_fleet(prefill=1, max_running=1) as fleet:
        fleet.prefills[0].response = PREFILLED
        before, client = fleet.ask("before"), fleet.ask()
        fleet.run(0.5)
        finish(fleet)
        session = fleet.decodes[0].sessions[1]
        for ids, finish_reason in (([7], ""), ([8], ""), ([9, 10], "length")):
            session.say(ids, finish_reason, timing=SESSION if finish_reason else None)
        fleet.run()
        first, middle, last = (part.timing for part in client.parts)
        known = Timing(
            queue_s=0.5, prefill_s=0.75, transfer_s=0.125, transfer_bytes=4096, transport="shm", cached_tokens=2
        )  # fmt: skip
        assert first == known and middle is None and before.finish_reason
        assert fleet.registry.get_sample_value("baton:request_queue_time_seconds_sum") == 0.5
        assert last == replace(
            known, first_step_s=0.0625, decode_s=2, draft_tokens=7, accepted_tokens=3, steps=5, preemptions=1
        )


@pytest.mark.parametrize("prefill", [0, 1])
def test_timing_is_the_last_attempts_and_tells_why_the_prompt_was_computed_there(prefill: int) -> None:
    with virtual_fleet(prefill=prefill) as fleet:
        (decode,) = fleet.decodes
        for one in fleet.prefills:
            one.response = PREFILLED
        client = fleet.ask()
        decode.sessions[0].say([], "error", "a step failed")
        decode.needs_prefill, decode.num_cached = False, 1
        fleet.run()
        decode.sessions[1].say([7], "length", timing=SESSION)
        fleet.run()
        (only,) = client.parts
        timing = only.timing
        assert timing and (timing.attempts, timing.prefill_s, timing.transfer_bytes, timing.cached_tokens) == (
            2,
            9,
            0,
            1,
        )
        assert timing.prefill_reason == ("" if prefill else "no prefill worker is alive")


def test_the_wait_for_a_grammar_adds_up_and_others_are_served_meanwhile() -> None:
    with virtual_fleet(max_running=1) as fleet:
        (decode,) = fleet.decodes
        decode.may_answer.clear()
        decode.refusals.append(COMPILING)
        client = fleet.ask(bound())
        fleet.run(2.0)
        decode.may_answer.set()
        fleet.run()
        assert not decode.sessions and fleet.router.admission.num_waiting == 1
        other = fleet.ask("other")
        finish(fleet)
        fleet.run(0.6)
        decode.sessions[1].say(answer(4), "length", timing=decode_pb2.SessionTiming(grammar_seconds=1000.0))
        fleet.run()
        assert other.tokens == client.tokens == answer(4)
        assert client.parts[0].timing and client.parts[0].timing.grammar_s == 1002.0


# -- draining --------------------------------------------------------------------------------------------------------


def test_a_draining_gateway_finishes_what_is_inside_and_lets_nothing_in() -> None:
    emptied: list[bool] = []
    with virtual_fleet() as fleet:
        admission = fleet.router.admission
        admission._on_empty = lambda: emptied.append(True)
        client = fleet.ask()
        admission.is_draining = lambda: True
        assert fleet.router.readiness() == DRAINING
        check_error(fleet.ask("late"), 503, DRAINING)
        assert admission.num_inside == 1 and not emptied
        finish(fleet)
        assert client.tokens == answer(4) and emptied == [True]


@pytest.mark.parametrize(
    "where", ["queued", "reserving", "waiting for tokens", "its client is slow", "it leaves as well"]
)
def test_what_is_cut_off_ends_with_the_reason_but_never_in_the_middle_of_a_message(where: str) -> None:
    with virtual_fleet(max_running=1) as fleet:
        (decode,) = fleet.decodes
        running = fleet.ask("running") if where == "queued" else None
        if where == "reserving":
            decode.may_answer.clear()
        client = fleet.ask()
        if where == "its client is slow":
            client.reads.clear()
            decode.sessions[0].emit(1)
            fleet.run()
        if where == "it leaves as well":
            client.leave()
        fleet.router.admission.cut_off()
        fleet.run()
        if where == "its client is slow":
            assert client.error is None
            client.reads.set()
            fleet.run()
        if where == "it leaves as well":
            assert client.task.cancelled()
            return
        for one in (client, running or client):
            check_error(one, 503, CUT_OFF)
        assert where == "reserving" or decode.aborted == {1}
