"""Anthropic's Messages API only: its events and blocks, counts, keys, and official client."""

from typing import Any

import httpx
import pytest

from tests.support.adapters import APIS
from tests.support.api_server import ANSWER, KEYS, SERVED, Served
from tests.support.fake_ring import TIMING
from tests.support.rest_adapters import read_events
from tests.support.words import CALL, HELLO, NOW, TOOLS

API = APIS["messages"]
BOTH = f"Let me look. {CALL}\n{NOW}"
ASKED: Any = {"model": SERVED, "max_tokens": 200, "messages": HELLO}
CALLING: Any = {**ASKED, "tools": API.body({"tools": TOOLS})["tools"]}


def post(served: Served, **fields: Any) -> Any:
    answer = served.http.post("/v1/messages?beta=true", json={**API.body({}), **fields})
    assert answer.status_code == 200, answer.text
    return read_events(answer.text) if fields.get("stream") else answer.json()


def test_an_answer(served: Served) -> None:
    answer = post(served, metadata={"user_id": "me"})
    assert answer.pop("id").startswith("msg_")
    num_prompt = len(served.ring.sent[0]["prompt_ids"])
    assert answer.pop("usage") == {
        "input_tokens": num_prompt - TIMING.cached_tokens, "output_tokens": served.ring.num_given,
        "cache_read_input_tokens": TIMING.cached_tokens, "cache_creation_input_tokens": 0,
    }  # fmt: skip
    assert answer == {
        "type": "message", "role": "assistant", "model": SERVED, "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn", "stop_sequence": None,
    }  # fmt: skip
    served.ring.reset(served.script(""))
    assert post(served)["content"] == []


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_events(served: Served, group: int) -> None:
    served.ring.reset(served.script(BOTH, group=group))
    events = post(served, stream=True, tools=CALLING["tools"])
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    alone = [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind]
    assert alone == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "text", "text": ""}
    assert [(start["type"], start["name"], start["input"]) for start in starts[1:]] == [
        ("tool_use", "weather", {}), ("tool_use", "now", {}),
    ]  # fmt: skip
    deltas = [(event["index"], event["delta"]["type"]) for event in events if event["type"] == "content_block_delta"]
    assert set(deltas) == {(0, "text_delta"), (1, "input_json_delta"), (2, "input_json_delta")}
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["model"]) == ([], None, SERVED)
    assert start["usage"]["input_tokens"] == len(served.ring.sent[0]["prompt_ids"])
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_tokens_are_counted(served: Served) -> None:
    more = {"system": "be short", "tools": CALLING["tools"]}
    usage = post(served, **more)["usage"]
    counted = served.http.post("/v1/messages/count_tokens", json={"model": SERVED, "messages": HELLO, **more}).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_any_of_the_keys_opens_in_either_header(served: Served) -> None:
    key, other = KEYS[0].encode(), KEYS[1].encode()
    right: list[dict[bytes, bytes]] = [
        {b"x-api-key": key}, {b"x-api-key": other}, {b"authorization": b"Bearer " + key},
        {b"authorization": b"Bearer wrong", b"x-api-key": key},
    ]  # fmt: skip
    wrong: list[dict[bytes, bytes]] = [
        {}, {b"x-api-key": b"wrong"}, {b"x-api-key": b""}, {b"x-api-key": b"Bearer " + key}, {b"authorization": key},
        {b"authorization": b"Basic " + key, b"x-api-key": b"wrong"},
    ]  # fmt: skip
    with httpx.Client() as http:
        for headers in [*right, *wrong]:
            answer = http.post(f"{served.url}/v1/messages", json=ASKED, headers=headers)
            assert answer.status_code == (200 if headers in right else 401), headers
            if headers in wrong:
                assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "authentication_error")


def test_errors_of_its_paths_have_its_shape(served: Served) -> None:
    answers = [
        (served.http.get("/v1/messages"), 405, "invalid_request_error"),
        (served.http.post("/v1/messages/huh"), 404, "not_found_error"),
        (served.http.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (served.http.post("/v1/messages", data={"a": "b"}), 415, "invalid_request_error"),
    ]
    for answer, status, kind in answers:
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert (answer.json()["error"].keys(), answer.json()["error"]["type"]) == ({"type", "message"}, kind)
