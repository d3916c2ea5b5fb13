"""One vocabulary for all public APIs: requests, their form in each API, and their outcomes.

The words are those of OpenAI's chat completions, except: `system`; `messages` whose `calls` are
`{id, name, arguments}`; `tools` are functions; `tool_choice` is a word or a tool's name; `logprobs` is the number of
top tokens; `form` is json_schema (optionally `strict`), json_object, regex, grammar or choice, with its value; `prompt`
is a text or token ids; `thinks` switches reasoning on or off; `continues` leaves the last (assistant) message open.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.api_server import SERVED, Served

Ask = Mapping[str, Any]  # word |-> value
NONE: Mapping[str, str] = {}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "weather", "description": "Get it.", "parameters": PARAMETERS}, {"name": "now"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

# fmt: off
_SAME = dict.fromkeys((
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "n", "speculation",
    "max_draft_tokens", "include_timing", "cache_salt", "priority", "deadline_ms", "user"))
WORDS: dict[str, dict[str, str | None]] = {  # API |-> word |-> its field there; None: the word itself
    "chat": {
        **_SAME, "parallel_tool_calls": None, "logprobs": "top_logprobs", "return_token_ids": None,
        "prompt_logprobs": None},
    "completions": {
        **_SAME, "prompt": None, "echo": None, "logprobs": None, "return_token_ids": None, "prompt_logprobs": None},
    "responses": {
        "max_tokens": "max_output_tokens", "system": "instructions", "logprobs": "top_logprobs",
        **dict.fromkeys(("model", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty",
                         "presence_penalty", "repetition_penalty", "cache_salt", "parallel_tool_calls", "priority",
                         "deadline_ms", "user"))},
    "messages": {
        "stop": "stop_sequences",
        **dict.fromkeys(("model", "max_tokens", "temperature", "top_p", "top_k", "cache_salt", "system", "priority",
                         "deadline_ms"))},
    "Generate": {**_SAME, "logprobs": None},
    "Chat": {**_SAME, "logprobs": None, "parallel_tool_calls": None, "tool_choice": None},
}
STARTS: dict[str, dict[str, Any]] = {  # fields every request needs besides the model
    "chat": {"messages": HELLO}, "completions": {"prompt": "hello"}, "responses": {"input": "hello"},
    "messages": {"messages": HELLO, "max_tokens": 250}, "Generate": {"text": "hello"}, "Chat": {"messages": HELLO},
}
_FORMS = {
    r"form\.json_schema": "response_format.json_schema.schema", r"form\.json_object": "response_format",
    r"form\.": "structured_outputs."}
_CALL = r"messages\[(\d+)\]\.calls\[(\d+)\]"
PATHS: dict[str, dict[str, str]] = {  # API |-> a place's name here |-> its name in errors, as a pattern
    "chat": {
        **_FORMS, r"tools\[(\d+)\]\.": r"tools[\1].function.", r"tool_choice\.name": "tool_choice.function.name",
        rf"{_CALL}\.id": r"messages[\1].tool_calls[\2].id", rf"{_CALL}\.": r"messages[\1].tool_calls[\2].function.",
        "prompt": "messages"},
    "completions": {**_FORMS, "prompt_ids": "prompt"},
    "responses": {
        r"form\.json_object": "text.format", r"form\.json_schema": "text.format.schema", "prompt": "input",
        _CALL: r"input[\1]", "messages": "input", r"(input.*)\.(tool_call_)?id$": r"\1.call_id"},
    "messages": {
        r"form\.json_schema": "output_config.format.schema", r"(tools\[\d+\])\.parameters": r"\1.input_schema",
        rf"{_CALL}\.arguments": r"messages[\1].content[\2].input", _CALL: r"messages[\1].content[\2]",
        r"(messages\[\d+\])\.tool_call_id": r"\1.content[0].tool_use_id", "prompt": "messages"},
    "Generate": {r"form\.": "response_format.", "prompt_ids": "token_ids", "prompt": "text"},
    "Chat": {
        r"form\.": "response_format.", r"tool_choice\.name": "tool_choice", r"(.*)\.calls\[": r"\1.tool_calls[",
        "prompt": "messages"},
}
# fmt: on


@dataclass
class Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Choice:
    """One answer, as received so far."""

    text: str = ""
    calls: dict[int, Call] = field(default_factory=lambda: defaultdict(Call))
    reason: str | None = None  # stop, length or tool_calls
    reasoning: str = ""
    stop: str | int | None = None  # the stop string or token of the request that ended it
    token_ids: list[int] = field(default_factory=list)  # if requested
    logprobs: list[float] = field(default_factory=list)  # of the chosen tokens
    timing: dict[str, Any] | None = None

    @property
    def called(self) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in self.calls.values()]


@dataclass
class Outcome:
    """A request's outcome: choices, an error, or both if it failed in mid-stream."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: tuple[int, int, int] | None = None  # prompt, completion and cached tokens
    message: str = ""  # of the error
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    @property
    def texts(self) -> list[str]:
        return [self.choices[index].text for index in sorted(self.choices)]


class Api:
    """One API over the wire."""

    tells_codes = True  # errors carry codes and fields
    can_be_whole = True  # not only streamed

    def __init__(self, name: str) -> None:
        self.name = name

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request in the API's own form. Raises KeyError naming a word that the API lacks."""
        body, own = {"model": SERVED, **STARTS[self.name]}, WORDS[self.name]
        for word, value in ask.items():
            write = getattr(self, f"_{word}", None)
            if write is not None:
                write(body, value)
            else:
                body[own[word] or word] = value
        return body

    def knows(self, ask: Ask) -> bool:
        """Whether the API supports all these words."""
        try:
            self.body(ask)
        except (KeyError, ValueError, RecursionError):
            return False
        return True

    def param(self, path: str) -> str:
        """The name of this field in errors."""
        for pattern, replacement in PATHS[self.name].items():
            path = re.sub(f"^{pattern}", replacement, path)
        return WORDS[self.name].get(path) or path

    def ask(self, served: Served, ask: Ask, stream: bool = False, headers: Mapping[str, str] = NONE) -> Outcome:
        """Send one request; return its whole outcome. `headers`: metadata, over gRPC."""
        return self.send(served, self.body(ask), stream, headers)

    def send(
        self, served: Served, body: Mapping[str, Any], stream: bool = False, headers: Mapping[str, str] = NONE
    ) -> Outcome:
        """Like `ask`, with a body in the API's own form."""
        raise NotImplementedError

    def leave(self, served: Served, ask: Ask, stream: bool, num_choices: int) -> None:
        """Disconnect as soon as this many generations hang."""
        raise NotImplementedError


def named(value: object) -> str:
    """The name of a parameter that is an API or an error."""
    return value.name if isinstance(value, Api) else repr(value)
