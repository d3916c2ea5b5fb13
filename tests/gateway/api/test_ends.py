"""Requests without a whole answer, on every API: the engine refuses or fails, a bug, clients that leave."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.errors import WEIGHTS_GONE, ApiError, not_ready, overloaded, took_too_long
from gateway.request.prepare import ApiOptions
from tests.support.adapters import APIS
from tests.support.api_server import Served, run_api
from tests.support.fake_engine_client import Script
from tests.support.words import Api, named

MODES = [(api, stream) for api in APIS.values() for stream in (False, True) if stream or api.can_be_whole]
SEVERAL = [(api, stream) for api, stream in MODES if api.knows({"n": 2})]
FAULTS = [
    overloaded("the queue is full"), not_ready("no worker is alive"), took_too_long(),
    ApiError(503, "x", None, "failed", 1), RuntimeError("secret detail"), TimeoutError("secret detail"), None,
]  # fmt: skip


@pytest.mark.parametrize(("api", "stream"), MODES, ids=named)
@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_fault(served: Served, api: Api, stream: bool, num_tokens: int, fault: Exception | None) -> None:
    """A stream delivers what came before it. Without a script the engine ends without a reason."""
    error = fault if isinstance(fault, ApiError) else None
    bug = None if error else fault
    served.engine.reset(Script(served.ids("hello world")[:num_tokens], error=error, bug=bug))
    before, num_before = count_whole(served), served.count("generation_tokens_total")
    code = "bug" if bug else error.code if error else "incomplete_answer"
    num_failed = served.count("requests_failed_total", code=str(code))
    with capture_logs() as logs:
        outcome = api.ask(served, {}, stream, headers={"x-request-id": "mine-1"})
    assert served.count("requests_failed_total", code=str(code)) == num_failed + 1
    failed = [one for one in logs if one["event"] == "request not answered"]
    lines = [(one["request_id"].partition(".")[0], one["code"], one["tokens"]) for one in failed]
    is_ours = bug is None and (error is None or error.status >= 500)
    assert lines == [("mine-1", code, num_tokens)] * is_ours
    text = served.tokenizer.decode(served.engine.script.token_ids) if stream else ""
    assert "".join(outcome.texts) == text
    assert outcome.headers["x-request-id"] == "mine-1"
    assert "secret" not in outcome.message
    is_header_sent = stream and num_tokens and api.can_be_whole
    if error is not None:
        assert (outcome.status, outcome.message) == (error.status, error.message)
        assert outcome.code == (error.code if api.tells_codes else None)
        assert outcome.retry_after == (None if is_header_sent else error.retry_after_s)
    else:
        assert outcome.status == 500
        codes = ["incomplete_answer"] if bug is None else ["bug", "internal_error"]
        assert outcome.code in codes if api.tells_codes else outcome.code is None
        assert bug is None or "mine-1" in outcome.message
    assert served.engine.wait_ending() == ("closed" if fault is None else "failed")
    assert count_whole(served) == before and not served.engine.num_inside
    assert served.count("generation_tokens_total") == num_before + num_tokens


@pytest.mark.parametrize("api", APIS.values(), ids=named)
def test_preparing_a_request_counts_as_its_time(served: Served, api: Api) -> None:
    api.ask(served, {}, stream=True)
    (sent,) = served.engine.generations
    assert sent.age_s > 0


def count_whole(served: Served) -> list[float]:
    """The number of answers counted as whole."""
    counts = [served.count("request_success_total", finished_reason=reason) for reason in ("stop", "length")]
    return [*counts, served.count("e2e_request_latency_seconds_count")]


@pytest.mark.parametrize(("api", "stream"), MODES, ids=named)
def test_a_full_queue_refuses_before_anything_begins(served: Served, api: Api, stream: bool) -> None:
    served.engine.refusal = overloaded("too many")
    num_refused = served.count("requests_failed_total", code="overloaded")
    num_prompt = served.count("prompt_tokens_total")
    outcome = api.ask(served, {"n": 2} if api.knows({"n": 2}) else {}, stream)
    assert served.count("prompt_tokens_total") == num_prompt, "of requests that began"
    assert (outcome.status, outcome.retry_after) == (429, 1)
    assert served.count("requests_failed_total", code="overloaded") == num_refused + 1
    assert not served.engine.generations and not served.engine.num_inside


@pytest.mark.parametrize(("api", "stream"), SEVERAL, ids=named)
def test_one_choice_that_fails_ends_the_others(served: Served, api: Api, stream: bool) -> None:
    hanging = Script(served.ids("hello"), is_hanging=True)
    for failing in (Script(served.ids("he"), error=not_ready("x")), Script(error=overloaded("the queue is full"))):
        served.engine.reset(hanging, hanging, failing)
        outcome = api.ask(served, {"n": 4}, stream)
        assert failing.error is not None and outcome.status == failing.error.status
        assert sorted(served.engine.wait_ending() for _ in served.engine.generations) == sorted(
            ["closed"] * (len(served.engine.generations) - 1) + ["failed"]
        )


@pytest.mark.parametrize(("api", "stream"), MODES, ids=named)
@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("n", [1, 5])
def test_a_client_that_leaves_ends_the_work(served: Served, api: Api, stream: bool, num_tokens: int, n: int) -> None:
    asked: Any = {"n": n} if n > 1 else {}
    if not api.knows(asked):
        return
    served.engine.reset(Script(served.ids("hello world")[:num_tokens], is_hanging=True))
    phase = "decode" if num_tokens else "waiting"
    before = served.count("cancelled_total", phase=phase)
    api.leave(served, asked, stream, n)
    assert [served.engine.wait_ending() for _ in range(n)] == ["closed"] * n
    served.wait_count(before + n, "cancelled_total", phase=phase)


def test_no_key_fills_the_queue(served: Served) -> None:
    """Others' requests find a place while one key's many are refused."""
    many, one = APIS["chat"].body({"n": 128}), APIS["chat"].body({})
    served.engine.reset(served.script("hello"))
    served.engine.num_waiting += 900
    try:
        answer = served.http.post("/v1/chat/completions", json=many, headers=dict(served.metadata))
        assert answer.status_code == 429 and "share" in answer.json()["error"]["message"]
        assert served.http.post("/v1/chat/completions", json=one, headers=dict(served.metadata)).status_code == 200
    finally:
        served.engine.num_waiting -= 900
    answer = served.http.post("/v1/chat/completions", json=many, headers=dict(served.metadata))
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 128


@pytest.mark.parametrize(
    ("api", "stream"),
    [(api, stream) for api, stream in MODES if api is not APIS["completions"] and api is not APIS["Generate"]],
    ids=named,
)
@pytest.mark.parametrize("stop", [{}, {"stop": ["zzz"]}])
def test_reasoning_that_nothing_opens_ends_at_its_marker(
    thinking: Served, api: Api, stream: bool, stop: dict[str, Any]
) -> None:
    """A stream shows text as it comes, and where there are stop strings they must end it."""
    if not api.knows(stop):
        return
    text = "Let me see.\n</think>\n\nYes."
    thinking.engine.reset(thinking.script(text))
    outcome = api.ask(thinking, stop, stream)
    said = outcome.choices[0]
    is_known = not stream and not stop
    assert (said.reasoning, said.text) == (("Let me see.", "Yes.") if is_known else ("", "Let me see.Yes."))


GONE = not_ready("the answer began with the weights w, which no decode worker that is alive has", WEIGHTS_GONE)


@pytest.mark.parametrize("restarts", [False, True])
def test_an_answer_of_which_nothing_was_sent_begins_once_more_where_its_weights_are_gone(
    tmp_path: Path, restarts: bool
) -> None:
    """Where the operator wants that, and once. A stream's client has what came before."""
    with run_api(tmp_path, ApiOptions(restarts=restarts)) as served:
        for api, stream in MODES:
            is_anew = restarts and not stream
            whole = served.script("hello world again")
            begun = Script(whole.token_ids[:2], error=GONE)
            served.engine.reset(whole, begun)
            num_failed = served.count("requests_failed_total", code=WEIGHTS_GONE)
            outcome = api.ask(served, {}, stream)
            assert len(served.engine.generations) == 1 + is_anew
            assert served.count("requests_failed_total", code=WEIGHTS_GONE) == num_failed + (not is_anew)
            assert outcome.status == (200 if is_anew else 503)
            if is_anew:
                assert outcome.texts == ["hello world again"]
                assert "begun once more" in outcome.headers["x-baton-warning"]
                assert served.engine.generations[1].age_s > served.engine.generations[0].age_s
                served.engine.reset(begun)
                assert api.ask(served, {}, stream).code in (WEIGHTS_GONE, None)
                assert len(served.engine.generations) == 2
        assert not served.engine.num_inside and not served.engine.num_running


def test_no_choice_of_an_answer_that_begins_once_more_is_of_the_weights_before(tmp_path: Path) -> None:
    with run_api(tmp_path, ApiOptions(restarts=True)) as served:
        api = APIS["chat"]
        other = served.script("hello hello")
        served.engine.reset(
            served.script("hello world again"), other, Script(served.ids("hello"), error=GONE, delay_s=0.05)
        )
        outcome = api.ask(served, {"n": 2}, stream=False)
        assert (outcome.status, outcome.texts) == (200, ["hello world again"] * 2)
        assert len(served.engine.generations) == 4
