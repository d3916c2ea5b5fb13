"""Stored answers over HTTP, computed by a scripted engine: they are kept, read again, taken up and taken over."""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.api.http import answer as http_answer
from gateway.errors import ApiError
from gateway.store import runs as running_answers
from gateway.store.database import FILE, Database, StoreError
from gateway.store.replay import Replays
from tests.support.api_server import ANSWER, FULL, KEYS, PLAIN, SERVED, Served, run_api
from tests.support.combinations import combination
from tests.support.fake_engine_client import Script
from tests.support.live import wait_until

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": "a 🙂 b"}}\n</tool_call>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}


@pytest.fixture(scope="module", autouse=True)
def soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_answers, "LOOK_S", 0.1)
        patch.setattr(running_answers, "WRITE_S", 0.02)
        yield


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of gateways that a test starts itself."""
    return tmp_path / "state"


@contextmanager
def start(folder: Path, state: Path) -> Iterator[Served]:
    with run_api(folder, FULL, state=state) as running:
        running.http.headers.update(dict(running.metadata))
        running.engine.reset(running.script(ANSWER))
        yield running


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the gateways that tests share."""
    return tmp_path_factory.mktemp("answers") / "state"


@pytest.fixture(scope="module")
def gateways(store: Path, soon: None) -> Iterator[list[Served]]:
    """Two with the same store."""
    with ExitStack() as running:
        yield [running.enter_context(start(store.parent / name, store)) for name in "ab"]


@pytest.fixture
def served(gateways: list[Served]) -> Served:
    gateways[0].engine.reset(gateways[0].script(ANSWER))
    return gateways[0]


@pytest.fixture
def other(gateways: list[Served]) -> Served:
    """Another gateway with the same store."""
    gateways[1].engine.reset(gateways[1].script("nothing of this"))
    return gateways[1]


def ask(served: Served, text: str = "hello", **fields: Any) -> httpx.Response:
    return served.http.post(PATH, json={"model": SERVED, "input": text, **fields})


def events_of(text: str) -> list[dict[str, Any]]:
    """All events, whose SSE ids are their numbers."""
    events = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            event: dict[str, Any] = json.loads(lines["data"])
            assert lines["id"] == str(event["sequence_number"])
            events.append(event)
    return events


def read(served: Served, answer_id: str, **params: Any) -> list[dict[str, Any]]:
    reply = served.http.get(f"{PATH}/{answer_id}", params={"stream": True, **params})
    assert reply.status_code == 200, reply.text
    return events_of(reply.text)


def wait_stored(served: Served, answer_id: str, status: str = "completed") -> None:
    """Until another gateway can read the whole answer."""
    wait_until(lambda: served.http.get(f"{PATH}/{answer_id}").json().get("status") == status)


def test_a_conversation_is_a_session_named_by_its_first_answer(served: Served, other: Served) -> None:
    names, previous = list[str](), dict[str, str]()
    for gateway in (served, other, served):
        told = ask(gateway, prompt_cache_key="many have this", **previous).json()
        names.append(gateway.engine.sent[-1]["session"])
        wait_stored(other, told["id"])
        previous = {"previous_response_id": told["id"]}
    assert names[0] and len(set(names)) == 1
    ask(served, prompt_cache_key="many have this")
    assert served.engine.sent[-1]["session"] != names[0], "another conversation"


def test_kept_and_deleted(served: Served, other: Served) -> None:
    told = ask(served, metadata={"a": "b"}).json()
    assert told["store"] is True and told["status"] == "completed"
    wait_stored(other, told["id"])
    assert other.http.get(f"{PATH}/{told['id']}").json() == served.http.get(f"{PATH}/{told['id']}").json() == told
    (item,) = other.http.get(f"{PATH}/{told['id']}/input_items").json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "hello"}]
    assert other.http.delete(f"{PATH}/{told['id']}").json()["deleted"] is True
    assert served.http.get(f"{PATH}/{told['id']}").status_code == 404


def test_of_other_keys(served: Served) -> None:
    told, foreign = ask(served).json(), {b"authorization": f"Bearer {KEYS[1]}".encode()}
    path = f"{PATH}/{told['id']}"
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        reply = served.http.request(method, where, headers=foreign)
        assert reply.status_code == 404, (method, where, reply.text)
    reply = served.http.post(
        PATH, headers=foreign, json={"model": SERVED, "input": "x", "previous_response_id": told["id"]}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "previous_response_id")


def test_conversation(served: Served, other: Served) -> None:
    """A turn's prompt is that of the whole conversation sent at once, with calls and their results."""
    served.engine.reset(served.script(CALL), served.script(ANSWER))
    first = ask(served, "hello", tools=[TOOL], instructions="be short").json()
    assert first["output"][0]["content"][0]["text"] == ANSWER
    second = ask(served, "look", tools=[TOOL], previous_response_id=first["id"]).json()
    (call,) = second["output"]
    assert call["type"] == "function_call"
    wait_stored(other, second["id"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    other.engine.reset(other.script(ANSWER))
    third = other.http.post(
        PATH, json={"model": SERVED, "input": [result], "tools": [TOOL], "previous_response_id": second["id"]}
    )
    assert third.status_code == 200, third.text
    user = {"role": "user", "content": "hello"}
    whole = [user, *first["output"], {"role": "user", "content": "look"}, *second["output"], result]
    served.engine.reset(served.script(ANSWER))
    assert served.http.post(PATH, json={"model": SERVED, "input": whole, "tools": [TOOL]}).status_code == 200
    assert other.engine.generations[-1].prompt_ids == served.engine.generations[-1].prompt_ids


def test_history_refused(served: Served, other: Served) -> None:
    first = ask(served).json()
    second = ask(served, previous_response_id=first["id"]).json()
    served.http.delete(f"{PATH}/{first['id']}")
    for previous, status, words in (("resp_x", 404, "no answer"), (second["id"], 400, "not whole")):
        reply = ask(served, previous_response_id=previous)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, "previous_response_id")
        assert words in reply.json()["error"]["message"]
    reply = ask(served, background=True, store=False)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "store")
    not_kept = ask(served, store=False).json()
    assert not_kept["store"] is False and served.http.get(f"{PATH}/{not_kept['id']}").status_code == 404


def test_without_a_store(tmp_path: Path) -> None:
    with run_api(tmp_path / "m", PLAIN) as plain:
        plain.engine.reset(plain.script(ANSWER))
        assert ask(plain).json()["store"] is False
        for name, value in (("store", True), ("background", True), ("previous_response_id", "resp_x")):
            wanted: dict[str, Any] = {name: value}
            error = ask(plain, **wanted).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_field") and "--state-dir" in error["message"]
        assert "--state-dir" in plain.http.get(f"{PATH}/resp_x").json()["error"]["message"]


@pytest.mark.parametrize("text", [combination(ANSWER), f"before {CALL}", combination(f"{CALL}{CALL}")])
def test_same_events_however_tokens_arrive(served: Served, other: Served, text: str) -> None:
    """Their borders, numbers and ids, in a stream, from its gateway and from another one's store."""
    shapes = []
    for group in (1, 2, 5, 100):
        served.engine.reset(served.script(text, group=group))
        events = events_of(ask(served, stream=True, tools=[TOOL]).text)
        answer_id = events[0]["response"]["id"]
        wait_stored(other, answer_id)
        assert read(other, answer_id) == read(served, answer_id) == events
        for begin in range(len(events)):
            assert read(other, answer_id, starting_after=begin) == events[begin + 1 :]
        shapes.append([(event["type"], event.get("delta"), event.get("text")) for event in events])
    assert all(shape == shapes[0] for shape in shapes)
    assert len(shapes[0]) > len(ANSWER.split())


def test_cut_off_answers(served: Served, other: Served) -> None:
    """By the most tokens: the end is an event of its own, however it arrives."""
    shapes = []
    for group in (1, 100):
        served.engine.reset(served.script(ANSWER, group=group))
        events = events_of(ask(served, stream=True, max_output_tokens=3).text)
        answer_id = events[0]["response"]["id"]
        wait_stored(other, answer_id, "incomplete")
        assert read(other, answer_id) == events
        shapes.append([event["type"] for event in events])
    assert shapes[0] == shapes[1]


def test_dropped_and_taken_up(served: Served) -> None:
    """Its client leaves; it goes on, and is read from where it was left."""
    served.engine.reset(served.script(ANSWER, delay_s=0.02))
    got = ""
    with served.http.stream("POST", PATH, json={"model": SERVED, "input": "hello", "stream": True}) as reply:
        for text in reply.iter_text():
            got += text
            if "response.output_text.delta" in got:
                break
    seen = events_of(got[: got.rindex("\n\n") + 2])
    rest = read(served, seen[0]["response"]["id"], starting_after=seen[-1]["sequence_number"])
    events = seen + rest
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ANSWER
    assert served.engine.wait_ending() == "complete"


def asking(path: str) -> dict[str, Any]:
    body = {"model": SERVED, "stream": True, "store": True}
    return body | ({"input": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_an_id_is_told_when_the_store_knows_it(
    served: Served, store: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is no token: its client can read on although its gateway dies."""
    write = Database.write

    def write_slowly(*args: Any) -> set[str]:
        time.sleep(0.5)
        return write(*args)

    monkeypatch.setattr(http_answer, "HOLD_S", 0.01)
    monkeypatch.setattr(Database, "write", write_slowly)
    served.engine.reset(Script(is_hanging=True))
    with served.http.stream("POST", path, json=asking(path)) as reply:
        event = json.loads(next(line[6:] for line in reply.iter_lines() if line.startswith("data: ")))
        answer_id = event.get("response", event)["id"]
        assert Database(store).find(answer_id) is not None
        assert served.http.delete(f"{path}/{answer_id}").status_code == 200
        assert served.engine.wait_ending() == "closed"


@pytest.mark.parametrize("is_absent", [False, True])
def test_no_token_waits_for_the_store(served: Served, is_absent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow or absent: a whole stream arrives, and the store has nothing of it."""
    may_write, write = threading.Event(), Database.write

    def write_late(*args: Any) -> set[str]:
        if is_absent:
            raise StoreError("away")
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(Database, "write", write_late)
    served.engine.reset(*[served.script(ANSWER, delay_s=0.05)] * 2)
    try:
        assert events_of(ask(served, stream=True).text)[-1]["type"] == "response.completed"
        assert "data: [DONE]" in served.http.post("/v1/chat/completions", json=asking("chat")).text
    finally:
        may_write.set()


def test_background(served: Served, other: Served) -> None:
    served.engine.reset(served.script(ANSWER, delay_s=0.02))
    told = ask(served, background=True).json()
    assert told["status"] == "queued" and told["background"] is True
    assert other.http.get(f"{PATH}/{told['id']}").json()["status"] in ("queued", "in_progress", "completed")
    live = read(other, told["id"])  # while the first gateway computes it
    wait_stored(other, told["id"])
    assert live[-1]["response"]["status"] == "completed"
    assert [event["type"] for event in live] == [event["type"] for event in read(served, told["id"])]


def test_a_refused_one_does_not_run_although_it_was_written(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, delete, num_failures = Database.write, Database.delete, [1, 2]

    def write_unheard(self: Database, *args: Any) -> set[str]:
        lost = write(self, *args)
        if num_failures[0]:
            num_failures[0] -= 1
            raise StoreError("the connection was lost after the commit")
        return lost

    def delete_later(self: Database, answer_id: str) -> None:
        if num_failures[1]:
            num_failures[1] -= 1
            raise StoreError("away")
        delete(self, answer_id)

    monkeypatch.setattr(Database, "write", write_unheard)
    monkeypatch.setattr(Database, "delete", delete_later)
    with start(tmp_path / "a", state) as served, sqlite3.connect(state / FILE) as database:
        assert ask(served, background=True).json()["error"]["code"] == "store_unavailable"
        assert database.execute("SELECT count(*) FROM answers").fetchone() == (1,)
        wait_until(lambda: database.execute("SELECT count(*) FROM answers").fetchone() == (0,))
        assert not num_failures[1] and not served.engine.generations


@pytest.mark.parametrize("by_other", [False, True])
def test_cancelled(served: Served, other: Served, by_other: bool) -> None:
    served.engine.reset(Script(served.ids(ANSWER)[:3], is_hanging=True))
    told = ask(served, background=True).json()
    served.engine.hanging.get(timeout=60)
    gateway = other if by_other else served
    assert gateway.http.post(f"{PATH}/{told['id']}/cancel").json()["status"] == "cancelled"
    assert served.engine.wait_ending() == "closed"
    wait_until(lambda: other.http.get(f"{PATH}/{told['id']}").json()["status"] == "cancelled")
    assert read(other, told["id"])[-1]["response"]["status"] == "cancelled"
    assert gateway.http.post(f"{PATH}/{told['id']}/cancel").json()["status"] == "cancelled"
    served.engine.reset(served.script(ANSWER))
    not_background = ask(served).json()["id"]
    assert served.http.post(f"{PATH}/{not_background}/cancel").status_code == 400
    assert served.http.post(f"{PATH}/resp_x/cancel").status_code == 404


def test_failed(served: Served, other: Served) -> None:
    """Behind tokens a failure is part of the answer; before, the request is refused and nothing is kept."""
    error = ApiError(503, "no worker is left", None, "failed")
    served.engine.reset(Script(served.ids(ANSWER)[:3], error=error))
    events = events_of(ask(served, stream=True).text)
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    answer_id = events[0]["response"]["id"]
    wait_until(lambda: other.http.get(f"{PATH}/{answer_id}").json().get("status") == "failed")
    assert read(other, answer_id) == events and events[-1]["error"]["message"] == "no worker is left"
    served.engine.reset(Script((), error=error))
    for is_streamed in (False, True):
        assert ask(served, stream=is_streamed).status_code == 503
    told = ask(served, background=True).json()
    wait_until(lambda: served.http.get(f"{PATH}/{told['id']}").json()["status"] == "failed")


def test_taken_over(tmp_path: Path, state: Path) -> None:
    """A gateway dies: another one goes on behind the last stored token, with the request's own ids and seed."""
    with run_api(tmp_path / "b", FULL, state=state) as other:
        other.http.headers.update(dict(other.metadata))
        with run_api(tmp_path / "a", FULL, state=state) as first:
            first.http.headers.update(dict(first.metadata))
            whole = f"before {CALL}"
            ids = first.ids(whole)
            first.engine.reset(Script(ids[: len(ids) - 4], is_hanging=True))
            other.engine.reset(other.script(whole))
            told = ask(first, background=True, tools=[TOOL]).json()
            first.engine.hanging.get(timeout=60)
            wait_until(lambda: other.http.get(f"{PATH}/{told['id']}").json()["status"] == "in_progress")
            begun = first.engine.generations[0]
        wait_stored(other, told["id"])
        (resumed,) = other.engine.generations
        assert other.count("generation_tokens_total") == len(ids) + 1 - len(resumed.emitted)  # with the end token
        assert other.count("time_to_first_token_seconds_count") == other.count("prompt_tokens_total") == 0
        assert 0 < len(resumed.emitted) <= len(ids) - 4 and resumed.computes == "weights"
        assert list(resumed.emitted) == ids[: len(resumed.emitted)]
        assert resumed.sampling == begun.sampling and resumed.prompt_ids == begun.prompt_ids
        events = read(other, told["id"])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        text, call = events[-1]["response"]["output"]
        assert text["content"][0]["text"].strip() == "before" and json.loads(call["arguments"]) == {"x": "a 🙂 b"}
        assert read(other, told["id"]) == events


def test_answer_that_kills_its_gateways(tmp_path: Path, state: Path) -> None:
    """It does not go round."""
    with run_api(tmp_path / "a", FULL, state=state) as first:
        first.http.headers.update(dict(first.metadata))
        first.engine.reset(Script(first.ids(ANSWER)[:3], is_hanging=True))
        told = ask(first, background=True).json()
        first.engine.hanging.get(timeout=60)
        wait_until(lambda: len(Database(state).find_tokens(told["id"])) > 0)
    with sqlite3.connect(state / FILE) as database:
        database.execute("UPDATE answers SET num_deaths = 3, taken_bytes = 12, lease_until = 0, gateway = 'dead'")
    with run_api(tmp_path / "b", FULL, state=state) as other:
        other.http.headers.update(dict(other.metadata))
        wait_stored(other, told["id"], "failed")
        error = other.http.get(f"{PATH}/{told['id']}").json()["error"]
        assert error["code"] == "gateways_ended" and "4 gateways" in error["message"]
        assert other.engine.generations == []


def test_one_look_for_all_followers(served: Served, other: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many read answers of another gateway, on whatever of them."""
    looks: list[set[str]] = []
    find_new = Database.find_new

    def note(self: Database, wanted: Any) -> Any:
        looks.append({answer for answer, *_ in wanted})
        return find_new(self, wanted)

    monkeypatch.setattr(Database, "find_new", note)
    assert other.runs is not None
    tail = other.runs.replays._tail
    served.engine.reset(Script(served.ids(ANSWER)[:3], is_hanging=True))
    told = [ask(served, background=True).json()["id"] for _ in range(3)]
    for _ in told:
        served.engine.hanging.get(timeout=60)
    with ThreadPoolExecutor(6) as threads:
        following = [threads.submit(read, other, answer_id) for answer_id in [*told, *told]]
        wait_until(lambda: len(tail._waiting) == 6)  # each has looked by itself
        wait_until(lambda: set(told) in looks)
        begin = len(looks)
        wait_until(lambda: len(looks) > begin + 3)
        assert all(look == set(told) for look in looks[begin:])
        for answer_id in told:
            assert served.http.post(f"{PATH}/{answer_id}/cancel").json()["status"] == "cancelled"
        assert {one.result(60)[-1]["type"] for one in following} == {"response.incomplete"}


def test_read_from_behind_the_end(served: Served, other: Served) -> None:
    """A gateway that died may have sent more of an answer than there is of it in the end."""
    served.engine.reset(Script(served.ids(ANSWER)[:3], error=ApiError(503, "no worker is left", None, "failed")))
    events = events_of(ask(served, stream=True).text)
    answer_id = events[0]["response"]["id"]
    wait_stored(other, answer_id, "failed")
    assert read(other, answer_id, starting_after=99) == read(served, answer_id, starting_after=99) == events[-2:]


def test_whole_answers_end_with_their_gateway(tmp_path: Path, state: Path) -> None:
    """Nobody knows the id of one that was to be sent whole."""
    with run_api(tmp_path / "b", FULL, state=state) as other:
        other.http.headers.update(dict(other.metadata))
        with run_api(tmp_path / "a", FULL, state=state) as first:
            first.engine.reset(Script(first.ids(ANSWER)[:3], is_hanging=True))
            with pytest.raises(httpx.ReadTimeout):
                first.http.post(PATH, json={"model": SERVED, "input": "x"}, headers=dict(first.metadata), timeout=1.0)
            assert first.engine.wait_ending() == "closed"  # with its client
        assert other.engine.generations == []


def test_official_client(served: Served) -> None:
    """OpenAI's: a conversation of three turns, background, polling, a stream left and read on, and deleting."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[0], max_retries=0)
    first = client.responses.create(model=SERVED, input="hello")
    second = client.responses.create(model=SERVED, input="more", previous_response_id=first.id)
    third = client.responses.create(model=SERVED, input="more", previous_response_id=second.id)
    assert third.previous_response_id == second.id and third.usage and first.usage
    assert third.usage.input_tokens > 2 * first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match=r"conversation.*previous_response_id"):
        client.responses.create(model=SERVED, input="more", conversation="conv_1")
    assert client.responses.retrieve(third.id) == third
    items: Any = client.responses.input_items.list(third.id).data
    assert [item.content[0].text for item in items] == ["more"]
    told = client.responses.create(model=SERVED, input="hello", background=True)
    wait_until(lambda: client.responses.retrieve(told.id).status == "completed")
    with client.responses.create(model=SERVED, input="hello", stream=True) as stream:
        seen = [next(stream), next(stream), next(stream)]
    answer_id = seen[0].response.id  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(answer_id, stream=True, starting_after=seen[-1].sequence_number))
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == ANSWER
    client.responses.delete(answer_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer_id)


def test_drained(tmp_path: Path, state: Path) -> None:
    """What can be read elsewhere goes on there at once; an answer that is sent whole ends where it began."""
    with start(tmp_path / "a", state) as served, start(tmp_path / "b", state) as other:
        check_drained(served, other)


def check_drained(served: Served, other: Served) -> None:
    ids = served.ids(ANSWER)
    served.engine.reset(served.script(ANSWER, delay_s=0.1), Script(ids[:3], is_hanging=True))
    other.engine.reset(other.script(ANSWER))
    runs = served.runs
    assert runs is not None
    told = ask(served, background=True).json()
    served.engine.hanging.get(timeout=60)
    wait_until(lambda: runs.num_others == 1)
    with ThreadPoolExecutor(1) as threads:
        whole = threads.submit(ask, served)
        wait_until(lambda: len(served.engine.generations) == 2)
        served.run(runs.drain())
        wait_stored(other, told["id"])
        assert len(other.engine.generations) == 1
        assert whole.result(60).json()["output"][0]["content"][0]["text"] == ANSWER
    assert read(served, told["id"]) == read(other, told["id"])


def test_refused_late(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the beginning of a stream a refusal is the answer's own end, with its numbers."""
    monkeypatch.setattr(http_answer, "HOLD_S", 0.01)
    error = ApiError(503, "no worker is left", None, "failed")
    served.engine.reset(Script((), delay_s=0.2, error=error))
    events = events_of(ask(served, stream=True).text)
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    again = read(served, events[0]["response"]["id"])
    events[-1].pop("error")  # its kind, which the store does not know
    assert [event | {"error": 0} for event in again[-1:]] == [event | {"error": 0} for event in events[-1:]]
    assert again[:-1] == events[:-1]


def test_ids_that_are_none(served: Served) -> None:
    for wrong in ("resp_x", "%00", "a" * 3000, "resp_" + "0" * 48):
        assert served.http.get(f"{PATH}/{wrong}").status_code in (400, 404)
        assert ask(served, previous_response_id=wrong).status_code == 404
    assert ask(served).status_code == 200


def test_taken_over_later(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails for now is tried again."""
    prepare, failures = Replays.prepare, [ApiError(429, "busy", None, "overloaded"), StoreError("away")]

    async def prepare_at_last(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await prepare(*args)

    with run_api(tmp_path / "b", FULL, state=state) as other:
        other.http.headers.update(dict(other.metadata))
        other.engine.reset(other.script(ANSWER))
        with run_api(tmp_path / "a", FULL, state=state) as first:
            first.http.headers.update(dict(first.metadata))
            first.engine.reset(Script(first.ids(ANSWER)[:2], is_hanging=True))
            told = ask(first, background=True).json()
            first.engine.hanging.get(timeout=60)
        monkeypatch.setattr(Replays, "prepare", prepare_at_last)
        wait_stored(other, told["id"])
        assert not failures and len(other.engine.generations) == 1
