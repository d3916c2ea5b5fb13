"""JSON objects in text of clients, and JSON of models made valid for strict parsers while it arrives. Pure."""

import re
from collections.abc import Mapping
from typing import Any

import pydantic_core

from runtime.peer_input import MAX_JSON_DEPTH

_LONE_HALF = "\\ufffd"  # replaces a lone half of a surrogate pair, which UTF-8 cannot encode
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CUT = r"\\(?:u[0-9a-fA-F]{0,3})?"
_WHOLE = rf'{_HIGH}{_LOW}|(?P<half>{_HIGH}|{_LOW})|\\.|["\x00-\x1f]'
_LAST = re.compile(_WHOLE, re.DOTALL)
# Before the last part, an escape that is cut off is held back, and a first half until the escape after it is known.
_PARTS = re.compile(rf"(?P<open>(?:{_HIGH}(?:{_CUT})?|{_CUT})\Z)|{_WHOLE}", re.DOTALL)


def read_object(text: str) -> dict[str, Any]:
    """Returns the object. A lone half of a surrogate pair becomes U+FFFD. Raises ValueError saying what is wrong."""
    try:
        whole = _LAST.sub(lambda found: _LONE_HALF if found["half"] else found[0], text)
        value = pydantic_core.from_json(whole, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not valid JSON of at most {MAX_JSON_DEPTH} levels: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object, such as {}")
    check_depth(value)
    return value


def check_depth(value: Mapping[str, Any]) -> None:
    """Raises ValueError if the object is nested too deep."""
    level: list[Any] = [value]  # all objects and arrays at one depth
    for _ in range(MAX_JSON_DEPTH):
        inner = [item.values() if isinstance(item, Mapping) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"nests deeper than {MAX_JSON_DEPTH} levels")


class JsonText:
    """JSON that arrives in parts; how it is split does not matter.

    Control characters in strings are escaped: models do not escape them, and xgrammar allows that where a schema limits
    a string's length. With `replaces_halves`, lone halves of surrogate pairs become U+FFFD.
    """

    def __init__(self, *, replaces_halves: bool = False) -> None:
        self._replaces_halves = replaces_halves
        self._is_in_string = False
        self._held = ""

    def push(self, text: str, *, is_last: bool = False) -> str:
        """Returns the text that is now certain."""
        text, self._held = self._held + text, ""
        return (_LAST if is_last else _PARTS).sub(self._written, text)

    def _written(self, found: re.Match[str]) -> str:
        char = found[0]
        if found.lastgroup == "open":
            self._held = char
            return ""
        if char == '"':
            self._is_in_string = not self._is_in_string
        elif char < " " and self._is_in_string:
            return f"\\u{ord(char):04x}"
        return _LONE_HALF if self._replaces_halves and found["half"] else char
