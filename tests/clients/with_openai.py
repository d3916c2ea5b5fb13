"""openai-python."""

from collections.abc import Sequence
from typing import Any

import openai

from tests.clients.checks import ASKED, base_url, data_uri, image, openai_checks, pieces_of, refused, run, same, user

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


def count_by_responses(files: Sequence[str]) -> tuple[int, int]:
    parts = [{"type": "input_image", "detail": "auto", "image_url": data_uri(file)} for file in files]
    content = [*parts, {"type": "input_text", "text": ASKED["image"]["question"]}]
    asked: Any = {"model": ASKED["image"]["model"], "input": [{"role": "user", "content": content}]}
    usage: Any = client.responses.create(**asked, max_output_tokens=4).usage
    return usage.input_tokens, usage.input_tokens_details.cached_tokens


def images() -> None:
    CHECKS["image"]()
    image(count_by_responses, openai.BadRequestError, "input[0].content[0].image_url")


def error() -> None:
    refused(lambda: ask(messages=[user("sum")], max_tokens=ASKED["refusal"]["max_tokens"]), openai.BadRequestError)
    try:
        ask(model="unknown", messages=[user("sum")])
    except openai.NotFoundError as caught:
        same(caught.code, "model_not_found")
    else:
        raise AssertionError("no error for an unknown model")


CHECKS = openai_checks(ask, openai.BadRequestError)

if __name__ == "__main__":
    run({**CHECKS, "chat": chat, "stream": stream, "image": images, "error": error})
