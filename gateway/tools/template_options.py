"""A request's variables for the chat template: `chat_template_kwargs` and those of a reasoning effort. Pure."""

import json
import re
from collections.abc import Mapping

from gateway.errors import bad_request, check_count

Option = str | int | float | bool | None

MAX_OPTIONS = 32
MAX_OPTIONS_BYTES = 4096  # as JSON
MAX_INTEGER = 2**53
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Names that the service or transformers sets; names that end with _token are reserved, too.
RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip


def check_options(given: object, param: str) -> Mapping[str, Option]:
    """Returns the client's variables for the template. Raises ApiError naming the wrong one."""
    if not isinstance(given, Mapping):
        raise bad_request(f"{param} must be an object", param, "invalid_type")
    check_count(param, len(given), MAX_OPTIONS, "names")
    for name, value in given.items():
        path = f"{param}.{name}"
        if not _NAME.fullmatch(name):
            raise bad_request(f"{param} has the name {name[:80]!r}; use up to 64 letters, digits and '_'", param)
        if name in RESERVED or name.endswith("_token"):
            raise bad_request(f"{path} is set by the service; leave it out", path)
        if not isinstance(value, str | int | float | None):
            raise bad_request(f"{path} must be a string, a number, a boolean or null", path, "invalid_type")
        if isinstance(value, int | float) and not abs(value) <= MAX_INTEGER:  # NaN, too
            raise bad_request(f"{path} must be a number between -2^53 and 2^53", path)
    check_count(param, len(json.dumps(given).encode()), MAX_OPTIONS_BYTES, "bytes as JSON")
    return given


def effort_options(effort: str, param: str) -> Mapping[str, Option]:
    """Variables of a reasoning effort; the client's own override them. Raises ApiError.

    Templates read the effort or a switch: Qwen, GLM and Gemma read `enable_thinking`, DeepSeek and Granite `thinking`.
    Any effort but "none" switches reasoning on.
    """
    return {"reasoning_effort": check_effort(effort, param), **switch_options(effort != "none")}


def check_effort(effort: str, param: str) -> str:
    """Returns the effort. Raises ApiError unless it is one."""
    if effort not in EFFORTS:
        raise bad_request(f"{param} must be one of {', '.join(EFFORTS)}", param)
    return effort


def switch_options(is_on: bool) -> Mapping[str, Option]:
    """Variables that switch reasoning on or off."""
    return {"enable_thinking": is_on, "thinking": is_on}
