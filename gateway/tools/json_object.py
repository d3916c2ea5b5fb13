"""Reads JSON objects from text of clients and models, within limits in which they can be written again. Pure."""

import re
from collections.abc import Mapping
from typing import Any

import pydantic_core

from runtime.peer_input import MAX_JSON_DEPTH

LONE_HALF = "\\ufffd"  # replaces a lone half of a surrogate pair, which UTF-8 cannot encode
HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_PAIR = HIGH_HALF.pattern + LOW_HALF.pattern
_HALVES = re.compile(rf"(?<!\\)((?:\\\\)*)({_PAIR}|{HIGH_HALF.pattern}|{LOW_HALF.pattern})")  # after whole escapes


def read_object(text: str) -> dict[str, Any]:
    """Returns the object. A lone half of a surrogate pair becomes U+FFFD. Raises ValueError saying what is wrong."""
    try:
        value = pydantic_core.from_json(_HALVES.sub(_without_lone_half, text), allow_inf_nan=False)
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


def _without_lone_half(escape: re.Match[str]) -> str:
    before, halves = escape.groups()
    return before + (LONE_HALF if HIGH_HALF.fullmatch(halves) or LOW_HALF.fullmatch(halves) else halves)
