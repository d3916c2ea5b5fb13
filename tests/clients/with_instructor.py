"""instructor: answers as pydantic models, by tools or by a JSON schema."""

from collections.abc import Sequence
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field

from tests.clients.checks import ASKED, base_url, data_uri, image, light_call, mood, pieces_of, refused, run, same, user

plain = openai.OpenAI(base_url=base_url(), api_key="none", max_retries=0)
by_tools: Any = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
by_schema: Any = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)


class Person(BaseModel):
    name: str
    age: int


class Mood(BaseModel):
    mood: Literal["happy", "sad"]


class Light(BaseModel):
    """Switch the light in a room."""

    state: Literal["on", "off"]


class Weather(BaseModel):
    """Get the current weather in a given location"""

    city: str = Field()


# instructor names tools after their models
Light.__name__, Weather.__name__ = ASKED["light"]["name"], ASKED["weather"]["name"]


def ask(client: Any, name: str, model: Any, **fields: Any) -> Any:
    body = {"model": ASKED["model"], "temperature": 0, "max_tokens": 200, "max_retries": 0, **fields}
    return client.chat.completions.create(messages=[user(name)], response_model=model, **body)


def chat() -> None:
    same(ask(by_tools, "sum", None).choices[0].message.content, ASKED["sum"]["answer"])


def stream() -> None:
    chunks = ask(by_tools, "poem", None, stream=True)
    pieces_of([chunk.choices[0].delta.content or "" for chunk in chunks])


def count(files: Sequence[str]) -> tuple[int, int]:
    content = [*(instructor.Image.from_base64(data_uri(file)) for file in files), ASKED["image"]["question"]]
    body = {"model": ASKED["image"]["model"], "max_tokens": 4, "response_model": None}
    usage = by_tools.chat.completions.create(messages=[{"role": "user", "content": content}], **body).usage
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def error() -> None:
    refused(lambda: ask(by_tools, "sum", None, max_tokens=ASKED["refusal"]["max_tokens"]), openai.BadRequestError)


if __name__ == "__main__":
    run(
        dict(
            chat=chat,
            stream=stream,
            tool=lambda: same(ask(by_tools, "weather", Weather).model_dump(), ASKED["weather"]["arguments"]),
            required=lambda: light_call(Light.__name__, ask(by_tools, "light", Light).model_dump()),
            schema=lambda: same(ask(by_schema, "person", Person).model_dump(), ASKED["person"]["answer"]),
            enforced=lambda: mood(ask(by_schema, "mood", Mood).model_dump()),
            image=lambda: image(count, openai.BadRequestError, "messages[0].content[0].image_url.url"),
            error=error,
        )
    )
