"""anthropic-python, over the Messages API."""

import json
from collections.abc import Sequence
from typing import Any

import anthropic

from tests.clients.checks import ASKED, base_url, image, light_call, mood, pieces_of, refused, run, same, user

client = anthropic.Anthropic(base_url=base_url().removesuffix("/v1"), api_key="none", max_retries=0)
OPTIONS = {"model": ASKED["model"], "max_tokens": 200, "extra_body": {"temperature": 0}}  # which it has no name for


def ask(**fields: Any) -> Any:
    body = {**OPTIONS, **fields}
    return client.messages.create(**body)


def tool(name: str) -> dict[str, Any]:
    asked = ASKED[name]
    return {"name": asked["name"], "description": asked["description"], "input_schema": asked["parameters"]}


def text_of(answer: Any) -> str:
    (block,) = answer.content
    return str(block.text)


def chat() -> None:
    answer = ask(messages=[user("sum")])
    same(text_of(answer), ASKED["sum"]["answer"])
    assert answer.usage.output_tokens > 3


def stream() -> None:
    asked: Any = {**OPTIONS, "messages": [user("poem")]}
    with client.messages.stream(**asked) as streamed:
        pieces_of(list(streamed.text_stream))
        same(streamed.get_final_message().stop_reason, "end_turn")


def call_tool() -> None:
    asked = ASKED["weather"]
    said = ask(messages=[user("weather")], tools=[tool("weather")])
    (call,) = said.content
    same((call.name, call.input), (asked["name"], asked["arguments"]))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": asked["result"]}
    history = [user("weather"), {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    same(text_of(ask(messages=history, tools=[tool("weather")])), asked["answer"])


def required() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": ASKED["light"]["name"]}):
        (call,) = ask(messages=[user("light")], tools=[tool("light")], tool_choice=choice).content
        light_call(call.name, call.input)


def in_form(name: str) -> Any:
    form = {"format": {"type": "json_schema", "schema": ASKED[name]["schema"]}}
    return json.loads(text_of(ask(messages=[user(name)], output_config=form)))


def count(files: Sequence[str]) -> tuple[int, int]:
    sources = [{"type": "base64", "media_type": "image/png", "data": file} for file in files]
    question = {"type": "text", "text": ASKED["image"]["question"]}
    content = [*({"type": "image", "source": source} for source in sources), question]
    message = {"role": "user", "content": content}
    usage = ask(model=ASKED["image"]["model"], messages=[message], max_tokens=4).usage
    return usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens


def error() -> None:
    refused(lambda: ask(messages=[user("sum")], max_tokens=ASKED["refusal"]["max_tokens"]), anthropic.BadRequestError)


if __name__ == "__main__":
    run(
        dict(
            chat=chat,
            stream=stream,
            tool=call_tool,
            required=required,
            schema=lambda: same(in_form("person"), ASKED["person"]["answer"]),
            enforced=lambda: mood(in_form("mood")),
            image=lambda: image(count, anthropic.BadRequestError, "messages[0].content[0].source.data"),
            error=error,
        )
    )
