"""JSON with control characters in its strings becomes standard JSON, for every split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.json_text import MAX_DIGITS, JsonText, JsonTexts
from tests.support.texts import split

STRINGS = st.text(st.sampled_from('a "\\\n\t\r\x01ü{}[]:,'), max_size=12)
VALUES = st.recursive(STRINGS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(STRINGS, inner))
RAW = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\u0001": "\x01"}


def with_raw_controls(text: str) -> str:
    """As grammars allow models to write it: control characters unescaped."""
    parts = text.split("\\\\")
    for escape, char in RAW.items():
        parts = [part.replace(escape, char) for part in parts]
    return "\\\\".join(parts)


@given(VALUES, st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_what_is_written_reads_as_it_was_meant(value: object, cuts: list[int], is_wide: bool) -> None:
    written = with_raw_controls(json.dumps(value, indent=1 if is_wide else None))
    reader = JsonText()
    text = "".join(reader.push(part) for part in split(written, cuts))
    assert json.loads(text) == value
    assert JsonText().push(written) == text


SMILE = r"\ud83d\ude42"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (SMILE, "🙂"), (SMILE.upper().replace("U", "u"), "🙂"), (r"\ud83d\ud83d\ude42\ude42", "\ufffd🙂\ufffd"),
        (r"\ud83d\n\ud83dx\u00e9", "\ufffd\n\ufffdxé"), (r"\\ud83d", r"\ud83d"), (r"\\\ud83d", "\\\ufffd"),
    ],
)  # fmt: skip
def test_halves_are_replaced_and_whole_pairs_stay(text: str, read: str) -> None:
    assert JsonTexts().read_object(f'{{"{text}": ["{text}"]}}') == {read: [read]}


def test_parts_are_counted_over_all_texts_of_a_request() -> None:
    texts = JsonTexts()
    for _ in range(2):
        texts.read_object(f'{{"a": [{",".join(["[]"] * 9_000)}]}}')
    with pytest.raises(ValueError, match="too many JSON elements"):
        texts.read_object(f'{{"a": [{",".join(["[]"] * 9_000)}]}}')


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" * 65 + "]" * 65, "deeper than 64 levels"),
        (f'{{"a": {"9" * (MAX_DIGITS + 1)}}}', "more than 128 digits"),
        (f'{{"a": [{"1," * 100_001}1]}}', "too many JSON elements"),
        (f'{{"a": [{",".join(["{}"] * 50_000)}]}}', "too many JSON elements"),
        (f'{{"a": [{",".join(["0"] * 10)}', "not valid JSON"),
        (r'{"\ud83d": "\ud83d", "a": NaN}', "not valid JSON"),
        ("[]", "must be a JSON object"),
    ],
)
def test_texts_are_refused_with_what_is_wrong(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        JsonTexts().read_object(text)


def test_parts_of_strings_do_not_count() -> None:
    code = "\\" + '"[{,' * 100_000 + "9" * 1000
    assert JsonTexts().read_object(json.dumps({"code": code})) == {"code": code}
