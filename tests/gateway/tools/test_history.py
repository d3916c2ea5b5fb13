"""Calls of earlier turns in the form templates accept, and the system's messages."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from gateway.text.template import are_shown
from gateway.tools.history import fit_calls, fit_reasoning, system_first, template_call
from wire.dialects import FORMATS


def test_ids_are_made_to_fit() -> None:
    """Calls and their results still match."""
    asked: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [template_call("call_ü1", "f", {}), template_call("abc123DEF", "f", {})],
    }
    answers = [{"role": "tool", "content": "", "tool_call_id": call_id} for call_id in ("call_ü1", "abc123DEF")]
    for name in ("hermes", "inline", "qwen-xml"):
        assert fit_calls([asked, *answers], FORMATS[name]) == [asked, *answers]
    fitted, *results = fit_calls([asked, *answers], FORMATS["mistral"])
    ids = [call["id"] for call in fitted["tool_calls"]]
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) for call_id in ids)
    assert ids[1] == "abc123DEF"
    assert [result["tool_call_id"] for result in results] == ids
    assert asked["tool_calls"][0]["id"] == "call_ü1"
    fitted, *results = fit_calls([asked, *answers], FORMATS["kimi"])
    assert [call["id"] for call in fitted["tool_calls"]] == ["functions.f:0", "functions.f:1"]
    assert [result["tool_call_id"] for result in results] == ["functions.f:0", "functions.f:1"]


def test_calls_are_split_where_a_message_has_one() -> None:
    def say(*words: str) -> list[dict[str, Any]]:
        """A text; letters are calls; a digit is a result's call."""
        return [
            {"role": "tool", "content": "", "tool_call_id": word}
            if word.isdigit()
            else {"role": "assistant", "content": word[0], "tool_calls": [template_call(x, "f", {}) for x in word[1:]]}
            if word[1:]
            else {"role": "user", "content": word}
            for word in words
        ]

    for name in ("harmony", "llama3"):
        told = fit_calls(say("u", "a12", "2", "1", "v", "b3", "3", "1", "w"), FORMATS[name])
        split = say("u", "a1", "1", " 2", "2", "v", "b3", "3", "1", "w")
        split[3]["content"] = ""
        assert told == split
    both = say("u", "a12", "2", "1")
    assert fit_calls(both, FORMATS["hermes"]) == both


def test_text_beside_a_thought_and_a_call_is_part_of_the_thought_in_harmony() -> None:
    asked = {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": [template_call("a", "f", {})]}
    (fitted,) = fit_calls([asked], FORMATS["harmony"])
    assert (fitted["thinking"], fitted["content"]) == ("Hm.\n\nI look.", "")


def test_arguments_are_text_where_the_template_wants_that() -> None:
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [template_call("a", "f", {"ü": 1})]}
    (fitted,) = fit_calls([asked], replace(FORMATS["deepseek-v31"], takes_text=True))
    assert fitted["tool_calls"][0]["function"]["arguments"] == '{"ü": 1}'
    assert fit_calls([asked], FORMATS["deepseek-v31"]) == [asked]


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("{{ message.reasoning_content }}", "reasoning_content"),
        ("{%- if message.content and message.thinking %}", "thinking"),
        ("{{ message.get('reasoning') }}{{ message.get('reasoning_content') }}", "reasoning_content"),
        ("{{ message.get('reasoning') }}", "reasoning"),
        ("{%- if thinking %}{{ message.content }}", None),
    ],
)
def test_reasoning_goes_back_as_the_template_reads_it(template: str, key: str | None) -> None:
    said = {"role": "assistant", "content": "Hi"}
    assert fit_reasoning({**said, "reasoning_content": "Hm"}, template) == (said | {key: "Hm"} if key else said)
    assert fit_reasoning(said, template) == said


# roles and texts, one word a message: s system, d developer, u user, a assistant, t tool |-> the same, joined by "+"
LAYOUTS = [
    ("s1 u2 a3", "s1 u2 a3"),
    ("s1 d2 s3 u4", "s1+2+3 u4"),
    ("d1 u2", "s1 u2"),
    ("u1 s2 a3", "u1+<2> a3"),
    ("u1 a2 s3 u4 u5", "u1 a2 u<3>+4 u5"),
    ("u1 a2 t3 s4 a5 d6", "u1 a2 t3 u<4> a5 u<6>"),
    ("s1 u2 s3 s4 u5", "s1 u2+<3>+<4>+5"),
    ("u1 u2 a3", "u1 u2 a3"),
]


@pytest.mark.parametrize(("given", "wanted"), LAYOUTS)
def test_the_system_first(given: str, wanted: str) -> None:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    found = system_first([{"role": roles[word[0]], "content": word[1:]} for word in given.split()])
    shown = [
        one["content"].replace("\n\n", "+").replace("<system>\n", "<").replace("\n</system>", ">") for one in found
    ]
    assert " ".join(one["role"][0] + text for one, text in zip(found, shown, strict=True)) == wanted


def test_texts_of_the_system_are_looked_for_in_linear_time() -> None:
    assert are_shown(["b", "a"], "a b") and not are_shown(["c"], "a b")
    many = [f"<{number}>" for number in range(4000)]
    assert are_shown(many, "".join(many))
    assert not are_shown([*many, "<x>"], "".join(many))


def test_many_texts_of_the_system_are_joined_in_linear_time() -> None:
    def join(count: int) -> float:
        texts = [{"role": "system", "content": "x" * 1000} for _ in range(count)]
        began = time.thread_time()
        (first, _) = system_first([*texts, {"role": "user", "content": ""}])
        took_s = time.thread_time() - began
        assert first["content"] == "\n\n".join(["x" * 1000] * count)
        return took_s

    taken = {count: min(join(count) for _ in range(5)) for count in (500, 8000)}
    assert taken[8000] < 80 * taken[500], "256 times as long if each joined a new text"
