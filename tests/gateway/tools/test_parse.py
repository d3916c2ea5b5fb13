"""Calls found in text: every format, any split, nothing lost; malformed calls become content."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.tools.parse import HELD_ARGUMENTS_CHARS, Arguments, CallBegin, CallEnd, CallParser, Content, Event
from tests.support.combinations import examples
from tests.support.texts import Call, joined, split, summary
from wire.dialects import ARGUMENTS, FORMATS, NAME, SPACE, Format

NAMES = ("get_weather", "now", "send-mail")
NOW, HERMES_NOW = '{"name": "now", "parameters": {}}', '{"name": "now", "arguments": {}}'


def parse(format: Format, pieces: Sequence[str], is_trusted: bool = False) -> list[Event]:
    """Events, with neighbouring texts merged."""
    ids = (f"id{n}" for n in itertools.count())
    parser = CallParser(format, NAMES, lambda: next(ids), is_trusted=is_trusted)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    return joined(events)


def write(format: Format, calls: Sequence[Call]) -> str:
    """Write calls as a model does."""
    written = [format.call.replace(NAME, name).replace(ARGUMENTS, arguments) for name, arguments in calls]
    return format.before.replace(SPACE, " ") + format.between.join(written) + format.after


# test_dialect.py has the others, written by chat templates
formats = st.sampled_from([FORMATS[name] for name in ("hermes", "inline", "llama3", "mistral", "mistral-args")])
all_formats = st.sampled_from(list(FORMATS.values()))
cut_lists = st.lists(st.integers(0, 400), max_size=12)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent),
    st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    st.booleans(),
    st.sampled_from([None, 2]),
)
calls_strategy = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=4)


@settings(max_examples=examples(80))
@given(format=formats, calls=calls_strategy, lead=st.sampled_from(["", "Let me look.\n", "a < b ["]), cuts=cut_lists)
def test_what_a_model_writes_is_read_however_it_is_split(
    format: Format, calls: list[Call], lead: str, cuts: list[int]
) -> None:
    lead = "" if format.bare_opener else lead
    text = lead + write(format, calls)
    for is_trusted in (False, True):
        content, found = summary(parse(format, split(text, cuts), is_trusted))
        assert found == calls
        assert content == lead.rstrip()


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|", "[TOOL"),
    *('{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {"a": [1, {"b": "}"}]}}', "now", "other"),
    *('"name"', '"arguments"', '"parameters"', '"now"', "{", "}", "[", "]", ":", ",", ";", " ", "\n", '"', "\\"),
    *(
        "<function=now>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "(a=",
        ")",
    ),
    *(
        "</arg_value>",
        "<|tool_call>",
        "call:now",
        '<|"|>',
        "<tool_call|>",
        "<|channel|>commentary to=functions.now",
        "'",
    ),
    *("<|message|>", "<|call|>", "<|tool_call|>", "<|tool_call_start|>", "[now(", "<function_calls>", "```json", "```"),
    *("\\u00", "1", "-0.5e3", "tru", "true", "null", "hello", "é🙂", "\x00", '{"name": "now"}', "{}", "0"),
]


@settings(max_examples=examples(400))
@given(all_formats, st.lists(st.sampled_from(FRAGMENTS), max_size=14), cut_lists, st.booleans())
@example(FORMATS["hermes"], ['<tool_call>{"name": "now"}', "</tool_call>", " ", "<tool"], [], False)
def test_any_text_gives_the_same_events_however_it_is_split_and_none_is_lost(
    format: Format, parts: list[str], cuts: list[int], is_trusted: bool
) -> None:
    text = "".join(parts)
    events = parse(format, [text], is_trusted)
    assert events == parse(format, split(text, cuts), is_trusted) == parse(format, list(text), is_trusted)
    content, calls = summary(events)
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(char in rest for char in content)  # a subsequence: no character is invented or moved
    for name, arguments in calls:
        assert name in NAMES
        if not is_trusted:
            assert isinstance(json.loads(arguments), dict)
    assert len(text) - len(content) - sum(len(arguments) for _, arguments in calls) <= 80 * len(calls)


MALFORMED = [
    '<tool_call>\n{"name": "now", "arguments": {"a": }}\n</tool_call>',
    '<tool_call>{"name": "now", "arguments": "text"}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": 1}',
    '<tool_call>{"name": "now", "arguments": {"a": "x',
    '<tool_call>{"name": "now", "arguments": {"a": "line\nbreak}}</tool_call>',
    '<tool_call>{"name": "now", "name": "now", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
    "<tool_call>now()</tool_call>",
    "<tool_call></tool_call>",
    "</tool_call>",
    "a <tool_ b",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_is_content(text: str) -> None:
    assert parse(FORMATS["hermes"], [text]) == [Content(text)]
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    if text.endswith("</tool_call>") and "line" not in text:  # an unclosed string swallows the rest
        assert summary(parse(FORMATS["hermes"], [text + good])) == (text, [("now", "{}")])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name":"now","arguments":{"a":"\t\n"\n}}', "", [("now", '{"a":"\\u0009\\u000a"\n}')]),
        ("hermes", '<tool_call>{"name":"now"}<tool_call>{"name":"now"}', "", [("now", "{}"), ("now", "{}")]),
        ("hermes", '\n\n<tool_call>{"name":"now"}</tool_call> done ', " done ", [("now", "{}")]),
        ("hermes", '<tool_call>{"id": 7, "name": "now", "type": "function"}</tool_call>', "", [("now", "{}")]),
        ("hermes", '<tool_call>{"na\\u006de": "n\\u006fw"}</tool_call>', "", [("now", "{}")]),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", "{}")]),
        ("llama3", 'Well: <|python_tag|>{"name": "now", "parameters": {}}', "Well:", [("now", "{}")]),
        ("llama3", ' {"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
        ("llama3", '{"name": "now", "parameters": {}};x', ";x", [("now", "{}")]),
        *(
            ("llama3", f"{{}}{between}{{}}{end}".format(NOW, NOW), "", [("now", "{}")] * 2)
            for between in ("; ", ";\n", "\n", "\n\n", " ", "", ", ", ",\n", "\n<|python_tag|>")
            for end in ("", ";", "\n")
        ),
        ("llama3", f"{NOW}\n{NOW}\nHi", "\nHi", [("now", "{}")] * 2),
        ("llama3", f'{NOW}\n{{"a": 1}}', '\n{"a": 1}', [("now", "{}")]),
        ("llama3", f"{NOW}, and", ", and", [("now", "{}")]),
        ("hermes", f"<tool_call>\n{HERMES_NOW}\n{HERMES_NOW}\n</tool_call>", "", [("now", "{}")] * 2),
        ("hermes", f"<tool_call>{HERMES_NOW}, {HERMES_NOW}</tool_call>", "", [("now", "{}")] * 2),
        ("llama3", '{"now": 1} {"name": "now", "parameters": {}}', None, []),
        ("llama3", "<|python_tag|>print(1)", None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abc123def"}]', "", [("now", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "now"}, {"name": "huh"}]', ', {"name": "huh"}]', [("now", "{}")]),
        ("mistral", "see [1] and [TOOL]", None, []),
        ("mistral-args", '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{"a":1}', "", [("now", '{"a":1}')]),
        ("mistral-args", "[TOOL_CALLS]huh[ARGS]{}", None, []),
        ("mistral-args", "[TOOL_CALLS]now[CALL_ID]a{}", None, []),
        ("llama4", r'[now(a="\d+\.")]', "", [("now", r'{"a":"\\d+\\."}')]),  # Python keeps unknown escapes
        ("llama4", r"[now(a='\'\n\U0010FFFF')]", "", [("now", '{"a":"\'\\n\\udbff\\udfff"}')]),
        ("llama4", r'[now(a="\x4")]', None, []),
    ],
)
def test_what_models_also_write(name: str, text: str, content: str | None, calls: list[Call]) -> None:
    assert summary(parse(FORMATS[name], list(text))) == (text if content is None else content, calls)


def test_content_and_trusted_arguments_are_streamed_as_they_come() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES, lambda: "id", is_trusted=True)
    assert parser.push("Well, ") == [Content("Well,")]
    assert parser.push("a <tool") == [Content(" a")]
    assert parser.push('box> <tool_call>{"name": "now", "arguments": ') == [Content(" <toolbox>")]
    assert parser.push('{"a') == [CallBegin(0, "id", "now"), Arguments(0, '{"a')]
    assert parser.push('": 1') == [Arguments(0, '": ')]  # a number is read at once
    assert parser.push("}") == [Arguments(0, "1}")]
    assert parser.push("}</tool_call>") == [CallEnd(0, "id", "now", '{"a": 1}')]
    assert parser.flush() == []


def test_an_answer_in_a_form_has_calls_only_where_it_begins() -> None:
    call = "<tool_call>" + HERMES_NOW + "</tool_call>"
    for text in (f'{{"a": "{call}"}}', f" x {call}", f"x{call}"):
        for pieces in ([text], list(text)):
            parser = CallParser(FORMATS["hermes"], NAMES, lambda: "id", is_trusted=True, begins=True)
            events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
            assert joined(events) == [Content(text)]
    parser = CallParser(FORMATS["hermes"], NAMES, lambda: "id", is_trusted=True, begins=True)
    assert not any(isinstance(event, Content) for event in parser.push(f"\n{call}\n{call}") + parser.flush())
    assert parser.num_calls == 2


def test_an_answer_in_json_is_not_held_back() -> None:
    parser = CallParser(FORMATS["llama3"], NAMES, lambda: "id")
    assert parser.push('{"title": "A') == [Content('{"title": "A')]
    assert parser.push(" story") == [Content(" story")]


def test_long_arguments_are_streamed_even_if_they_may_break() -> None:
    body = '{"text": "' + "x" * HELD_ARGUMENTS_CHARS
    parser = CallParser(FORMATS["hermes"], NAMES, lambda: "id")
    assert parser.push('<tool_call>{"name": "now", "arguments": ' + body[:-20]) == []
    assert parser.push(body[-20:]) == [CallBegin(0, "id", "now"), Arguments(0, body)]
    end = CallEnd(0, "id", "now", f'{body}" ', is_whole=False)
    assert parser.push('" and so on') == [Arguments(0, '" '), end, Content("and so on")]
    assert parser.flush() == []
