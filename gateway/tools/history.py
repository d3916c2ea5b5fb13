"""Calls and reasoning of earlier messages as chat templates take them, and an open last message. Pure."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from gateway.errors import bad_request
from gateway.tools.json_text import JsonTexts, check_depth
from wire.dialects import Format

_SYSTEM = ("system", "developer")
Message = Mapping[str, Any]  # role, content and perhaps name, tool_call_id, tool_calls, reasoning_content


def parts_of(content: Any) -> Sequence[Any]:
    """The texts and images of a content."""
    return [content] if isinstance(content, str) else content


def join_parts(parts: Iterable[Any]) -> Any:
    """The content of texts and images: a text if all are."""
    listed = list(parts)
    return "".join(listed) if all(isinstance(part, str) for part in listed) else listed


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call, as templates have it in a message's `tool_calls`."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(text: str, param: str, texts: JsonTexts) -> dict[str, Any]:
    """A call's arguments; {} if the text is empty. `texts`: of the request. Raises ApiError naming `param`."""
    try:
        return texts.read_object(text) if text.strip() else {}
    except ValueError as error:
        raise bad_request(f"{param}: {error}", param) from error


def check_arguments(arguments: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Returns a call's arguments that came as an object. Raises ApiError naming `param`."""
    try:
        check_depth(arguments)
        json.dumps(arguments, allow_nan=False)
    except ValueError as error:
        raise bad_request(f"{param}: {str(error)[:200]}", param) from error
    return arguments


def check_results(messages: Sequence[Message], params: Sequence[str] | None) -> None:
    """Raises ApiError for a result whose id is missing or names no earlier call. `params`: as in Chat."""
    call_ids: set[str] = set()
    if params is None:
        params = [f"messages[{at}].tool_call_id" for at, message in enumerate(messages) if message["role"] == "tool"]
    names = iter(params)
    for message in messages:
        call_ids.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] != "tool":
            continue
        param, call_id = next(names), message.get("tool_call_id")
        if not call_id:
            why = f"{param} is missing; it names the call that this message answers"
            raise bad_request(why, param, "missing_field")
        if call_id not in call_ids:
            raise bad_request(f"{param} is {call_id[:80]!r}, which is the id of no call before it", param)


def fit_calls(messages: Sequence[Message], format: Format) -> list[Message]:
    """Calls and results as the format's template takes them: one a message or several, arguments as text where it wants
    that, and ids that it accepts, as another model may have made them."""
    found: list[Message] = []
    ids: dict[str, str] = {}
    num_calls = 0
    for message in _one_call_each(messages) if format.has_one_call else messages:
        fitted = dict(message)
        calls = [*fitted.get("tool_calls", ())]
        for rank, call in enumerate(calls):
            function = dict(call["function"])
            ids[call["id"]] = _fit_id(call["id"], format, function["name"], num_calls)
            num_calls += 1
            if format.takes_text and not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            calls[rank] = {**call, "id": ids[call["id"]], "function": function}
        if calls:
            fitted["tool_calls"] = calls
        if calls and format.has_channels and fitted.get("thinking") and isinstance(fitted["content"], str):
            fitted["thinking"], fitted["content"] = f"{fitted['thinking']}\n\n{fitted['content']}".rstrip(), ""
        if "tool_call_id" in fitted:
            fitted["tool_call_id"] = ids.get(fitted["tool_call_id"], fitted["tool_call_id"])
        found.append(fitted)
    return found


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Several calls of a message, each in its own, with its result behind it."""
    found: list[Message] = []
    results: dict[str, list[Message]] = {}  # of the calls of the message before them
    for message in reversed(messages):
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            results.setdefault(message["tool_call_id"], []).append(message)
            continue
        own = {call["id"] for call in calls}
        found += [one for call_id, left in results.items() if call_id not in own for one in left]
        for rank, call in reversed([*enumerate(calls)]):
            found += results.pop(call["id"], [])
            kept = message if rank == 0 else {"role": "assistant", "content": ""}
            found.append({**kept, "tool_calls": [call]})
        found += [] if calls else [message]
        results = {}
    return found[::-1]


def _fit_id(call_id: str, format: Format, name: str, index: int) -> str:
    size = format.num_id_chars
    if format.id_form:
        return format.id_form.format(name=name, index=index)
    if not size or (len(call_id) == size and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:size]


# What templates call the reasoning of a message; the first that one reads.
_REASONING_KEYS = {
    "reasoning_content": re.compile("reasoning_content"),
    "thinking": re.compile(r"\.thinking\b|[\[(]\s*['\"]thinking['\"]|['\"]thinking['\"] in "),
    "reasoning": re.compile(r"\.reasoning\b|[\[(]\s*['\"]reasoning['\"]"),
}


def fit_reasoning(message: Message, template: str) -> Message:
    """The reasoning as the template reads it; without it if it does not, as such models are trained to go on so."""
    fitted = _without_reasoning(message)
    if message["role"] != "assistant" or not message.get("reasoning_content"):
        return fitted
    key = _find_key(template)
    return {**fitted, key: message["reasoning_content"]} if key else fitted


@lru_cache(maxsize=64)
def _find_key(template: str) -> str | None:
    """The template's name of the reasoning of a message; None if it reads none."""
    return next((key for key, pattern in _REASONING_KEYS.items() if pattern.search(template)), None)


def keep_reasoning(messages: Sequence[Message], num_kept: int) -> list[Message]:
    """Removes the reasoning of all but the last `num_kept` messages that have any."""
    kept: list[Message] = []
    for message in reversed(messages):
        num_kept -= "reasoning_content" in message
        kept.append(message if num_kept >= 0 else _without_reasoning(message))
    return kept[::-1]


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def later_system_texts(messages: Sequence[Message]) -> list[str]:
    """The texts of system messages after the first message, which some templates drop or refuse."""
    return [message["content"] for message in messages[1:] if message["role"] in _SYSTEM]


def system_first(messages: Sequence[Message]) -> list[Message]:
    """The messages for such templates: the system's at the start are one, and later ones are the user's, marked.

    These join the user's message before or after them, as many templates require turns to alternate.
    """
    found: list[Message] = []
    contents: list[list[Any]] = []  # the parts of each
    is_joined = False  # the user's last message may be joined
    for message in messages:
        is_start = not found or (len(found) == 1 and found[0]["role"] == "system")
        is_system = message["role"] in _SYSTEM
        if is_system and is_start:
            message = {**message, "role": "system"}
        elif is_system:
            message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        role = message["role"]
        if found and found[-1]["role"] == role and (is_system or is_joined) and role in ("system", "user"):
            contents[-1] += ["\n\n", *parts_of(message["content"])]
        else:
            found.append(message)
            contents.append([*parts_of(message["content"])])
        is_joined = is_system
    return [{**message, "content": join_parts(parts)} for message, parts in zip(found, contents, strict=True)]
