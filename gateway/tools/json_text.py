"""JSON objects in text of clients, and JSON of models made valid for strict parsers while it arrives. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pydantic_core

from runtime.peer_input import MAX_JSON_DEPTH

MAX_ELEMENTS = 100_000  # besides token ids
MAX_DIGITS = 128  # of a number; those of longer ones take quadratic time to read and write
_LONG_NUMBER, _DIGITS = b"0" * (MAX_DIGITS + 1), bytes.maketrans(b"123456789", b"0" * 9)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_HALF = re.compile("[\ud800-\udfff]")
_LONE_HALF = "\\ufffd"  # replaces a lone half of a surrogate pair, which UTF-8 cannot encode
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CUT = r"\\(?:u[0-9a-fA-F]{0,3})?"
_WHOLE = rf'{_HIGH}{_LOW}|(?P<half>{_HIGH}|{_LOW})|\\.|["\x00-\x1f]'
_LAST = re.compile(_WHOLE, re.DOTALL)
# Before the last part, an escape that is cut off is held back, and a first half until the escape after it is known.
_PARTS = re.compile(rf"(?P<open>(?:{_HIGH}(?:{_CUT})?|{_CUT})\Z)|{_WHOLE}", re.DOTALL)


class LongNumberError(ValueError):
    """A number has more than MAX_DIGITS digits."""


@dataclass(slots=True)
class JsonBudget:
    """The JSON that one request may still have, which is bounded as reading and freeing it blocks the event loop.

    At most 3 us per container, 0.5 us per string and 0.2 us per other element; so within the defaults less than 0.1 s.
    """

    containers: int = 20_000
    strings: int = 50_000  # including keys
    elements: int = MAX_ELEMENTS

    def take(self, text: bytes) -> bytes:
        """Counts a text's parts before it is converted, at memory speed, and returns it without its strings.

        Raises ValueError if it has too many.
        """
        has_escapes = b"\\" in text  # files in base64 have none, and are long
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if has_escapes else text
        self.strings -= plain.count(b'"') // 2
        marks = b"".join(plain.split(b'"')[::2]) if self.strings >= 0 else b""
        self.containers -= marks.count(b"[") + marks.count(b"{")
        self.elements -= marks.count(b",")
        if min(self.strings, self.containers, self.elements) < 0:
            raise ValueError("has too many JSON elements to be a request's")
        if len(marks) > MAX_DIGITS and _LONG_NUMBER in marks.translate(_DIGITS):
            raise LongNumberError(f"has a number of more than {MAX_DIGITS} digits")
        return marks


class JsonTexts:
    """Reads the texts of one request that hold JSON objects, within one budget for all."""

    def __init__(self) -> None:
        self._budget = JsonBudget()

    def read_object(self, text: str) -> dict[str, Any]:
        """Returns the object. A lone half of a surrogate pair becomes U+FFFD. Raises ValueError: what is wrong."""
        num_halves = text.count("\\ud") + text.count("\\uD")
        self._budget.elements -= num_halves  # each is replaced if it is alone
        marks = self._budget.take(text.encode(errors="surrogatepass"))
        depth = max(accumulate(1 if mark in b"[{" else -1 for mark in marks.translate(None, _NO_BRACKETS)), default=0)
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"nests deeper than {MAX_JSON_DEPTH} levels")
        try:
            if num_halves:
                value = _without_halves(json.loads(text, parse_constant=_refuse))
            else:
                value = pydantic_core.from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"not valid JSON: {str(error)[:200]}") from error
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object, such as {}")
        return value


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_halves(inner) for inner in value]
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(inner) for key, inner in value.items()}
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


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

    Control characters in strings are escaped, which free models do not do. With `replaces_halves`, lone halves of
    surrogate pairs become U+FFFD.
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
