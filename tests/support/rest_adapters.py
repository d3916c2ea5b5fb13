"""Requests and outcomes in the REST APIs' forms. See words.py."""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.api_server import WAIT_S, Served
from tests.support.words import NONE, Api, Ask, Call, Choice, Outcome

_TYPES = {  # status |-> type of OpenAI's errors
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error",
    503: "service_unavailable_error", 504: "server_error", 500: "server_error",
}  # fmt: skip
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 500: "api_error",
}  # fmt: skip
_STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


class Rest(Api):
    path: str  # after /v1/
    types = _TYPES
    options: tuple[tuple[str, Any], ...] = ()  # further fields of streamed requests
    lasts: Sequence[str] = ("[DONE]",)  # the last events of a stream that did not fail

    def send(
        self, served: Served, body: Mapping[str, Any], stream: bool = False, headers: Mapping[str, str] = NONE
    ) -> Outcome:
        sent = {**body, "stream": True, **dict(self.options)} if stream else body
        answer = served.http.post(
            f"/v1/{self.path}", content=json.dumps(sent), headers={"content-type": "application/json", **headers}
        )
        outcome = Outcome(answer.status_code, answer.headers)
        if answer.status_code != 200:
            self.fail(outcome, answer.json())
            assert self.types[outcome.status] == answer.json()["error"]["type"]
            outcome.retry_after = int(answer.headers["retry-after"]) if "retry-after" in answer.headers else None
        elif not stream:
            self.read(outcome, answer.json())
        else:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = read_events(answer.text)
            for event in events:
                self.take(outcome, event)
            assert (outcome.status == 200) == (events[-1] in self.lasts or events[-1].get("type") in self.lasts)
        return outcome

    def leave(self, served: Served, ask: Ask, stream: bool, num_choices: int) -> None:
        content = json.dumps({**self.body(ask), "stream": stream}).encode()
        lines = [f"POST /v1/{self.path} HTTP/1.1", f"content-length: {len(content)}", "host: localhost"]
        lines += [f"{name}: {value}" for name, value in served.metadata]
        with socket.create_connection(served.host_port, timeout=WAIT_S) as raw:
            raw.sendall("\r\n".join([*lines, "", ""]).encode() + content)
            for _ in range(num_choices):
                served.engine.hanging.get(timeout=WAIT_S)

    def read(self, outcome: Outcome, body: Any) -> None:
        """Read a whole answer."""
        raise NotImplementedError

    def take(self, outcome: Outcome, event: Any) -> None:
        """Read one event of a stream."""
        raise NotImplementedError

    def fail(self, outcome: Outcome, body: Any) -> None:
        """Read an error, from a body or an event."""
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        outcome.message, outcome.param, outcome.code = error["message"], error["param"], error["code"]
        self.set_status(outcome, error["type"])

    def set_status(self, outcome: Outcome, kind: str) -> None:
        """Set the status of an error that came within a stream."""
        if outcome.status == 200:
            timed_out = outcome.code == "timeout"  # shares its type with bugs
            outcome.status = 504 if timed_out else {word: status for status, word in self.types.items()}[kind]


def read_events(text: str) -> list[Any]:
    """The events of a stream; a named event has its name as its type."""
    found: list[Any] = []
    for block in text.strip().split("\n\n"):
        *names, data = block.split("\n")
        found.append("[DONE]" if data == "data: [DONE]" else json.loads(data.removeprefix("data: ")))
        assert names in ([], [f"event: {found[-1]['type']}" if names else ""])
    return found


class OpenAi(Rest):
    options = (("stream_options", {"include_usage": True}),)

    def read(self, outcome: Outcome, body: Any) -> None:
        for choice in body["choices"]:
            self.add(outcome.choices[choice["index"]], choice, choice.get("message", choice))
        self._count(outcome, body["usage"])

    def take(self, outcome: Outcome, event: Any) -> None:
        if event == "[DONE]":
            return None
        if "error" in event:
            return self.fail(outcome, event)
        for choice in event["choices"]:
            mine = outcome.choices[choice["index"]]
            assert mine.reason is None, "something follows the finish reason"
            self.add(mine, choice, choice.get("delta", choice))
        if event["usage"] is not None:
            assert outcome.usage is None and not event["choices"]
            self._count(outcome, event["usage"])
        return None

    def add(self, mine: Choice, choice: Any, said: Any) -> None:
        """Add a whole choice, or a chunk of one."""
        mine.reason, mine.timing = choice["finish_reason"], choice.get("timing")
        mine.stop = choice.get("stop_reason")
        mine.text += said.get("content", said.get("text")) or ""
        mine.reasoning += said.get("reasoning_content") or ""
        mine.token_ids += choice.get("token_ids", ())
        for index, call in enumerate(said.get("tool_calls") or ()):
            told, function = mine.calls[call.get("index", index)], call["function"]
            told.id += call.get("id") or ""
            told.name += function.get("name") or ""
            told.arguments += function["arguments"]
        mine.logprobs += self.logprobs_of(choice["logprobs"]) if choice.get("logprobs") else []

    def logprobs_of(self, told: Any) -> list[float]:
        raise NotImplementedError

    def _count(self, outcome: Outcome, usage: Any) -> None:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        outcome.usage = usage["prompt_tokens"], usage["completion_tokens"], cached

    def _form(self, body: dict[str, Any], value: Any) -> None:
        (kind, content), *strict = value.items()
        if kind == "json_schema":
            schema = {"name": "x", "schema": content, **dict(strict or {"strict": True})}
            body["response_format"] = {"type": kind, "json_schema": schema}
        elif kind == "json_object":
            body["response_format"] = {"type": kind}
        else:
            body["structured_outputs"] = {kind: content}


class ChatCompletions(OpenAi):
    path = "chat/completions"

    def logprobs_of(self, told: Any) -> list[float]:
        return [token["logprob"] for token in told["content"]]

    def _logprobs(self, body: dict[str, Any], value: Any) -> None:
        body |= {"logprobs": True, "top_logprobs": value}

    def _thinks(self, body: dict[str, Any], value: bool) -> None:
        body["chat_template_kwargs"] = {"enable_thinking": value}

    def _continues(self, body: dict[str, Any], value: bool) -> None:
        body |= {"continue_final_message": value, "add_generation_prompt": not value}

    def _system(self, body: dict[str, Any], value: str) -> None:
        body["messages"] = [{"role": "system", "content": value}, *body["messages"]]

    def _messages(self, body: dict[str, Any], value: Any) -> None:
        body["messages"] = [self._message(one) for one in value] if isinstance(value, list) else value

    def _message(self, message: Any) -> Any:
        if "reasoning" in message:
            message = {"reasoning_content" if name == "reasoning" else name: message[name] for name in message}
        if "calls" not in message:
            return message
        calls = [
            {"id": call["id"], "type": "function", "function": {name: call[name] for name in call if name != "id"}}
            for call in message["calls"]
        ]
        return {"content": None, **{name: message[name] for name in message if name != "calls"}, "tool_calls": calls}

    def _tools(self, body: dict[str, Any], value: Any) -> None:
        body["tools"] = [{"type": "function", "function": tool} for tool in value]

    def _tool_choice(self, body: dict[str, Any], value: str) -> None:
        named = {"type": "function", "function": {"name": value}}
        body["tool_choice"] = value if value in ("auto", "none", "required") else named


class Completions(OpenAi):
    path = "completions"

    def logprobs_of(self, told: Any) -> list[float]:
        assert len({len(column) for column in told.values()}) == 1
        return list(told["token_logprobs"])


class Responses(Rest):
    path, lasts = "responses", ("response.completed", "response.incomplete")

    def read(self, outcome: Outcome, body: Any) -> None:
        choice = outcome.choices[0]
        for item in body["output"]:
            if item["type"] == "message":
                choice.text += "".join(part["text"] for part in item["content"])
                choice.logprobs += [token["logprob"] for part in item["content"] for token in part["logprobs"]]
            elif item["type"] == "custom_tool_call":
                arguments = json.dumps({"input": item["input"]})
                choice.calls[len(choice.calls)] = Call(item["call_id"], item["name"], arguments)
            elif item["type"] == "reasoning":
                choice.reasoning += "".join(part["text"] for part in item["content"])
            else:
                choice.calls[len(choice.calls)] = Call(item["call_id"], item["name"], item["arguments"])
        are_whole = all(item["status"] == "completed" for item in body["output"])
        ended = "tool_calls" if choice.calls and are_whole else "stop"
        choice.reason = {"completed": ended, "incomplete": "length", "failed": None}[body["status"]]
        if usage := body["usage"]:
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            cached = usage["input_tokens_details"]["cached_tokens"]
            outcome.usage = usage["input_tokens"], usage["output_tokens"], cached

    def take(self, outcome: Outcome, event: Any) -> None:
        match event["type"].removeprefix("response."):
            case "output_text.delta":
                outcome.choices[-1].text += event["delta"]
            case "reasoning_text.delta":
                outcome.choices[-1].reasoning += event["delta"]
            case "custom_tool_call_input.delta":
                outcome.choices[-1].calls[event["output_index"]].arguments = json.dumps({"input": event["delta"]})
            case "function_call_arguments.delta":
                outcome.choices[-1].calls[event["output_index"]].arguments += event["delta"]
            case "completed" | "incomplete" | "failed":
                told = outcome.choices.pop(-1, Choice())
                self.read(outcome, event["response"])
                whole = outcome.choices[0]
                assert (told.text, told.reasoning) == (whole.text, whole.reasoning)
                assert [one.arguments for one in told.calls.values()] == [one.arguments for one in whole.calls.values()]
            case "error":
                self.fail(outcome, event)

    def _thinks(self, body: dict[str, Any], value: bool) -> None:
        body["reasoning"] = {"effort": "high" if value else "none"}

    def _logprobs(self, body: dict[str, Any], value: Any) -> None:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": value}

    def _messages(self, body: dict[str, Any], value: Any) -> None:
        items = list[Any]()
        for message in value:
            if "name" in message:
                raise KeyError("name")
            if message["role"] == "tool":
                output = {"call_id": message["tool_call_id"], "output": message["content"]}
                items.append({"type": "function_call_output", **output})
                continue
            if "reasoning" in message:
                parts = [{"type": "reasoning_text", "text": message["reasoning"]}]
                items.append({"type": "reasoning", "summary": [], "content": parts})
            if message.get("content"):
                items.append({"role": message["role"], "content": message["content"]})
            for call in message.get("calls", ()):
                content = {name: call[name] for name in call if name != "id"}
                items.append({"type": "function_call", "call_id": call["id"], **content})
        body["input"] = items

    def _tools(self, body: dict[str, Any], value: Any) -> None:
        body["tools"] = [{"type": "function", **tool} for tool in value]

    def _tool_choice(self, body: dict[str, Any], value: str) -> None:
        named = {"type": "function", "name": value}
        body["tool_choice"] = value if value in ("auto", "none", "required") else named

    def _form(self, body: dict[str, Any], value: Any) -> None:
        (kind, content), *strict = value.items()
        named = {"name": "x", "schema": content, **dict(strict or {"strict": True})}
        body["text"] = {"format": {"type": kind, **{"json_schema": named, "json_object": {}}[kind]}}


class Messages(Rest):
    path, types, lasts, tells_codes = "messages", _ANTHROPIC_TYPES, ("message_stop",), False

    def read(self, outcome: Outcome, body: Any) -> None:
        choice = outcome.choices[0]
        for block in body["content"]:
            if block["type"] == "text":
                choice.text += block["text"]
            elif block["type"] == "thinking":
                choice.reasoning += block["thinking"]
            else:
                choice.calls[len(choice.calls)] = Call(block["id"], block["name"], json.dumps(block["input"]))
        self._end(outcome, body, body["usage"])

    def take(self, outcome: Outcome, event: Any) -> None:
        choice = outcome.choices[0]
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                block = event["content_block"]
                assert block["input"] == {}
                choice.calls[event["index"]] = Call(block["id"], block["name"])
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                choice.text += event["delta"]["text"]
            case "content_block_delta" if event["delta"]["type"] == "thinking_delta":
                choice.reasoning += event["delta"]["thinking"]
            case "content_block_delta":
                choice.calls[event["index"]].arguments += event["delta"]["partial_json"]
            case "message_delta":
                self._end(outcome, event["delta"], event["usage"])
            case "error":
                self.fail(outcome, event)

    def _end(self, outcome: Outcome, ending: Any, usage: Any) -> None:
        outcome.choices[0].reason = _STOP_REASONS[ending["stop_reason"]]
        outcome.choices[0].stop = ending["stop_sequence"]
        assert (ending["stop_reason"] == "stop_sequence") == (ending["stop_sequence"] is not None)
        cached = usage["cache_read_input_tokens"]
        made = usage["cache_creation_input_tokens"]
        outcome.usage = usage["input_tokens"] + cached + made, usage["output_tokens"], cached

    def fail(self, outcome: Outcome, body: Any) -> None:
        assert (body.keys(), body["error"].keys()) == ({"type", "error"}, {"type", "message"})
        assert body["type"] == "error"
        outcome.message = body["error"]["message"]
        self.set_status(outcome, body["error"]["type"])

    def _thinks(self, body: dict[str, Any], value: bool) -> None:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024} if value else {"type": "disabled"}

    def _continues(self, body: dict[str, Any], value: bool) -> None:
        """Needs no field: the last message's role says it."""

    def _messages(self, body: dict[str, Any], value: Any) -> None:
        said = list[Any]()
        for message in value:
            role, blocks = self._blocks(message)
            if said and said[-1]["role"] == role == "user":
                said[-1]["content"] += blocks
            else:
                said.append({"role": role, "content": blocks})
        body["messages"] = said

    def _blocks(self, message: Any) -> tuple[str, list[Any]]:
        content, role = message.get("content"), message["role"]
        if "name" in message:
            raise KeyError("name")
        if role == "tool":
            return "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        blocks = (
            [{"type": "thinking", "thinking": message["reasoning"], "signature": ""}] if "reasoning" in message else []
        )
        blocks += [{"type": "text", "text": content}] if content else []
        for call in message.get("calls", ()):
            arguments = json.loads(call["arguments"])  # this API cannot carry invalid JSON
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments})
        return role, blocks

    def _tools(self, body: dict[str, Any], value: Any) -> None:
        body["tools"] = [self._tool(tool) for tool in value]

    def _tool(self, tool: Any) -> Any:
        return {"input_schema": tool.get("parameters", {"type": "object"})} | {
            name: value for name, value in tool.items() if name != "parameters"
        }

    def _tool_choice(self, body: dict[str, Any], value: str) -> None:
        words = {"auto": "auto", "none": "none", "required": "any"}
        choice = {"type": words[value]} if value in words else {"type": "tool", "name": value}
        body["tool_choice"] = body.get("tool_choice", {}) | choice

    def _parallel_tool_calls(self, body: dict[str, Any], value: bool) -> None:
        body["tool_choice"] = {"type": "auto", **body.get("tool_choice", {}), "disable_parallel_tool_use": not value}

    def _form(self, body: dict[str, Any], value: Any) -> None:
        if "strict" in value:
            raise KeyError("strict")
        body["output_config"] = {"format": {"type": "json_schema", "schema": value["json_schema"]}}
