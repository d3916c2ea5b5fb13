"""ollama-python, over Ollama's API."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import ollama

from tests.clients.checks import ASKED, base_url, mood, pieces_of, refused, run, same, tool, user

client = ollama.Client(base_url().removesuffix("/v1"))
OPTIONS = {"temperature": 0, "num_predict": 200}


def ask(**fields: Any) -> Any:
    return client.chat(**{"model": ASKED["model"], "options": OPTIONS, **fields})


def chat() -> None:
    answer = ask(messages=[user("sum")])
    same((answer.message.content, answer.done_reason), (ASKED["sum"]["answer"], "stop"))
    assert answer.eval_count > 3 and 0 < answer.eval_duration < answer.total_duration
    same(client.generate(ASKED["model"], ASKED["sum"]["question"], options=OPTIONS).response, ASKED["sum"]["answer"])
    assert f"{ASKED['model']}:latest" in [one.model for one in client.list().models]
    assert "completion" in (client.show(ASKED["model"]).capabilities or ())


def stream() -> None:
    *parts, last = ask(messages=[user("poem")], stream=True)
    pieces_of([part.message.content or "" for part in parts])
    same((last.done, last.done_reason), (True, "stop"))


def call_tool() -> None:
    asked = ASKED["weather"]
    said = ask(messages=[user("weather")], tools=[tool("weather")]).message
    (call,) = said.tool_calls
    same((call.function.name, call.function.arguments), (asked["name"], asked["arguments"]))
    result = {"role": "tool", "tool_name": call.function.name, "content": asked["result"]}
    same(ask(messages=[user("weather"), said, result], tools=[tool("weather")]).message.content, asked["answer"])


def in_form(name: str) -> Any:
    return json.loads(ask(messages=[user(name)], format=ASKED[name]["schema"]).message.content)


def count(files: Sequence[str]) -> int:
    message = {**user("image"), "images": [base64.b64decode(file) for file in files]}
    return int(ask(model=ASKED["image"]["model"], messages=[message], options={"num_predict": 4}).prompt_eval_count)


def image() -> None:
    asked = ASKED["image"]
    same(count([asked["file"]]) - count([]), asked["tokens"])
    place = f"messages[0].images[0]: {asked['message']}"
    refused(lambda: count([asked["damaged"]]), ollama.ResponseError, place)


def error() -> None:
    why = "options.num_predict is 0; it must be at least 1"
    refused(lambda: ask(messages=[user("sum")], options={"num_predict": 0}), ollama.ResponseError, why)
    refused(lambda: client.pull(ASKED["model"]), ollama.ResponseError, "/api/pull is not supported")


if __name__ == "__main__":
    run(
        dict(
            chat=chat,
            stream=stream,
            tool=call_tool,
            required="not in its API",
            schema=lambda: same(in_form("person"), ASKED["person"]["answer"]),
            enforced=lambda: mood(in_form("mood")),
            image=image,
            error=error,
        )
    )
