"""When a stream's status and first events are sent: before the first token, but after a refusal that comes at once."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message

from gateway.api.http import answer as http_answer
from gateway.errors import not_ready
from tests.support.adapters import APIS
from tests.support.api_server import Served
from tests.support.fake_engine_client import Script
from tests.support.rest_adapters import Rest
from tests.support.words import TOOLS, Api

RESTS = {name: api for name, api in APIS.items() if isinstance(api, Rest)}
PINGS = {"messages": 'event: ping\ndata: {"type":"ping"}\n\n'}
COMMENT = ": ping\n\n"
FIRSTS = {  # what is sent before the first token
    "chat": ['"role":"assistant"'], "messages": ['"message_start"'], "completions": [],
    "responses": ['"response.created"', '"response.in_progress"'],
}  # fmt: skip


@contextmanager
def streaming(served: Served, api: Api, ask: dict[str, Any]) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    """The response whose headers are there, and its text as it arrives."""
    assert isinstance(api, Rest)
    body = {**api.body(ask), "stream": True}
    with served.http.stream("POST", f"/v1/{api.path}", json=body) as answer:
        yield answer, answer.iter_text()


def read_until(parts: Iterator[str], end: str) -> str:
    text = ""
    while not text.endswith(end):
        text += next(parts)
    return text


@pytest.mark.parametrize("name", RESTS)
def test_it_begins_before_the_first_token_and_pings(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_answer, "PING_S", 0.05)
    served.engine.reset(Script(is_hanging=True))
    ping = PINGS.get(name, COMMENT)
    with streaming(served, RESTS[name], {}) as (answer, parts):
        assert answer.status_code == 200
        text = read_until(parts, ping * 2)
    first, *pings = text.split(ping)
    assert not any(pings) and len(pings) >= 2
    events = first.strip().split("\n\n") if first else []
    assert len(events) >= len(FIRSTS[name]) and bool(events) == bool(FIRSTS[name])
    assert all(word in event for word, event in zip(FIRSTS[name], events, strict=False))
    assert served.engine.wait_ending() == "closed"


@pytest.mark.parametrize(
    ("name", "text"), [*product(RESTS, ["hello"]), ("chat", "hello <tool_call>"), ("responses", "")]
)
def test_it_pings_whenever_nothing_is_shown(
    served: Served, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a call is held back: it may be text, or its input is only sent whole."""
    monkeypatch.setattr(http_answer, "PING_S", 0.05)
    body = RESTS[name].body({"tools": TOOLS} if "<" in text else {})
    if not text:
        body["tools"], text = (
            [{"type": "custom", "name": "run"}],
            '<tool_call>\n{"name": "run", "arguments": {"input": "',
        )
        body["tool_choice"] = {"type": "custom", "name": "run"}
    served.engine.reset(served.script(text, ends=False, is_hanging=True))
    with served.http.stream("POST", f"/v1/{RESTS[name].path}", json={**body, "stream": True}) as answer:
        assert served.engine.hanging.get(timeout=60)
        read_until(answer.iter_text(), PINGS.get(name, COMMENT) * 2)
    assert served.engine.wait_ending() == "closed"


@pytest.mark.parametrize("name", RESTS)
@pytest.mark.parametrize("reason", ["unready", "grammar", None])
def test_a_refusal_that_may_come_late_has_a_status(
    served: Served, name: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no worker can serve, and until a decode worker takes or refuses the grammar."""
    monkeypatch.setattr(http_answer, "HOLD_S", 0.01)
    served.engine.reset(Script(error=not_ready("no worker is left"), delay_s=0.1))
    served.engine.unready = "no decode worker is alive" if reason == "unready" else None
    ask: dict[str, Any] = {}
    if reason == "grammar":
        ask = {"form": {"json_schema": {}}} if name == "completions" else {"tools": TOOLS, "tool_choice": "required"}
    with streaming(served, RESTS[name], ask) as (answer, parts):
        assert answer.status_code == (503 if reason else 200)
        text = "".join(parts)
    assert "no worker is left" in text and ("retry-after" in answer.headers) == bool(reason)
    if reason and name != "messages":
        assert json.loads(text)["error"]["code"] == "not_ready"


async def test_an_answer_begins_and_ends_though_its_client_is_gone_before() -> None:
    """So what it holds is given back, and its trace is written."""
    steps = list[str]()

    async def events() -> AsyncGenerator[bytes, None]:
        steps.append("begun")
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            steps.append("ended")

    class Silent:
        id, ping, done = "id", b"", b""

        def begin(self) -> list[bytes]:
            return []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    stream = http_answer.EventStream(events(), cast(http_answer.Writer, Silent()), 10.0, lambda: True, tuple)
    await stream({"type": "http", "path": "/", "state": {"request_id": "r"}}, receive, send)
    assert steps == ["begun", "ended"]
