"""litellm, which knows the service as any server with OpenAI's API."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import asks the internet for prices

import litellm

from tests.clients.checks import (
    ASKED,
    base_url,
    form,
    light_call,
    mood,
    pieces_of,
    refused,
    run,
    same,
    tool,
    user,
)


def ask(**fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{ASKED['model']}",
        api_base=base_url(),
        api_key="none",
        num_retries=0,
        **{"temperature": 0, "max_tokens": 200, **fields},
    )


def chat() -> None:
    answer = ask(messages=[user("sum")])
    same(answer.choices[0].message.content, ASKED["sum"]["answer"])
    assert answer.usage.completion_tokens > 3


def stream() -> None:
    pieces_of([chunk.choices[0].delta.content or "" for chunk in ask(messages=[user("poem")], stream=True)])


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


def in_form(name: str) -> Any:
    return json.loads(ask(messages=[user(name)], response_format=form(name)).choices[0].message.content)


def error() -> None:
    refused(lambda: ask(messages=[user("sum")], max_tokens=ASKED["refusal"]["max_tokens"]), litellm.BadRequestError)


if __name__ == "__main__":
    run(
        dict(
            chat=chat,
            stream=stream,
            tool=call_tool,
            required=required,
            schema=lambda: same(in_form("person"), ASKED["person"]["answer"]),
            enforced=lambda: mood(in_form("mood")),
            error=error,
        )
    )
