"""langchain-openai."""

from collections.abc import Sequence
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.checks import (
    ASKED,
    base_url,
    data_uri,
    image,
    light_call,
    mood,
    pieces_of,
    refused,
    run,
    same,
    tool,
    vectors,
)

MODEL: Any = ChatOpenAI(
    model=ASKED["model"], base_url=base_url(), api_key="none", temperature=0, max_tokens=200, max_retries=0
)


def question(name: str) -> Any:
    return HumanMessage(ASKED[name]["question"])


def chat() -> None:
    answer = MODEL.invoke([question("sum")])
    same(answer.content, ASKED["sum"]["answer"])
    assert answer.usage_metadata["output_tokens"] > 3


def stream() -> None:
    pieces_of([chunk.content for chunk in MODEL.stream([question("poem")])])


def call_tool() -> None:
    model = MODEL.bind_tools([tool("weather")])
    said = model.invoke([question("weather")])
    (call,) = said.tool_calls
    same((call["name"], call["args"]), (ASKED["weather"]["name"], ASKED["weather"]["arguments"]))
    result = ToolMessage(ASKED["weather"]["result"], tool_call_id=call["id"])
    same(model.invoke([question("weather"), said, result]).content, ASKED["weather"]["answer"])


def required() -> None:
    for choice in ("required", ASKED["light"]["name"]):
        said = MODEL.bind_tools([tool("light")], tool_choice=choice).invoke([question("light")])
        assert said.tool_calls, f"no call but {said.content!r}"
        light_call(said.tool_calls[0]["name"], said.tool_calls[0]["args"])


def in_form(name: str) -> Any:
    form = {"title": name, **ASKED[name]["schema"]}
    return MODEL.with_structured_output(form, method="json_schema", strict=True).invoke([question(name)])


def schema() -> None:
    same(in_form("person"), ASKED["person"]["answer"])


def count(files: Sequence[str]) -> tuple[int, int]:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(file)}} for file in files]
    message = HumanMessage([*parts, {"type": "text", "text": ASKED["image"]["question"]}])
    usage = MODEL.bind(model=ASKED["image"]["model"], max_tokens=4).invoke([message]).usage_metadata
    return usage["input_tokens"], usage["input_token_details"]["cache_read"]


def embed() -> None:
    """Without `check_embedding_ctx_length` it sends texts, not another model's token ids."""
    given: Any = {"model": ASKED["embed"]["model"], "base_url": base_url(), "api_key": "none"}
    vectors(OpenAIEmbeddings(**given, check_embedding_ctx_length=False).embed_documents(ASKED["embed"]["texts"]))


def error() -> None:
    refused(
        lambda: MODEL.bind(max_tokens=ASKED["refusal"]["max_tokens"]).invoke([question("sum")]), openai.BadRequestError
    )


if __name__ == "__main__":
    run(
        dict(
            chat=chat,
            stream=stream,
            tool=call_tool,
            required=required,
            schema=schema,
            enforced=lambda: mood(in_form("mood")),
            image=lambda: image(count, openai.BadRequestError, "messages[0].content[0].image_url.url"),
            embed=embed,
            error=error,
        )
    )
