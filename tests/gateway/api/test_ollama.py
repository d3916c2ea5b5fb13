"""Ollama's API: requests and answers both ways, its own client unmodified, and what is refused."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import ollama
import pytest

from gateway.api.access import WARNING_HEADER
from gateway.api.http import answer as http_answer
from gateway.errors import ApiError
from gateway.request.prepare import ApiOptions
from tests.support.api_server import ANSWER, KEYS, MAX_BODY, SERVED, WAIT_S, Served, run_api
from tests.support.fake_engine_client import TIMING, Script
from tests.support.tiny_tokenizer import CONTEXT, write_byte_level
from tests.support.words import CALL, HELLO, NOW, TOOLS

CHAT: Mapping[str, Any] = {"model": SERVED, "messages": HELLO}
PROMPT: Mapping[str, Any] = {"model": SERVED, "prompt": "hello"}
FUNCTIONS = [{"type": "function", "function": tool} for tool in TOOLS]
WEATHER: Mapping[str, Any] = {"function": {"name": "weather", "arguments": {"city": "Ulm"}}}
NOON: Mapping[str, Any] = {"function": {"name": "now", "arguments": {}}}


def ask(served: Served, path: str, body: Mapping[str, Any], **fields: Any) -> Any:
    return served.http.post(f"/api/{path}", json={**body, "stream": False, **fields})


def answer(served: Served, path: str, body: Mapping[str, Any], **fields: Any) -> Any:
    asked = ask(served, path, body, **fields)
    assert asked.status_code == 200, asked.text
    return asked.json()


def lines(served: Served, path: str, body: Mapping[str, Any], **fields: Any) -> list[Any]:
    """Of a stream, as which an answer comes if a request does not say."""
    asked = served.http.post(f"/api/{path}", json={**body, **fields})
    assert (asked.status_code, asked.headers["content-type"]) == (200, "application/x-ndjson"), asked.text
    return [json.loads(line) for line in asked.text.splitlines()]


def refusal(served: Served, path: str, body: Mapping[str, Any], status: int = 400) -> str:
    asked = ask(served, path, body)
    assert (asked.status_code, asked.json().keys()) == (status, {"error"}), asked.text
    return str(asked.json()["error"])


def prompt_of(served: Served) -> str:
    return served.tokenizer.decode(served.engine.sent[0]["prompt_ids"], with_control_tokens=True)


@pytest.fixture
def client(served: Served) -> ollama.Client:
    return ollama.Client(served.url, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=WAIT_S)


# answers


def check_figures(last: Mapping[str, Any], num_tokens: int) -> None:
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["eval_count"] == num_tokens and last["prompt_eval_count"] > 3
    assert last["prompt_eval_duration"] == TIMING.prefill_s * 1e9
    assert last["eval_duration"] == (TIMING.first_step_s + TIMING.decode_s) * 1e9
    assert last["total_duration"] > 0 and last["load_duration"] > 0
    assert datetime.fromisoformat(last["created_at"]).tzinfo


def test_a_chat_whole_and_streamed(served: Served) -> None:
    whole = answer(served, "chat", CHAT)
    assert whole["message"] == {"role": "assistant", "content": ANSWER} and whole["model"] == SERVED
    num_tokens = len(served.ids(ANSWER)) + 1
    check_figures(whole, num_tokens)
    *parts, last = lines(served, "chat", CHAT)
    assert "".join(part["message"]["content"] for part in parts) == ANSWER and len(parts) > 2
    assert all(part.keys() == {"model", "created_at", "message", "done"} and not part["done"] for part in parts)
    assert last["message"]["content"] == ""
    check_figures(last, num_tokens)


def test_a_prompt_whole_and_streamed_and_what_follows_it(served: Served) -> None:
    whole = answer(served, "generate", PROMPT, system="be short")
    assert (whole["response"], "message" in whole) == (ANSWER, False)
    check_figures(whole, len(served.ids(ANSWER)) + 1)
    first = prompt_of(served)
    assert first == "<|system|>be short<|end|><|user|>hello<|end|><|assistant|>"
    *parts, last = lines(served, "generate", PROMPT, system="be short")
    assert "".join(part["response"] for part in parts) == ANSWER
    assert last["context"] == whole["context"] and not any("context" in part for part in parts)
    served.engine.reset(served.script(ANSWER))
    answer(served, "generate", PROMPT, context=last["context"])
    assert prompt_of(served) == f"{first}{ANSWER}<|end|><|user|>hello<|end|><|assistant|>"


def test_a_raw_prompt_has_no_template_and_no_context(served: Served) -> None:
    assert "context" not in answer(served, "generate", PROMPT, raw=True)
    assert prompt_of(served) == "hello"
    assert "drop one" in refusal(served, "generate", {**PROMPT, "raw": True, "system": "x"})


def test_an_answer_goes_on_with_the_assistants_message(served: Served) -> None:
    answer(served, "chat", {**CHAT, "messages": [*HELLO, {"role": "assistant", "content": "Well,"}]})
    assert prompt_of(served).endswith("<|assistant|>Well,")


@pytest.mark.parametrize(("limit", "reason"), [(2, "length"), (100_000, "stop"), (-1, "stop"), (-2, "stop")])
def test_how_long_an_answer_is(served: Served, limit: int, reason: str) -> None:
    asked = ask(served, "chat", CHAT, options={"num_predict": limit})
    assert asked.json()["done_reason"] == reason
    assert served.engine.sent[0]["max_tokens"] == (limit if limit == 2 else CONTEXT - asked.json()["prompt_eval_count"])
    assert ("options.num_predict is lowered" in asked.headers.get(WARNING_HEADER, "")) == (limit > CONTEXT)


def test_options_reach_the_engine(served: Served) -> None:
    same = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "seed": 5}
    same |= {"frequency_penalty": -0.5, "presence_penalty": 1.5}
    options = {**same, "repeat_penalty": 1.25, "stop": [" wor"], "num_thread": 4, "num_gpu": 99, "use_mmap": None}
    assert answer(served, "chat", CHAT, options=options)["message"]["content"] == ANSWER.partition(" wor")[0]
    sent = served.engine.sent[0]
    assert {name: sent[name] for name in same} == same and sent["repetition_penalty"] == 1.25


def test_a_seed_of_minus_one_is_random(served: Served) -> None:
    for _ in range(2):
        answer(served, "chat", CHAT, options={"seed": -1})
    first, second = (sent["seed"] for sent in served.engine.sent)
    assert first != second


def test_what_has_no_effect_is_said(served: Served) -> None:
    asked = ask(served, "chat", CHAT, keep_alive="5m", options={"num_ctx": 4096, "mirostat": 1, "num_batch": 8})
    warning = asked.headers[WARNING_HEADER]
    assert all(
        f"{name} has no effect here" in warning for name in ("keep_alive", "options.num_ctx", "options.mirostat")
    )
    assert "num_batch" not in warning


@pytest.mark.parametrize(
    ("given", "grammar"),
    [("json", ("json_object", "")), ({"type": "null"}, ("json_schema", '{"type": "null"}')), ("", None), (None, None)],
)
def test_forms(served: Served, given: Any, grammar: Sequence[str] | None) -> None:
    answer(served, "generate", PROMPT, format=given)
    sent = served.engine.sent[0]["grammar"]
    assert (sent and (sent["kind"], sent["text"])) == grammar


def test_log_probabilities(served: Served) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2}
    whole = answer(served, "chat", CHAT, **wanted)["logprobs"]
    assert [one for line in lines(served, "chat", CHAT, **wanted) for one in line.get("logprobs", ())] == whole
    assert b"".join(bytes(one["bytes"]) for one in whole).startswith(ANSWER.encode())
    assert all(len(one["top_logprobs"]) == 2 for one in whole)


def test_names_may_have_the_tag_that_is_meant_without_one(served: Served) -> None:
    tagged = f"{SERVED}:latest"
    (listed,) = served.http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == tagged and len(listed["digest"]) == 64
    assert listed["capabilities"] == ["completion", "tools"]
    assert answer(served, "chat", CHAT, model=tagged)["model"] == tagged
    assert "'tiny:7b' is not served here" in refusal(served, "chat", {**CHAT, "model": "tiny:7b"}, 404)
    assert served.http.post("/api/show", json={"name": tagged}).json()["model_info"]["general.architecture"] == "llama"
    asked = served.http.post("/api/show", json={"model": "other:latest"})
    assert asked.status_code == 404 and "'other' is not served here" in asked.json()["error"]


def test_only_models_that_are_awake_are_loaded(served: Served) -> None:
    (loaded,) = served.http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == CONTEXT and datetime.fromisoformat(loaded["expires_at"]).year > 3000
    served.engine.is_asleep = True
    assert served.http.get("/api/ps").json() == {"models": []}


# tools and thoughts


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_whole(served: Served, stream: bool) -> None:
    spread = CALL.replace('{"city"', '{\n  "city"')
    served.engine.reset(served.script(f"Look. {spread}\n{NOW}"))
    fields = {"tools": FUNCTIONS}
    found = lines(served, "chat", CHAT, **fields) if stream else [answer(served, "chat", CHAT, **fields)]
    said = [line["message"] for line in found]
    calls = [call for message in said for call in message.get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Köln 🙂"}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert len({call["id"] for call in calls}) == 2 and found[-1]["done_reason"] == "stop"
    assert "".join(message["content"] for message in said) == "Look."


def test_a_call_that_was_cut_off_is_text(tmp_path: Path) -> None:
    """Clients would run it."""
    write = partial(write_byte_level, config={"max_position_embeddings": 1 << 14})
    with run_api(tmp_path, ApiOptions(tool_format="hermes"), write) as long:
        long.engine.reset(long.script(CALL.replace("Köln", "x" * 3000), ends=False))
        found = answer(long, "chat", CHAT, tools=FUNCTIONS, options={"num_predict": 2500})
    assert "tool_calls" not in found["message"] and found["done_reason"] == "length"
    assert found["message"]["content"].startswith('{"name": "weather", "arguments": {"city": "xxx')


@pytest.mark.parametrize("has_ids", [False, True])
def test_results_find_their_calls(served: Served, has_ids: bool) -> None:
    ids = ["a", "b", "c"] if has_ids else [None] * 3
    calls = [{"id": id, **call} for id, call in zip(ids, (WEATHER, NOON, WEATHER), strict=True)]
    results = [
        {"role": "tool", "content": "noon", "tool_name": "now", "tool_call_id": ids[1]},
        {"role": "tool", "content": "sunny", "tool_call_id": ids[0]},
        {"role": "tool", "content": "rainy", "tool_name": "weather", "tool_call_id": ids[2]},
    ]
    said = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    answer(served, "chat", {**CHAT, "messages": said}, tools=FUNCTIONS)
    first, second, third = ids if has_ids else [f"messages[1] {rank}" for rank in range(3)]
    prompt = prompt_of(served)
    assert f"{first}weather" in prompt and f"{second}now" in prompt
    told = f"<|tool|>now{second}noon<|end|><|tool|>{first}sunny<|end|><|tool|>weather{third}rainy<|end|>"
    assert told in prompt


def test_a_result_without_a_call_is_refused(served: Served) -> None:
    said = [*HELLO, {"role": "assistant", "tool_calls": [NOON]}, {"role": "tool", "tool_name": "huh", "content": "x"}]
    message = refusal(served, "chat", {**CHAT, "messages": said, "tools": FUNCTIONS})
    assert message.startswith("messages[2].tool_call_id is missing")


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_thoughts(thinking: Served, path: str) -> None:
    thinking.engine.reset(thinking.script("<think>\nHm.\n</think>\n\nYes."))
    body = CHAT if path == "chat" else PROMPT
    whole = answer(thinking, path, body, think=True)
    found = whole["message"] if path == "chat" else whole
    assert (found["thinking"], found.get("content", found.get("response"))) == ("Hm.", "Yes.")
    parts = [line.get("message", line) for line in lines(thinking, path, body)]
    assert "".join(part.get("thinking", "") for part in parts) == "Hm."
    assert "".join(part.get("content", part.get("response")) for part in parts) == "Yes."
    ends = {False: "<think>\n\n</think>\n\n", "max": "[max]", "low": "<|assistant|>"}
    for level, end in ends.items():
        thinking.engine.reset(thinking.script("Yes."))
        answer(thinking, path, body, think=level)
        assert prompt_of(thinking).endswith(end)


def test_thoughts_go_back(thinking: Served) -> None:
    thinking.engine.reset(thinking.script("Yes."))
    said = [*HELLO, {"role": "assistant", "content": "hi", "thinking": "Greet."}, *HELLO]
    answer(thinking, "chat", {**CHAT, "messages": said})
    assert "<think>\nGreet.\n</think>\n\nhi<|end|>" in prompt_of(thinking)


def test_a_model_that_cannot_think_says_so(served: Served) -> None:
    assert refusal(served, "chat", {**CHAT, "think": "low"}).startswith("think asks for reasoning")
    answer(served, "chat", CHAT, think=False)


# errors


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat", {"messages": "hello"}, "messages: Input should be a valid list"),
        ("chat", {"messages": [{"role": "system?"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "unknown field 'messages[0].x'"),
        ("chat", {"messages": [{"role": "user", "images": ["!!"]}]}, "messages[0].images[0]: it is no"),
        ("chat", {"messages": [{"role": "user", "images": ["aGVsbG8="]}]}, "messages[0].images[0]: it is no image"),
        ("chat", {"messages": [{"role": "user", "images": ["iVBORw0KGgo="]}]}, "this model takes no images"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"options": {"temperature": 3}}, "temperature is 3"),
        ("chat", {"options": {"num_predict": 0}}, "options.num_predict is 0"),
        ("chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("chat", {"options": {"typical_p": 0.5}}, "'options.typical_p' is not supported here other than as 1"),
        ("chat", {"options": {"huh": 1}}, "unknown field 'options.huh'"),
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"format": 5}, "format"),
        ("chat", {"think": 1}, "think"),
        ("chat", {"stream": "no"}, "stream"),
        ("chat", {"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ("chat", {"huh": 1}, "unknown field 'huh'"),
        ("chat", {"model": None}, "model"),
        ("generate", {"suffix": "}"}, "'suffix' is not supported"),
        ("generate", {"template": "{{ .Prompt }}"}, "'template' is not supported"),
        ("generate", {"width": 512}, "makes no images"),
        ("generate", {"context": [10**9]}, "context holds token id"),
        ("generate", {"context": ["a"]}, "context[0]"),
        ("generate", {"context": [5] * CONTEXT}, "the model's context is"),
        ("generate", {"prompt": 5}, "prompt"),
        ("show", {"model": None}, "model is missing"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(served: Served, path: str, fields: Mapping[str, Any], message: str) -> None:
    body = {"chat": {**CHAT, "stream": False}, "generate": {**PROMPT, "stream": False}, "show": {}}[path]
    asked = served.http.post(f"/api/{path}", json={**body, **fields})
    assert (asked.status_code, asked.json().keys()) == (400, {"error"}), asked.text
    assert message in asked.json()["error"]
    assert not served.engine.sent


def test_other_bad_requests_have_its_form_too(served: Served) -> None:
    large = json.dumps({**PROMPT, "prompt": "x" * MAX_BODY})
    for status, asked in (
        (413, served.http.post("/api/generate", content=large)),
        (400, served.http.post("/api/chat", content="{")),
        (401, served.http.get("/api/tags", headers={"authorization": "Bearer wrong"})),
        (404, served.http.get("/api/huh")),
        (405, served.http.get("/api/chat")),
        (415, served.http.post("/api/chat", content="{}", headers={"content-type": "text/plain"})),
    ):
        assert (asked.status_code, asked.json().keys()) == (status, {"error"}), asked.text


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "blobs/sha256:0"])
def test_what_would_change_models_is_refused(served: Served, path: str) -> None:
    assert refusal(served, path, {"model": SERVED}).startswith(f"/api/{path.partition('sha')[0]}")


def test_curl_names_no_type(served: Served) -> None:
    """It says that a body is a form."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert served.http.post("/api/generate", content=json.dumps(PROMPT), headers=headers).status_code == 200
    assert served.http.post("/v1/completions", content=json.dumps(PROMPT), headers=headers).status_code == 415


def test_clients_ask_whether_it_is_there(served: Served) -> None:
    there = served.http.head("/")
    assert (there.status_code, there.content) == (200, b"")
    assert int(served.http.get("/api/version").json()["version"].split(".")[1]) >= 6


# its own client


def test_its_client(client: ollama.Client, served: Served) -> None:
    assert client.chat(SERVED, HELLO).message.content == ANSWER
    parts = list(client.chat(SERVED, HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert (parts[-1].done, parts[-1].eval_count) == (True, len(served.ids(ANSWER)) + 1)
    first = client.generate(SERVED, "hello")
    assert first.response == ANSWER
    assert (
        "".join(part.response or "" for part in client.generate(SERVED, "b", context=first.context, stream=True))
        == ANSWER
    )
    assert [one.model for one in client.list().models] == [one.model for one in client.ps().models] == ["tiny:latest"]
    shown = client.show(SERVED)
    assert shown.modelinfo and shown.capabilities and shown.template == served.tokenizer.chat_templates
    loaded = client.generate(SERVED, keep_alive="1h")
    assert (loaded.response, loaded.done_reason) == ("", "load")


def test_its_client_calls_functions(client: ollama.Client, served: Served) -> None:
    def weather(city: str) -> str:
        """Get it.

        Args:
          city: Where.
        """
        return f"sunny in {city}"

    served.engine.reset(served.script(ANSWER), served.script(CALL))
    asked: Any = {"model": SERVED, "tools": [weather]}
    said: list[Any] = [*HELLO]
    found = client.chat(**asked, messages=said)
    (call,) = found.message.tool_calls or []
    result = weather(**call.function.arguments)
    said += [found.message, {"role": "tool", "content": result, "tool_name": call.function.name}]
    assert client.chat(**asked, messages=said).message.content == ANSWER
    prompt = served.tokenizer.decode(served.engine.sent[1]["prompt_ids"], with_control_tokens=True)
    assert "sunny in Köln 🙂<|end|>" in prompt


def test_its_client_reads_any_character(client: ollama.Client, served: Served) -> None:
    """It ends lines where Python does."""
    text = "a\x85b\u2028c\u2029d\x0b\x0ce\r\nf"
    served.engine.reset(served.script(text))
    parts = client.chat(SERVED, HELLO, stream=True)
    assert "".join(part.message.content or "" for part in parts) == text


@pytest.mark.parametrize("num_before", [0, 3])
def test_its_client_raises(client: ollama.Client, served: Served, num_before: int) -> None:
    error = ApiError(503, "no worker is left")
    served.engine.reset(Script(served.ids("hello world")[:num_before], error=error))
    with pytest.raises(ollama.ResponseError, match="no worker is left") as raised:
        for _ in client.chat(SERVED, HELLO, stream=True):
            pass
    assert raised.value.status_code == (-1 if num_before else 503)
    for call in (lambda: client.pull("x"), lambda: client.delete("x"), lambda: client.embed(SERVED, "x")):
        with pytest.raises(ollama.ResponseError, match=r"is not supported|makes no embeddings") as raised:
            call()
        assert raised.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="is not served here") as raised:
        client.chat("huh", HELLO)
    assert raised.value.status_code == 404


def test_signs_of_life_are_empty_pieces(client: ollama.Client, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_answer, "PING_S", 0.05)
    served.engine.reset(served.script("hi", delay_s=0.3))
    parts = [part.message.content or "" for part in client.chat(SERVED, HELLO, stream=True)]
    assert "".join(parts) == "hi" and parts.count("") > 2
