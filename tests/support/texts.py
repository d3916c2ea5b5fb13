"""Shared by tests of text: the tiny tokenizers, and texts, calls and events that arrive in parts."""

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.text.tokenizer import Tokenizer
from gateway.tools.parse import Arguments, CallBegin, CallEnd, Content, Event
from tests.support.tiny_tokenizer import write_byte_level, write_sentencepiece

KINDS = ("byte_level", "sentencepiece")
Call = tuple[str, str]  # name, arguments as written


@cache
def tiny(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer({"byte_level": write_byte_level, "sentencepiece": write_sentencepiece}[kind](Path(folder)))


def edges(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each part of something of this length. `cuts`: any numbers."""
    return list(itertools.pairwise([0, *sorted(cut % (length + 1) for cut in cuts), length]))


def split(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[begin:end] for begin, end in edges(len(text), cuts)]


def joined(events: Sequence[Event]) -> list[Event]:
    """Merge neighbouring texts."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            assert last.index == event.index
            out[-1] = Arguments(last.index, last.text + event.text)
        else:
            out.append(event)
    return out


def summary(events: Sequence[Event]) -> tuple[str, list[Call]]:
    """Content and calls; also checks the order of events. Ids are id0, id1, ..."""
    content, calls, is_open = "", list[Call](), False
    for event in events:
        match event:
            case Content(text):
                assert text and not is_open
                content += text
            case CallBegin(index, call_id, name):
                assert not is_open and index == len(calls) and call_id == f"id{index}"
                calls.append((name, ""))
                is_open = True
            case Arguments(index, text):
                assert text and is_open and index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case CallEnd(index, call_id, name, arguments):
                assert is_open and index == len(calls) - 1 and call_id == f"id{index}"
                assert calls[-1] == (name, arguments)
                is_open = False
    assert not is_open
    return content, calls
