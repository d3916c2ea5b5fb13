"""Stored answers to chats over HTTP, computed by a scripted engine: kept, listed, read again and taken over."""

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.errors import ApiError
from gateway.store import runs as running_answers
from gateway.store.database import FILE
from tests.support.api_server import ANSWER, FULL, KEYS, PLAIN, SERVED, Served, run_api
from tests.support.combinations import combination
from tests.support.fake_engine_client import Script
from tests.support.live import wait_until

PATH = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": "a 🙂 b"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
}
Chunk = tuple[str, Any]  # SSE id and JSON; "[DONE]" as it is


@pytest.fixture(scope="module", autouse=True)
def soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_answers, "LOOK_S", 0.1)
        patch.setattr(running_answers, "WRITE_S", 0.02)
        yield


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chats") / "state"


@pytest.fixture(scope="module")
def gateways(state: Path, soon: None) -> Iterator[list[Served]]:
    """Two with the same store."""
    with ExitStack() as running:
        yield [running.enter_context(run_api(state.parent / name, FULL, state=state)) for name in "ab"]


@pytest.fixture
def served(gateways: list[Served]) -> Served:
    """Its store is empty."""
    gateways[0].engine.reset(gateways[0].script(ANSWER))
    for gateway in gateways:
        gateway.http.headers.update(dict(gateway.metadata))
    while listed := gateways[0].http.get(PATH).json()["data"]:
        for one in listed:
            gateways[0].http.delete(f"{PATH}/{one['id']}")
    return gateways[0]


@pytest.fixture
def other(gateways: list[Served], served: Served) -> Served:
    """Another gateway with the same store."""
    gateways[1].engine.reset(gateways[1].script("nothing of this"))
    return gateways[1]


def asking(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": SERVED, "messages": [{"role": "user", "content": text}], "store": True, **fields}


def ask(served: Served, text: str = "hello", **fields: Any) -> httpx.Response:
    return served.http.post(PATH, json=asking(text, **fields))


def chunks_of(text: str) -> list[Chunk]:
    """All chunks; only the end has no id."""
    chunks: list[Chunk] = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            assert ("id" in lines) == (lines["data"] != "[DONE]")
            chunks.append((lines.get("id", ""), lines["data"] if "id" not in lines else json.loads(lines["data"])))
    return chunks


def stream(served: Served, **fields: Any) -> list[Chunk]:
    return chunks_of(ask(served, stream=True, **fields).text)


def read(served: Served, answer_id: str, after: str = "", *, in_header: bool = False) -> list[Chunk]:
    params: dict[str, Any] = {"stream": True} | ({"starting_after": after} if after and not in_header else {})
    headers = {"last-event-id": after} if in_header else {}
    reply = served.http.get(f"{PATH}/{answer_id}", params=params, headers=headers)
    assert reply.status_code == 200, reply.text
    return chunks_of(reply.text)


def of_choice(chunks: Sequence[Chunk], index: int) -> list[Any]:
    """What does not differ between two answers to one request, in order; of no choice: index -1."""
    told = [data for _, data in chunks if isinstance(data, dict)]
    if index < 0:
        return [data.get("usage") or data["error"] for data in told if not data.get("choices")]
    return [data["choices"][0] for data in told if data.get("choices") and data["choices"][0]["index"] == index]


def wait_stored(served: Served, answer_id: str) -> dict[str, Any]:
    """Until another gateway can read the whole answer."""
    wait_until(lambda: served.http.get(f"{PATH}/{answer_id}").status_code == 200)
    whole: dict[str, Any] = served.http.get(f"{PATH}/{answer_id}").json()
    return whole


def test_kept_and_deleted(served: Served, other: Served) -> None:
    told = ask(served, metadata={"a": "b"}).json()
    assert told["choices"][0]["message"]["content"] == ANSWER and told["metadata"] == {"a": "b"}
    assert wait_stored(other, told["id"]) == served.http.get(f"{PATH}/{told['id']}").json() == told
    plain = ask(served, store=False).json()
    assert set(told) - set(plain) == {"metadata"} and plain["usage"] == told["usage"]
    assert served.http.get(f"{PATH}/{plain['id']}").status_code == 404
    for gateway in (other, served):
        changed = gateway.http.post(f"{PATH}/{told['id']}", json={"metadata": {"c": gateway.url}}).json()
        assert changed == told | {"metadata": {"c": gateway.url}}
        assert other.http.get(f"{PATH}/{told['id']}").json() == changed
    assert other.http.delete(f"{PATH}/{told['id']}").json()["object"] == "chat.completion.deleted"
    assert served.http.get(f"{PATH}/{told['id']}").status_code == 404


def test_of_other_keys(served: Served) -> None:
    told, foreign = ask(served).json(), {b"authorization": f"Bearer {KEYS[1]}".encode()}
    path = f"{PATH}/{told['id']}"
    for method in ("GET", "DELETE", "POST"):
        body = {"metadata": None} if method == "POST" else None
        reply = served.http.request(method, path, headers=foreign, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "completion_id")
    assert served.http.get(f"{path}/messages", headers=foreign).status_code == 404
    assert served.http.get(PATH, headers=foreign).json()["data"] == []
    assert served.http.get(PATH, headers=foreign, params={"after": told["id"]}).status_code == 400
    assert served.http.get(f"/v1/responses/{told['id']}").status_code == 404
    response = served.http.post("/v1/responses", json={"model": SERVED, "input": "x"}).json()["id"]
    assert served.http.get(f"{PATH}/{response}").status_code == 404


def test_listed(served: Served, other: Served) -> None:
    """In pages, of a model, with metadata, in either order, and without those that are not over or failed."""
    ids = [ask(served, metadata={"at": str(at), "half": str(at % 2)}).json()["id"] for at in range(5)]
    served.engine.reset(Script(served.ids(ANSWER)[:3], is_hanging=True))
    with served.http.stream("POST", PATH, json=asking(stream=True)) as reply:
        next(reply.iter_text())
        served.engine.hanging.get(timeout=60)
        wait_until(lambda: len(other.http.get(PATH).json()["data"]) == len(ids))
        listed = other.http.get(PATH).json()
        assert {one["id"] for one in listed["data"]} == set(ids) and listed["has_more"] is False
        ids = [one["id"] for one in listed["data"]]  # as ordered within a second
        assert [one["created"] for one in listed["data"]] == sorted(one["created"] for one in listed["data"])
        pages: list[tuple[dict[str, Any], list[str], bool]] = [
            ({"limit": 2}, ids[:2], True),
            ({"limit": 2, "after": ids[1]}, ids[2:4], True),
            ({"limit": 2, "after": ids[3]}, ids[4:], False),
            ({"order": "desc"}, ids[::-1], False),
            ({"order": "desc", "limit": 3, "after": ids[2]}, [ids[1], ids[0]], False),
            ({"model": "another"}, [], False),
            ({"model": SERVED, "limit": 5}, ids, False),
            ({"metadata[at]": "9"}, [], False),
        ]
        for params, found, has_more in pages:
            page = other.http.get(PATH, params=params).json()
            assert ([one["id"] for one in page["data"]], page["has_more"]) == (found, has_more), params
        page = other.http.get(PATH, params={"metadata[half]": "1", "limit": 1}).json()
        assert page["has_more"] is True and page["data"][0]["metadata"]["half"] == "1"
        assert other.http.get(PATH, params={"metadata[half]": "1", "metadata[at]": "2"}).json()["data"] == []
        assert other.http.get(PATH, params={"after": "chatcmpl-x"}).json()["error"]["param"] == "after"


def test_messages(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = [{"role": "system", "content": "short"}, {"role": "user", "content": parts}]
    answer_id = ask(served, messages=asked).json()["id"]
    first, second = served.http.get(f"{PATH}/{answer_id}/messages").json()["data"]
    assert (first["content"], first["content_parts"], first["id"]) == ("short", None, f"{answer_id}-0")
    assert (second["content"], second["content_parts"], second["role"]) == ("ab", parts, "user")
    page = served.http.get(f"{PATH}/{answer_id}/messages", params={"order": "desc", "limit": 1}).json()
    assert page["data"] == [second] and page["has_more"] is True


@pytest.mark.parametrize(
    ("text", "num_choices"),
    [combination(ANSWER, 3), combination(f"before {CALL}", 1), (f"{CALL}{CALL}", 2), ("one, two END three", 2)],
)
def test_same_chunks_however_tokens_arrive(served: Served, other: Served, text: str, num_choices: int) -> None:
    """Their borders and numbers, in a stream, from its gateway and from another one's store, from every place."""
    fields: dict[str, Any] = {
        "tools": [TOOL], "n": num_choices, "stop": "END", "logprobs": True, "top_logprobs": 2,
        "stream_options": {"include_usage": True}, "include_timing": True, "return_token_ids": True,
    }  # fmt: skip
    shapes = []
    for group in (1, 2, 100):
        slow = served.script(text, group=group, delay_s=0.001)
        served.engine.reset(served.script(text, group=3), slow)
        chunks = stream(served, **fields)
        answer_id, whole = chunks[0][1]["id"], wait_stored(other, chunks[0][1]["id"])
        assert chunks[-1][1] == "[DONE]" and chunks[-2][1]["usage"] == whole["usage"]
        for gateway, in_header in ((served, True), (other, False)):
            again = read(gateway, answer_id)
            for index in range(-1, num_choices):
                assert of_choice(again, index) == of_choice(chunks, index)
            for at in range(0, len(chunks) - 1, len(chunks) // 3):
                rest = read(gateway, answer_id, chunks[at][0], in_header=in_header)
                for index in range(-1, num_choices):
                    assert of_choice(chunks[: at + 1] + rest, index) == of_choice(chunks, index)
                assert [one for one in rest if one[0]][-1:] in ([], [chunks[-2]])
        shapes.append([[one["delta"] for one in of_choice(chunks, index)] for index in range(num_choices)])
        for index, choice in enumerate(whole["choices"]):
            deltas = [one["delta"].get("content") or "" for one in of_choice(chunks, index)]
            assert "".join(deltas) == (choice["message"]["content"] or "")
            assert choice["timing"] == of_choice(chunks, index)[-1]["timing"]
    calls = re.compile(r"call_\w+")  # drawn anew for each request
    assert len({calls.sub("", json.dumps(shape)) for shape in shapes}) == 1


def test_as_not_stored(served: Served) -> None:
    """A stored answer has what it has otherwise."""
    fields: dict[str, Any] = {"n": 2, "logprobs": True, "prompt_logprobs": 1, "return_token_ids": True, "seed": 7}
    kept, plain = ask(served, **fields).json(), ask(served, store=False, **fields).json()
    changing = ("id", "created", "metadata")
    assert {name: value for name, value in kept.items() if name not in changing} == {
        name: value for name, value in plain.items() if name not in changing
    }
    assert "prompt_logprobs" in kept
    texts = [one["delta"].get("content") or "" for one in of_choice(read(served, kept["id"]), 1)]
    assert "".join(texts) == kept["choices"][1]["message"]["content"]


def test_dropped_and_taken_up(served: Served, other: Served) -> None:
    """Its client leaves; it goes on, and is read from where it was left, here and elsewhere."""
    served.engine.reset(served.script(ANSWER, delay_s=0.02))
    got = ""
    with served.http.stream("POST", PATH, json=asking(stream=True, n=2)) as reply:
        for text in reply.iter_text():
            got += text
            if '"content":"h' in got:
                break
    seen = chunks_of(got[: got.rindex("\n\n") + 2])
    answer_id = seen[0][1]["id"]
    wait_until(lambda: other.http.get(f"{PATH}/{answer_id}").status_code in (200, 409))
    for gateway in (other, served):
        chunks = seen + read(gateway, answer_id, seen[-1][0])
        for index in (0, 1):
            texts = [one["delta"].get("content") or "" for one in of_choice(chunks, index)]
            assert "".join(texts) == ANSWER
        assert chunks[-1][1] == "[DONE]"
    assert [served.engine.wait_ending() for _ in range(2)] == ["complete", "complete"]


def test_not_over_failed_and_left(served: Served, other: Served) -> None:
    hanging = Script(served.ids(ANSWER)[:3], is_hanging=True)
    error = ApiError(503, "no worker is left", None, "failed")
    served.engine.reset(hanging)
    with served.http.stream("POST", PATH, json=asking(stream=True)) as reply:
        texts = reply.iter_text()
        (_, first), *_ = chunks_of(next(texts))
        served.engine.hanging.get(timeout=60)
        refused = served.http.get(f"{PATH}/{first['id']}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_over")
        assert served.http.post(f"/v1/responses/{first['id']}/cancel").status_code == 404
        assert served.http.delete(f"{PATH}/{first['id']}").status_code == 200
        assert served.engine.wait_ending() == "closed"
        assert '"code":"not_found"' in "".join(texts)
    served.engine.reset(Script(served.ids(ANSWER)[:3], error=error), served.script(ANSWER))
    chunks = stream(served, n=2)
    assert chunks[-1][1]["error"]["code"] == "failed"
    answer_id = chunks[0][1]["id"]
    wait_until(lambda: other.http.get(f"{PATH}/{answer_id}").status_code == 500)
    assert other.http.get(f"{PATH}/{answer_id}").json()["error"]["code"] == "failed"
    for index in range(2):
        known = of_choice(chunks, index)
        assert of_choice(read(other, answer_id), index)[: len(known)] == known
    assert of_choice(read(other, answer_id), -1) == of_choice(chunks, -1)
    assert of_choice(read(other, answer_id, chunks[-1][0]), -1) == []
    served.engine.reset(Script((), error=error))
    for is_streamed in (False, True):
        assert ask(served, stream=is_streamed).status_code == 503


def test_refused(served: Served, tmp_path: Path) -> None:
    for fields, param in (
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(at): "b" for at in range(17)}}, "metadata"),
        (
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ):
        reply = ask(served, **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    answer_id = ask(served).json()["id"]
    for after in ("x", "-1", "1,2,3", "1,", "9" * 30):
        reply = served.http.get(f"{PATH}/{answer_id}", params={"stream": True, "starting_after": after})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "starting_after"), after
    reply = served.http.get(f"{PATH}/{answer_id}", params={"starting_after": "1"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "starting_after")
    with run_api(tmp_path / "m", PLAIN) as plain:
        error = ask(plain).json()["error"]
        assert (error["param"], error["code"]) == ("store", "unsupported_field") and "--state-dir" in error["message"]
        for path in (PATH, f"{PATH}/x"):
            assert "--state-dir" in plain.http.get(path).json()["error"]["message"]


@pytest.mark.parametrize("num_choices", [combination(1), 2])
def test_taken_over(tmp_path: Path, num_choices: int) -> None:
    """A gateway dies: another one goes on behind the last stored tokens; no chunk is lost or comes again."""
    state = tmp_path / "state"
    with run_api(tmp_path / "b", FULL, state=state) as other:
        other.http.headers.update(dict(other.metadata))
        with run_api(tmp_path / "a", FULL, state=state) as first:
            first.http.headers.update(dict(first.metadata))
            text = f"before it, some words {CALL}"
            ids = first.ids(text)
            first.engine.reset(Script(ids[: len(ids) - 4], is_hanging=True), first.script(text, delay_s=0.01))
            other.engine.reset(other.script(text))
            got = ""
            asked = asking(stream=True, tools=[TOOL], n=num_choices, stream_options={"include_usage": True})
            if num_choices == 1:
                first.engine.scripts.clear()
            with first.http.stream("POST", PATH, json=asked) as reply:
                for part in reply.iter_text():
                    got += part
                    if got.count('"content":') > 4 * num_choices:
                        break
                first.engine.hanging.get(timeout=60)
                seen = chunks_of(got[: got.rindex("\n\n") + 2])
                answer_id = seen[0][1]["id"]
                wait_until(lambda: other.http.get(f"{PATH}/{answer_id}").status_code == 409)
                begun = list(first.engine.generations)
        whole = wait_stored(other, answer_id)
        for resumed in other.engine.generations:
            (before,) = [one for one in begun if one.sampling.seed == resumed.sampling.seed]
            assert resumed.prompt_ids == before.prompt_ids and list(resumed.emitted) == ids[: len(resumed.emitted)]
        chunks = seen + read(other, answer_id, seen[-1][0])
        again = read(other, answer_id)
        for index in range(-1, num_choices):
            assert of_choice(chunks, index) == of_choice(again, index)
        for choice in whole["choices"]:
            (call,) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"x": "a 🙂 b"}


def test_end_that_was_not_stored(served: Served, other: Served, gateways: list[Served], state: Path) -> None:
    """Its gateway died between the last token that it may have and its end: nothing is left to compute."""
    told = ask(served, stream=True, max_tokens=3)
    answer_id = chunks_of(told.text)[0][1]["id"]
    whole = wait_stored(other, answer_id)
    assert whole["choices"][0]["finish_reason"] == "length"
    for gateway in gateways:
        gateway.engine.reset(gateway.script("nothing of this"))
    with closing(sqlite3.connect(state / FILE)) as database, database:
        database.execute("UPDATE tokens SET finish = '' WHERE answer = ?", (answer_id,))
        database.execute(
            "UPDATE answers SET status = 'in_progress', result = '{}', gateway = '', lease_until = 0 WHERE id = ?",
            (answer_id,),
        )
    again = wait_stored(other, answer_id)
    assert again["choices"] == whole["choices"]
    assert not any(gateway.engine.generations for gateway in gateways)


def test_official_client(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[0], max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    told = client.chat.completions.create(model=SERVED, messages=messages, store=True, metadata={"a": "b"})
    other = client.chat.completions.create(model=SERVED, messages=messages, store=True)
    assert client.chat.completions.retrieve(told.id) == told
    assert {one.id for one in client.chat.completions.list(limit=1)} == {told.id, other.id}
    assert [one.id for one in client.chat.completions.list(metadata={"a": "b"}, model=SERVED)] == [told.id]
    assert [one.content for one in client.chat.completions.messages.list(told.id)] == ["hello"]
    client.chat.completions.update(other.id, metadata={"a": "b"})
    assert len(client.chat.completions.list(metadata={"a": "b"}).data) == 2
    assert client.chat.completions.delete(told.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(told.id)
