"""Finds keys that occur twice in one JSON object, of which parsers silently keep one. Pure; must not know fields."""

import json
from collections.abc import Iterator


class _Repeated:
    """Replaces an object that has `key` more than once."""

    def __init__(self, key: str) -> None:
        self.key = key


def count_keys(value: object, num_objects: int) -> int:
    """Returns the number of keys of all objects in a parsed value with at most `num_objects` objects."""
    num_keys, rest = 0, [value]
    while rest and num_objects:
        item = rest.pop()
        if isinstance(item, dict):
            num_objects -= 1
            num_keys += len(item)
            rest += item.values()
        elif isinstance(item, list):
            rest += [inner for inner in item if isinstance(inner, (dict, list))]
    return num_keys


def find_repeated_key(body: bytes) -> str | None:
    """Returns the path of a repeated key, such as `messages[0].role`. Slower than parsing: use `count_keys` first."""
    return next(_paths(json.loads(body, object_pairs_hook=_mark), ""), None)


def _mark(pairs: list[tuple[str, object]]) -> object:
    members: dict[str, object] = {}
    for key, value in pairs:
        if key in members:
            return _Repeated(key)
        members[key] = value
    return members


def _paths(value: object, path: str) -> Iterator[str]:
    if isinstance(value, _Repeated):
        yield f"{path}.{value.key}".removeprefix(".")
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, f"{path}[{index}]")
