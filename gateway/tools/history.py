"""Calls made earlier in a conversation, as chat templates take them. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

from gateway.tools.formats import Format
from gateway.tools.json_object import read_object

Message = Mapping[str, Any]  # role, content and perhaps name, tool_call_id and tool_calls


def template_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """One of a message's `tool_calls`; its arguments become an object. Raises ValueError saying what is wrong."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read_arguments(arguments)}}


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments; none when the text is empty. Raises ValueError saying what is wrong with them."""
    return read_object(text) if text.strip() else {}


def fit_ids(message: Message, format: Format) -> Message:
    """The message with ids that the format's template accepts: others become ones made from them, calls and answers
    alike. A conversation may have been begun with another model."""
    fitted = dict(message)
    if "tool_call_id" in fitted:
        fitted["tool_call_id"] = _fit(fitted["tool_call_id"], format)
    if "tool_calls" in fitted:
        fitted["tool_calls"] = [{**call, "id": _fit(call["id"], format)} for call in fitted["tool_calls"]]
    return fitted


def _fit(call_id: str, format: Format) -> str:
    size = format.num_id_chars
    if not size or (len(call_id) == size and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:size]
