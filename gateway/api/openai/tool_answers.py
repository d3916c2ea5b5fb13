"""Tool calls in OpenAI's answers, whole and streamed."""

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.tools.parse import Arguments, CallBegin, CallEvent


class FunctionBody(msgspec.Struct):
    """The called function and its arguments."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    """A whole call."""

    id: str
    function: FunctionBody
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct):
    """What a chunk adds to a call's function."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What a chunk adds to a call. The first of each call has its id, type and function's name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


def call_deltas(events: Iterable[CallEvent]) -> list[ToolCallDelta]:
    """One per chunk."""
    deltas = []
    for event in events:
        if isinstance(event, CallBegin):
            deltas.append(ToolCallDelta(event.index, FunctionDelta("", event.name), event.id, "function"))
        elif isinstance(event, Arguments):
            deltas.append(ToolCallDelta(event.index, FunctionDelta(event.text)))
    return deltas
