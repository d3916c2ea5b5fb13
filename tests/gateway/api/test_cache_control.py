"""What Anthropic's cache_control marks is kept on workers, and counted."""

import json
from typing import Any

import pytest

from tests.support.api_server import SERVED, Served

SYSTEM, FIRST, ANSWER, LAST = "You help.", "go", "going", "and now?"
PARTS = {  # what can be marked |-> the prompt's text up to the end of what is kept
    "tools": "<|system|>You help.<|end|><|user|>",
    "system": "<|system|>You help.<|end|><|user|>",
    "first": "<|system|>You help.<|end|><|user|>go<|end|><|assistant|>",
    "answer": "<|system|>You help.<|end|><|user|>go<|end|><|assistant|>going<|end|><|user|>",
    "last": "<|system|>You help.<|end|><|user|>go<|end|><|assistant|>going<|end|><|user|>and now?<|end|><|assistant|>",
    "all": "<|system|>You help.<|end|><|user|>go<|end|><|assistant|>going<|end|><|user|>and now?<|end|><|assistant|>",
}


def build(**controls: Any) -> dict[str, Any]:
    """A request whose parts have these."""

    def mark(which: str, **part: Any) -> dict[str, Any]:
        return {**part, "cache_control": controls[which]} if which in controls else part

    def block(name: str, text: str) -> list[dict[str, Any]]:
        return [mark(name, type="text", text=text)]

    said = [
        {"role": "user", "content": block("first", FIRST)},
        {"role": "assistant", "content": block("answer", ANSWER)},
        {"role": "user", "content": block("last", LAST)},
    ]
    search = mark("tools", name="now", input_schema={"type": "object"})
    return {
        "model": SERVED,
        "max_tokens": 9,
        "system": block("system", SYSTEM),
        "messages": said,
        **({"tools": [search], "tool_choice": {"type": "none"}} if "tools" in controls else {}),
        **mark("all"),
    }


def ask(served: Served, body: dict[str, Any]) -> tuple[Any, Any]:
    """(what workers were to keep, the usage)."""
    answer = served.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    streamed = served.http.post("/v1/messages", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    begun = next(event["message"]["usage"] for event in events if event["type"] == "message_start")
    assert begun["cache_creation_input_tokens"] == 0 and "cache_creation" not in begun, "nothing is known yet"
    usage = answer.json()["usage"]
    assert usage == next(event["usage"] for event in events if event["type"] == "message_delta")
    return served.engine.sent[-1]["kept"], usage


def for_(ttl: str | None = None) -> dict[str, Any]:
    return {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("ttl", "seconds"), [(None, 300.0), ("5m", 300.0), ("1h", 3600.0)])
def test_the_part_up_to_a_mark_is_kept_and_what_was_computed_of_it_is_counted(
    served: Served, name: str, ttl: str | None, seconds: float
) -> None:
    kept, usage = ask(served, build(**{name: for_(ttl)}))
    prompt = len(served.engine.sent[-1]["prompt_ids"])
    if name == "tools":  # where a template shows them
        assert 0 < kept[0][0] < prompt
        expected = kept[0][0]
    else:
        expected = len(served.ids(PARTS[name]))
    assert [tuple(part) for part in kept] == [(expected, seconds)]
    created, read = expected - usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    assert read == 1
    assert usage["cache_creation_input_tokens"] == created
    assert usage["input_tokens"] == prompt - read - created
    split = (created, 0) if seconds == 300.0 else (0, created)
    assert usage["cache_creation"] == dict(
        zip(("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"), split, strict=True)
    )


def test_of_several_marks_the_last_of_each_time_counts(served: Served) -> None:
    kept, usage = ask(served, build(system=for_("1h"), first=for_("1h"), answer=for_(), last=for_("5m")))
    long, short = (len(served.ids(PARTS[name])) for name in ("first", "last"))
    assert [tuple(part) for part in kept] == [(short, 300.0), (long, 3600.0)]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": short - long,
        "ephemeral_1h_input_tokens": long - 1,
    }
    assert usage["cache_creation_input_tokens"] == short - 1


def test_without_a_mark_nothing_is_kept(served: Served) -> None:
    kept, usage = ask(served, build())
    assert kept == () and usage["cache_creation_input_tokens"] == 0 and "cache_creation" not in usage


@pytest.mark.parametrize(
    ("control", "field"),
    [({"type": "ephemeral", "ttl": "2h"}, "ttl"), ({"type": "forever"}, "type"), ({"ttl": "5m"}, "type")],
)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("all", ""), ("system", "system[0]."), ("tools", "tools[0]."), ("last", "messages[2].content[0]."),
    ],
)  # fmt: skip
def test_a_bad_mark_is_named(served: Served, name: str, path: str, control: Any, field: str) -> None:
    answer = served.http.post("/v1/messages", json=build(**{name: control}))
    assert answer.status_code == 400
    assert f"{path}cache_control.{field}" in answer.json()["error"]["message"]
