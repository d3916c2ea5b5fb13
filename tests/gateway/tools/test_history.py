"""Calls of earlier turns in the form templates accept, and the system's messages."""

import re
import time
from typing import Any

import pytest

from gateway.text.template import are_shown
from gateway.tools.formats import FORMATS
from gateway.tools.history import fit_ids, system_first, template_call


def test_ids_are_made_to_fit() -> None:
    """Calls and their results still match."""
    asked: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [template_call("call_ü1", "f", {}), template_call("abc123DEF", "f", {})],
    }
    answers = [{"role": "tool", "content": "", "tool_call_id": call_id} for call_id in ("call_ü1", "abc123DEF")]
    for name in ("hermes", "inline", "llama3"):
        assert [fit_ids(message, FORMATS[name]) for message in (asked, *answers)] == [asked, *answers]
    fitted = fit_ids(asked, FORMATS["mistral"])
    ids = [call["id"] for call in fitted["tool_calls"]]
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) for call_id in ids)
    assert ids[1] == "abc123DEF"
    assert [fit_ids(answer, FORMATS["mistral"])["tool_call_id"] for answer in answers] == ids
    assert asked["tool_calls"][0]["id"] == "call_ü1"


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
