"""Every byte of an answer of every REST API: the table has the requests, exact_answers.jsonl the answers.

TEST_RECORD=1 writes the file anew: read its diff as a client would. Ids are numbered in the order in which they appear.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import not_ready
from runtime.hardware import OWN_VERSION
from tests.support.adapters import APIS
from tests.support.api_server import Served
from tests.support.fake_engine_client import Script
from tests.support.tiny_tokenizer import byte_token
from tests.support.words import CALL, NOW, TOOLS

FILE = Path(__file__).with_name("exact_answers.jsonl")
CHAT, TEXT, RESPONSES, MESSAGES = (
    f"/v1/{path}" for path in ("chat/completions", "completions", "responses", "messages")
)
STARTS = {CHAT: "chat", TEXT: "completions", RESPONSES: "responses", MESSAGES: "messages"}
BOTH = f"Look. {CALL}{NOW}"
LIMIT = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
A = byte_token("a")
FORCED = {MESSAGES: {"type": "any"}}
USAGE = {"include_usage": True, "include_obfuscation": False}
ASKED: dict[str, Any] = {
    "instructions": "be short",
    "temperature": 0.5,
    "top_p": 0.5,
    "max_output_tokens": 100,
    "metadata": {"a": "b"},
    "tools": [{"type": "function", "name": "now", "parameters": None, "strict": None}],
    "parallel_tool_calls": False,
}
CUSTOM: Any = [
    {"type": "namespace", "name": "sky", "tools": [{"type": "function", "name": "weather"}]},
    {"type": "custom", "name": "now", "format": {"type": "grammar", "syntax": "regex", "definition": "a*"}},
]
CUSTOM_CALLS = CALL.replace("weather", "sky__weather") + NOW.replace("{}", '{"input": "aa"}')


def _build() -> Iterator[tuple[str, str, Mapping[str, Any], str | Script, str]]:
    """Name, path, fields of the request besides the needed ones, what the model says, its service."""
    for path, start in STARTS.items():
        yield f"{start}: text", path, {}, "hi 🙂", "full"
        yield f"{start}: nothing", path, {}, "", "full"
        yield f"{start}: the limit", path, {LIMIT[path]: 2}, "hi 🙂", "full"
        yield f"{start}: reasoning", path, {}, "<think>\nHm.\n</think>\n\nhi", "thinking"
        yield f"{start}: a fault", path, {}, Script([A], error=not_ready("no worker is left")), "full"
        yield f"{start}: a bug", path, {}, Script([A], bug=RuntimeError("secret")), "full"
        if path != TEXT:
            tools, forced = APIS[start].body({"tools": TOOLS})["tools"], FORCED.get(path, "required")
            yield f"{start}: calls", path, {"tools": tools}, BOTH, "full"
            cut_off = {"tools": tools, LIMIT[path]: 75, "tool_choice": forced}
            yield f"{start}: a call that the limit cuts off", path, cut_off, NOW + CALL, "full"
        if path in (CHAT, TEXT):
            yield f"{start}: choices", path, {"n": 2, "return_token_ids": True, "include_timing": True}, "hi", "full"
    for name, path, fields, says in (
        ("log-probabilities", CHAT, {"logprobs": True, "top_logprobs": 2}, "hi 🙂"),
        ("log-probabilities", TEXT, {"logprobs": 2, "echo": True}, "hi 🙂"),
        ("log-probabilities", RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}, "hi 🙂"),
        ("what was asked", RESPONSES, ASKED, "hi"),
        ("calls of other tools", RESPONSES, {"tools": CUSTOM}, CUSTOM_CALLS),
        ("a stop string", MESSAGES, {"stop_sequences": ["i"], "metadata": {"user_id": "me"}}, "hi"),
        ("a stop string", CHAT, {"stop": "i", "stream_options": USAGE}, "hi"),
        ("counts in each chunk", CHAT, {"stream_options": {**USAGE, "continuous_usage_stats": True}}, "hi"),
        ("counts", TEXT, {"stream_options": USAGE}, "hi"),
    ):
        yield f"{STARTS[path]}: {name}", path, fields, says, "full"


CASES: dict[str, Any] = {name: case for name, *case in _build()}
EXPECTED: dict[str, Any] = {}
if FILE.exists():
    EXPECTED.update(json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_byte(request: pytest.FixtureRequest, name: str, stream: bool) -> None:
    path, fields, says, service = CASES[name]
    if "stream_options" in fields and not stream:
        return
    served: Served = request.getfixturevalue(service)
    served.engine.reset(served.script(says, group=2) if isinstance(says, str) else says)
    body = {**APIS[STARTS[path]].body({}), "stream": stream, **fields}
    answer = served.http.post(path, json=body, headers={"x-request-id": "mine"})
    found = [answer.status_code, answer.headers["content-type"], _without_chance(answer.text)]
    key = f"{name}{', streamed' if stream else ''}"
    if "TEST_RECORD" in os.environ:
        EXPECTED[key] = found
        lines = [json.dumps(one, ensure_ascii=False) for one in EXPECTED.items()]
        FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert found == EXPECTED[key]


def _without_chance(text: str) -> str:
    """The answer without what differs from time to time: ids, times, and the version."""
    ids: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return ids.setdefault(found[0], f"{found[1]}{len(ids) + 1}")

    text = re.sub(r"\b((?:chatcmpl|cmpl|resp|msg|rs|fc|ctc|call)[-_])[0-9a-zA-Z]{20,}", number, text)
    text = re.sub(r'("(?:created|created_at|completed_at)":)\d+', r"\1 0", text)
    text = re.sub(r'("decode_seconds":)[0-9.e-]+', r"\1 0", text)
    return text.replace(OWN_VERSION, "VERSION")
