"""Which format of calls a chat template shows: what it makes of a probe conversation is read back. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gateway.tools.parse import CallEnd, CallParser
from gateway.tools.reasoning import ChannelReader
from wire.dialects import FORMATS, PLAIN, Format

_QUESTION = "What is the weather in Rome for 3 days?"
_NAME, _ARGUMENTS = "get_weather", {"city": "Rome", "days": 3}
_DESCRIPTION = "Look up the weather."
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "the city"},
        "days": {"type": "integer", "description": "how many"},
    },
    "required": ["city"],
}
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": _NAME, "description": _DESCRIPTION, "parameters": _SCHEMA},
}


def _probe(call_id: str, arguments: Any) -> Sequence[Mapping[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return (
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": _NAME, "tool_call_id": call_id, "content": "sunny"},
    )


# Templates take arguments as an object or as text, and ids of some forms only; some show no calls at all.
PROBES = (
    _probe("probe0001", _ARGUMENTS),
    _probe(f"functions.{_NAME}:0", _ARGUMENTS),
    _probe("probe0001", json.dumps(_ARGUMENTS)),
    _probe("probe0001", None)[:1],
)
_TEXT_PROBE = 2
_MOST_TAIL = 2048  # characters behind the question that are read: a call and its result have a few hundred


class Dialect(NamedTuple):
    """How a model writes calls, and why that is believed. None: its template shows no tools."""

    format: Format | None
    why: str


def find_dialect(setting: str, rendered: Sequence[str]) -> Dialect:
    """`setting`: a format's name, "auto", "plain" or "none". `rendered`: the template's text of each of PROBES with
    PROBE_TOOL; "" for one that it refuses."""
    if setting != "auto":
        format = {**FORMATS, PLAIN.name: PLAIN}.get(setting)
        return Dialect(_fit(format, rendered) if format else None, "--tool-format says so")
    with_tools = [text for text in rendered if _DESCRIPTION in text]
    if not with_tools:
        return Dialect(None, "the chat template shows the model no tools")
    for format in FORMATS.values():
        if any(_reads(format, text) for text in with_tools):
            return Dialect(_fit(format, rendered), "the chat template writes calls so")
    writes_none = not any(_NAME in _tail(text) for text in with_tools if _QUESTION in text)
    for format in sorted(FORMATS.values(), key=lambda one: -len(one.markers)) if writes_none else ():
        words = [word for marker in format.markers for word in marker.split("\n")]
        if any(all(word in text for word in words) for text in with_tools):
            return Dialect(_fit(format, rendered), "the chat template names its markers beside the tools")
    return Dialect(PLAIN, "the chat template shows tools, but calls in no way known here; --tool-format can name one")


def _fit(format: Format, rendered: Sequence[str]) -> Format:
    """The format with what the template wants of history."""
    reads = [format != PLAIN and _reads(format, text) for text in rendered]
    return replace(format, takes_text=True) if any(reads) and reads.index(True) == _TEXT_PROBE else format


def _tail(text: str) -> str:
    """How the template goes on behind the question."""
    return text.rpartition(_QUESTION)[2][:_MOST_TAIL]


def _reads(format: Format, text: str) -> bool:
    """Whether this is how the template wrote the probe's call."""
    tail = _tail(text)
    if format.has_channels:
        reader = ChannelReader("possible")
        tail = reader.push(tail).content + reader.flush().content
    if format.bare_opener and format.opener not in tail:
        tail = tail[max(tail.rfind("{" if format.is_object else "[", 0, tail.find(_NAME)), 0) :]
    elif format.closer not in tail or (format.opener if format.before else format.lead) not in tail:
        return False
    parser = CallParser(format, (_NAME,), lambda: "", schemas={_NAME: _SCHEMA})
    ends = [event for event in parser.push(tail) + parser.flush() if isinstance(event, CallEnd)]
    return [json.loads(end.arguments) for end in ends if end.is_whole] == [_ARGUMENTS]
