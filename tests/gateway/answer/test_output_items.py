"""Items of an answer, text and calls, from pieces of its text: the same for every split of the text."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer.call_reader import CallReader
from gateway.answer.choice_text import OutputDelta
from gateway.answer.output_items import Item, ItemReader
from gateway.tools.parse import HELD_ARGUMENTS_CHARS
from gateway.tools.request import Tool, ToolUse
from tests.support.texts import split
from wire.dialects import FORMATS

TEXT = (
    'Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call> Done.'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><tool_call>\n{"name": "now", "arguments": {}}\n'
    "</tool_call> Bye"
)
ITEMS = [
    (None, "Let me look."), ("weather", '{"city": "Köln"}'), (None, "Done."), ("now", "{}"), ("now", "{}"),
    (None, "Bye"),
]  # fmt: skip
USE = ToolUse(FORMATS["hermes"], (Tool("weather"), Tool("now")), is_required=False, named=None, is_parallel=True)


def read(pieces: Sequence[OutputDelta], *, is_trusted: bool) -> list[Item]:
    """The items, after checking the order of their events."""
    calls, items = CallReader(USE, "seed", is_trusted=is_trusted), ItemReader()
    events = [event for piece in pieces for part in calls.read(piece) for event in items.read(part)]
    is_open = False
    for event in events:
        assert is_open != (event.kind == "begun")
        is_open = event.kind != "ended"
    assert not is_open
    grown = [event for event in events if event.kind == "grown"]
    for item in items.items:
        assert item.content == "".join(event.text for event in grown if event.item is item)
    return items.items


def pieces_of(text: str, cuts: Sequence[int]) -> list[OutputDelta]:
    """One token per character."""
    pieces = [OutputDelta(part, token_ids=tuple(range(len(part)))) for part in split(text, cuts)]
    return [*pieces[:-1], replace(pieces[-1], finish_reason="stop")]


@pytest.mark.parametrize("is_trusted", [False, True])
@given(cuts=st.lists(st.integers(1, len(TEXT) - 1), max_size=12, unique=True))
def test_items_stand_as_they_were_written(is_trusted: bool, cuts: list[int]) -> None:
    items = read(pieces_of(TEXT, cuts), is_trusted=is_trusted)
    assert [(item.call.name if item.call else None, item.content.strip()) for item in items] == ITEMS


def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_answered() -> None:
    piece = OutputDelta(TEXT[: TEXT.index("Köln")], finish_reason="stop", stop="Köln")
    (part,) = CallReader(USE, "seed", is_trusted=True).read(piece)
    assert (part.text, part.is_calling) == ("Let me look.", False)
    assert part.calls


def test_a_long_call_that_breaks_is_neither_whole_nor_to_be_answered() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"text": "%s" and so on' % ("x" * HELD_ARGUMENTS_CHARS)
    calls, items = CallReader(USE, "seed", is_trusted=False), ItemReader()
    (first, *_, last) = calls.read(OutputDelta(text, finish_reason="stop"))
    items.read(first)
    assert not last.is_calling
    assert (items.items[0].is_whole, items.has_calls) == (False, False)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_piece_that_is_parted_keeps_its_tokens_and_its_end(is_trusted: bool) -> None:
    (piece,) = pieces_of(TEXT, [])
    parts = CallReader(USE, "seed", is_trusted=is_trusted).read(piece)
    assert len(parts) == 3
    assert [len(part.token_ids) for part in parts] == [len(TEXT), 0, 0]
    assert [part.finish_reason for part in parts] == [None, None, "stop"]
    assert [part.is_calling for part in parts] == [False, False, True]
