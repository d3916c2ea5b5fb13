"""Where in a prompt's text the parts end that its client marks to be kept. Pure.

A mark counts to the end of its message; one in the system's text or in tools, to the first message.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.tools.history import parts_of


class Mark(NamedTuple):
    """The first messages of a conversation are kept, with all that templates write before them."""

    num_messages: int
    seconds: float


def find_end(text: str, messages: Sequence[Mapping[str, Any]], count: int) -> int:
    """Characters of a conversation's text before its message number `count`, from 0 on.

    Messages are looked for in order, as templates may change what they say: one that is not found ends no later.
    """
    at = 0
    for index, message in enumerate(messages):
        said = next((part.strip() for part in parts_of(message["content"]) if isinstance(part, str)), "")
        found = text.find(said, at) if said else -1
        if index == count:
            return max(found, at)
        if found >= 0:
            at = found + len(said)
    return len(text)
