"""Calls and reasoning of earlier messages as chat templates take them, and an open last message. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.errors import bad_request
from gateway.tools.formats import Format
from gateway.tools.json_object import read_object

Message = Mapping[str, Any]  # role, content and perhaps name, tool_call_id, tool_calls, reasoning_content


def template_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """One of a message's `tool_calls`; its arguments become an object. Raises ValueError saying what is wrong."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read_arguments(arguments)}}


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments; {} if the text is empty. Raises ValueError saying what is wrong."""
    return read_object(text) if text.strip() else {}


def check_results(messages: Sequence[Message], params: Sequence[str]) -> None:
    """Raises ApiError for a result whose id is missing or names no earlier call. `params`: the ids' fields."""
    call_ids: set[str] = set()
    names = iter(params)
    for message in messages:
        call_ids.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] != "tool":
            continue
        param, call_id = next(names), message.get("tool_call_id")
        if not call_id:
            raise bad_request(
                f"{param} is missing; it names the call that this message answers", param, "missing_field"
            )
        if call_id not in call_ids:
            raise bad_request(f"{param} is {call_id[:80]!r}, which is the id of no call before it", param)


def fit_ids(message: Message, format: Format) -> Message:
    """Replaces ids that the format's template refuses, in calls and results: another model may have made them."""
    fitted = dict(message)
    if "tool_call_id" in fitted:
        fitted["tool_call_id"] = _fit(fitted["tool_call_id"], format)
    if "tool_calls" in fitted:
        fitted["tool_calls"] = [{**call, "id": _fit(call["id"], format)} for call in fitted["tool_calls"]]
    return fitted


def fit_reasoning(message: Message, template: str) -> Message:
    """Removes the reasoning if the template does not read it: such models are trained to continue without it."""
    is_read = message["role"] == "assistant" and message.get("reasoning_content") and "reasoning_content" in template
    return message if is_read else {name: value for name, value in message.items() if name != "reasoning_content"}


def check_open(messages: Sequence[Message]) -> None:
    """Raises ValueError saying why, if an answer cannot continue the last message."""
    last = messages[-1] if messages else {"role": "none"}
    if last["role"] != "assistant":
        raise ValueError(f"an answer goes on with a last message of the assistant's, not {last['role']}")
    if last.get("tool_calls"):
        raise ValueError("the last message has tool_calls, with which an answer cannot go on")


def _fit(call_id: str, format: Format) -> str:
    size = format.num_id_chars
    if not size or (len(call_id) == size and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:size]
