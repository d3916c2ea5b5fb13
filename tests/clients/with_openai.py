"""openai-python."""

import json
from typing import Any

import openai

from tests.clients.checks import ASKED, base_url, form, light_call, mood, pieces_of, refused, run, same, tool, user

client = openai.OpenAI(base_url=base_url(), api_key="none", max_retries=0)


def ask(**fields: Any) -> Any:
    body = {"model": ASKED["model"], "temperature": 0, "max_tokens": 200, **fields}
    return client.chat.completions.create(**body)


def chat() -> None:
    answer = ask(messages=[user("sum")])
    same(answer.choices[0].message.content, ASKED["sum"]["answer"])
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)


def stream() -> None:
    chunks = list(ask(messages=[user("poem")], stream=True, stream_options={"include_usage": True}))
    pieces_of([chunk.choices[0].delta.content or "" for chunk in chunks[:-1]])
    same(chunks[-2].choices[0].finish_reason, "stop")
    assert chunks[-1].usage.completion_tokens > 3


def call_tool() -> None:
    (choice,) = ask(messages=[user("weather")], tools=[tool("weather")]).choices
    same(choice.finish_reason, "tool_calls")
    (call,) = choice.message.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", ASKED["weather"]["arguments"]))
    result = {"role": "tool", "tool_call_id": call.id, "content": ASKED["weather"]["result"]}
    (choice,) = ask(messages=[user("weather"), choice.message, result], tools=[tool("weather")]).choices
    same(choice.message.content, ASKED["weather"]["answer"])


def required() -> None:
    for choice in ("required", {"type": "function", "function": {"name": ASKED["light"]["name"]}}):
        (answer,) = ask(messages=[user("light")], tools=[tool("light")], tool_choice=choice).choices
        assert answer.message.tool_calls, f"no call but {answer.message.content!r}"
        function = answer.message.tool_calls[0].function
        light_call(function.name, json.loads(function.arguments))


def schema() -> None:
    answer = ask(messages=[user("person")], response_format=form("person"))
    same(json.loads(answer.choices[0].message.content), ASKED["person"]["answer"])


def enforced() -> None:
    mood(json.loads(ask(messages=[user("mood")], response_format=form("mood")).choices[0].message.content))


def error() -> None:
    refused(lambda: ask(messages=[user("sum")], max_tokens=ASKED["refusal"]["max_tokens"]), openai.BadRequestError)
    try:
        ask(model="unknown", messages=[user("sum")])
    except openai.NotFoundError as caught:
        same(caught.code, "model_not_found")
    else:
        raise AssertionError("no error for an unknown model")


if __name__ == "__main__":
    run(
        dict(chat=chat, stream=stream, tool=call_tool, required=required, schema=schema, enforced=enforced, error=error)
    )
