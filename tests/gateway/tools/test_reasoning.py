"""Reasoning is detected in templates and prompts, and removed from an answer for every split."""

from collections.abc import Collection, Sequence
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.tools.reasoning import (
    MOST_WAITING,
    REASONING_FORMATS,
    ChannelReader,
    Parts,
    ReasoningFormat,
    ReasoningReader,
    ReasoningStart,
    reasoning_start,
    resolve_reasoning,
)
from tests.support.texts import split
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, THINKING_TEMPLATE

THINK = REASONING_FORMATS["think"]
MISTRAL = REASONING_FORMATS["mistral"]
GEMMA = REASONING_FORMATS["gemma4"]


# Formats and prompts.


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        (THINKING_TEMPLATE, (), "think"),
        ("{{ m.content.split('</think>')[-1] }}", ("<think>", "</think>"), "think"),
        ("{{ m.content.split('</think>')[-1] }}", ("</think>",), None),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", (), "mistral"),
        ("{%- set think_begin_token = '<seed:think>' %}{%- set think_end_token = '</seed:think>' %}", (), "seed"),
        ("{%- set think_begin_token = '<mm:think>' %}{%- set think_end_token = '</mm:think>' %}", (), "minimax-m3"),
        (r"{{- '<|channel>thought\n<channel|>' -}}", (), "gemma4"),
        (CHAT_TEMPLATE, ("<think>", "</think>"), None),
        ("", (), None),
    ],
)
def test_the_format_is_what_the_template_shows(template: str, tokens: Collection[str], name: str | None) -> None:
    found = resolve_reasoning("auto", template, tokens.__contains__)
    assert (found and found.name) == name
    assert resolve_reasoning("none", template, tokens.__contains__) is None
    assert resolve_reasoning("seed", template, tokens.__contains__) is REASONING_FORMATS["seed"]


@pytest.mark.parametrize(
    ("format", "prompt", "opened", "start"),
    [
        (THINK, "<|im_start|>assistant\n", "", "possible"),  # Qwen 3
        (THINK, "<|im_start|>assistant\n<think>\n", "", "inside"),  # QwQ, Qwen 3 Thinking, DeepSeek R1
        (THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "off"),  # Qwen 3
        (THINK, "<|Assistant|></think>", "", "off"),  # DeepSeek V3.1
        (THINK, "<|user|>What is <think>?<|assistant|>", "", "possible"),
        (MISTRAL, "[SYSTEM_PROMPT]First [THINK]draft[/THINK] then[/SYSTEM_PROMPT][INST]Hi[/INST]", "", "possible"),
        (GEMMA, "<|turn>model\n", "", "possible"),
        (GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "", "off"),
        # An open last message.
        (THINK, "<|assistant|>Paris is", "Paris is", "off"),
        (THINK, "<|assistant|>Paris is", "Paris is ", "off"),  # trimmed by the template
        (THINK, "<|assistant|><think>\nPerhaps", "Perhaps", "inside"),  # Nemotron
        (THINK, "<|assistant|><think>\n\n</think>\n\nParis", "Paris", "off"),  # Qwen 3
        (THINK, "<|assistant|><think>\n\n</think>\n\n<think>Perhaps", "<think>Perhaps", "inside"),
        (THINK, "<|assistant|><think>Perhaps</think>Yes", "<think>Perhaps</think>Yes", "off"),
    ],
)
def test_where_an_answer_begins(format: ReasoningFormat, prompt: str, opened: str, start: ReasoningStart) -> None:
    assert reasoning_start(format, prompt, opened) == start


# The reader.


def read(format: ReasoningFormat, start: ReasoningStart, pieces: Sequence[str], waits: bool = False) -> Parts:
    """A whole answer. Also checks that reasoning ends before content begins, and the counts on the way."""
    reader = ReasoningReader(format, start, waits=waits)
    parts = [reader.push(piece) for piece in pieces] + [reader.flush()]
    with_content = [rank for rank, part in enumerate(parts) if part.content]
    assert not any(part.reasoning for part in parts[min(with_content, default=len(parts)) + 1 :])
    content = "".join(part.content for part in parts)
    assert reader.num_taken + len(content) == sum(map(len, pieces))
    return Parts("".join(part.reasoning for part in parts), content)


def read_slowly(format: ReasoningFormat, start: ReasoningStart, text: str, waits: bool = False) -> Parts:
    """The slow twin."""
    _space, begin, rest = text.partition(format.begin) if text.lstrip().startswith(format.begin) else ("", "", text)
    if not begin and start == "off":
        return Parts("", text)
    if not begin and start == "possible":
        before, end, after = f"\n{text.lstrip()}".partition(f"\n{format.end}")
        if before:
            before, end, after = text.partition(f"\n{format.end}")
        if not end or (waits and format.begin in before):
            return Parts("", text)  # the model shows what markers look like
        return (
            Parts(before.strip("\n"), after.lstrip("\n"))
            if waits
            else Parts("", before.rstrip("\n") + after.lstrip("\n"))
        )
    reasoning, end, content = rest.lstrip("\n").partition(format.end)
    return Parts(reasoning.rstrip("\n") if end else reasoning, content.lstrip("\n"))


@pytest.mark.parametrize(
    ("text", "outside", "inside"),
    [
        ("<think>\nWell.\n</think>\n\nHi", ("Well.", "Hi"), ("Well.", "Hi")),
        ("Well.\n</think>\n\nHi", ("", "Well.\n</think>\n\nHi"), ("Well.", "Hi")),
        ("<think>\n\n</think>\n\nHi", ("", "Hi"), ("", "Hi")),
        ("</think>Hi", ("", "</think>Hi"), ("", "Hi")),
        ("<think>Well, no end", ("Well, no end", ""), ("Well, no end", "")),
        ("Hi", ("", "Hi"), ("Hi", "")),
        ("  \n Hi", ("", "  \n Hi"), ("  \n Hi", "")),
        (" \n<think>Well</think> Hi", ("Well", " Hi"), ("Well", " Hi")),
        ("Hi <think>x</think>", ("", "Hi <think>x</think>"), ("Hi <think>x", "")),
        ("<think><think>a</think><think>b", ("<think>a", "<think>b"), ("<think>a", "<think>b")),
        ("<think>a\n\n b \n</thin\n</think>\n \nc", ("a\n\n b \n</thin", " \nc"), ("a\n\n b \n</thin", " \nc")),
        ("<think>a\n</th", ("a\n</th", ""), ("a\n</th", "")),
        ("\n\n", ("", "\n\n"), ("", "")),
    ],
)
def test_reasoning_is_taken_out(text: str, outside: tuple[str, str], inside: tuple[str, str]) -> None:
    starts: list[tuple[ReasoningStart, tuple[str, str]]] = [("off", outside), ("inside", inside)]
    for start, parts in starts:
        assert read(THINK, start, [text]) == read(THINK, start, list(text)) == parts
        assert read_slowly(THINK, start, text) == parts


@pytest.mark.parametrize(
    ("text", "whole", "streamed"),
    [
        ("Let me see.\n</think>\n\nYes.", ("Let me see.", "Yes."), ("", "Let me see.Yes.")),
        ("\nLet me see.\n\n</think>Yes.", ("Let me see.", "Yes."), ("", "\nLet me see.Yes.")),
        ("Let me see.\n</think>", ("Let me see.", ""), ("", "Let me see.")),
        ("</think>\n\nYes.", ("", "Yes."), ("", "Yes.")),
        ("\n</think>\n\nYes.", ("", "Yes."), ("", "Yes.")),
        ("The marker is </think> here.", None, None),
        ("Yes.\n<think>\nx\n</think>\n", ("", "Yes.\n<think>\nx\n</think>\n"), ("", "Yes.\n<think>\nx")),
        ("Yes.\n</thin", None, None),
        ("Yes.\n\n", None, None),
        ("<think>a</think>b\n</think>c", ("a", "b\n</think>c"), ("a", "b\n</think>c")),
    ],
)
def test_reasoning_that_neither_prompt_nor_answer_opens(
    text: str, whole: tuple[str, str] | None, streamed: tuple[str, str] | None
) -> None:
    """What was streamed before its end is content by then."""
    for waits, parts in ((True, whole), (False, streamed)):
        expected = ("", text) if parts is None else parts
        assert read(THINK, "possible", [text], waits) == read(THINK, "possible", list(text), waits) == expected
        assert read_slowly(THINK, "possible", text, waits) == expected


_bits = st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "</thi", "\n", "\n\n", " ", "a", "{é}"])


@given(
    st.lists(_bits, max_size=12).map("".join),
    st.sampled_from(get_args(ReasoningStart)),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=8),
)
@example("\n<think>\n\na\n\n</think>\n\nb", "inside", False, [3, 9, 11, 12, 13, 20, 22])
def test_any_split_gives_the_same(text: str, start: ReasoningStart, waits: bool, cuts: list[int]) -> None:
    assert read(THINK, start, split(text, cuts), waits) == read_slowly(THINK, start, text, waits)


def test_little_is_held_back() -> None:
    reader = ReasoningReader(THINK, "possible")
    pieces = ["<think>", "We", "ll", "\n", "</", "b>", "\n</think>", "\n", "Hi", "\n"]
    shown = [reader.push(piece) for piece in pieces]
    assert [part.reasoning for part in shown] == ["", "We", "ll", "", "", "\n</b>", "", "", "", ""]
    assert [part.content for part in shown[-3:]] == ["", "Hi", "\n"]
    reader = ReasoningReader(THINK, "possible")
    pieces = ["Wel", "l </th", "ing>", "\n", "\n</", "b>", "\n</think>", "\n", "Hi", "\n"]
    shown = [reader.push(piece) for piece in pieces]
    assert [part.content for part in shown] == ["Wel", "l ", "</thing>", "", "", "\n\n</b>", "", "", "Hi", "\n"]


def test_an_answer_waits_for_its_end_marker_only_so_long() -> None:
    reader, text = ReasoningReader(THINK, "possible", waits=True), "a" * 1000
    shown = [reader.push(text) for _ in range(MOST_WAITING // 1000 + 2)]
    assert not any(part.content for part in shown[:-2])
    content = "".join(part.content for part in [*shown, reader.push(f"b\n{THINK.end}"), reader.flush()])
    assert content == text * len(shown) + f"b\n{THINK.end}" and not reader.num_taken


# Harmony.

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f<|message|>{}"


def read_channels(start: ReasoningStart, pieces: Sequence[str]) -> Parts:
    """Also checks which characters are said to be taken."""
    reader = ChannelReader(start)
    parts = [reader.push(piece) for piece in pieces] + [reader.flush()]
    text = "".join(pieces)
    content = "".join(part.content for part in parts)
    assert reader.num_taken == sum(map(reader.has_taken, range(len(text))))
    if "to=" not in text:
        assert "".join(char for at, char in enumerate(text) if not reader.has_taken(at)) == content
    return Parts("".join(part.reasoning for part in parts), content)


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("possible", f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}Yes.<|return|>", "Hm.", "Yes."),
        ("possible", f"{FINAL}Yes.", "", "Yes."),
        ("possible", "Yes, <b>that</b>.", "", "Yes, <b>that</b>."),
        ("possible", "to be or not", "", "to be or not"),
        ("possible", "<|start|>" + "x" * 300, "", "<|start|>" + "x" * 300),
        ("inside", f"Hm.<|end|><|start|>assistant{FINAL}Yes", "Hm.", "Yes"),
        ("inside", "Hm. <|e", "Hm. <|e", ""),
        ("off", "and so on<|return|>", "", "and so on"),
        ("possible", f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
         f"<|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{CALL}", "ab", f"I look.{CALL}"),
        ("possible", " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", "", CALL),
        ("possible", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "", CALL),
        ("possible", f"{ANALYSIS}a<|channel|>final<|message|>b", "a", "b"),  # without the end of a message
        ("possible", f"{FINAL}a<|end|><|start|>assis", "", "a"),
        ("possible", f"{ANALYSIS}call {CALL[11:20]} inside<|end|>", f"call {CALL[11:20]} inside", ""),
    ],
)  # fmt: skip
def test_channels_are_reasoning_or_content(start: ReasoningStart, text: str, reasoning: str, content: str) -> None:
    assert read_channels(start, [text]) == read_channels(start, list(text)) == Parts(reasoning, content)
    for cut in range(len(text)):
        assert read_channels(start, [text[:cut], text[cut:]]) == Parts(reasoning, content)


@given(
    st.lists(
        st.sampled_from(
            [ANALYSIS, FINAL, CALL, "<|end|>", "<|start|>assistant", "<|", "<|channel|>", "a", " to=", "<"]
        ),
        max_size=10,
    ).map("".join),
    st.sampled_from(get_args(ReasoningStart)),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_channels_are_read_alike_however_they_are_split(text: str, start: ReasoningStart, cuts: list[int]) -> None:
    assert read_channels(start, split(text, cuts)) == read_channels(start, [text])
