"""openai-python."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from tests.clients.checks import (
    ASKED,
    base_url,
    data_uri,
    image,
    openai_checks,
    pieces_of,
    refused,
    run,
    same,
    user,
    vectors,
)

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


def respond(question: str, **fields: Any) -> Any:
    asked: Any = {"model": ASKED["model"], "temperature": 0, "max_output_tokens": 200, "input": question, **fields}
    return client.responses.create(**asked)


def polled(answer_id: str, ends: Callable[[str], bool]) -> Any:
    until = time.monotonic() + 60
    while not ends((answer := client.responses.retrieve(answer_id)).status or "") and time.monotonic() < until:
        time.sleep(0.05)
    return answer


def stored() -> None:
    stored_responses()
    stored_chats()


def stored_responses() -> None:
    question = ASKED["sum"]["question"]
    first = respond(question)
    second = respond(question, previous_response_id=first.id)
    third = respond(question, previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    same(client.responses.retrieve(third.id).output_text, third.output_text)
    begun = respond(ASKED["poem"]["question"], background=True)
    same(polled(begun.id, lambda status: status == "completed").output_text, ASKED["poem"]["answer"])
    ended = client.responses.cancel(respond(ASKED["poem"]["question"], background=True).id)
    assert ended.status in ("cancelled", "completed"), ended.status
    with respond(ASKED["poem"]["question"], stream=True) as events:
        seen = [next(events) for _ in range(5)]
    answer_id = seen[0].response.id
    seen += client.responses.retrieve(answer_id, stream=True, starting_after=seen[-1].sequence_number)
    same([event.sequence_number for event in seen], list(range(len(seen))))
    same(seen[-1].response.output_text, ASKED["poem"]["answer"])
    client.responses.delete(answer_id)
    gone(lambda: client.responses.retrieve(answer_id))


def stored_chats() -> None:
    chats, mark = client.chat.completions, {"mark": str(time.time_ns())}
    whole = ask(messages=[user("sum")], store=True, metadata=mark)
    same(chats.retrieve(whole.id).choices, whole.choices)
    with ask(messages=[user("poem")], store=True, stream=True) as stream:
        chunks = [next(stream) for _ in range(4)]
    path, asked = f"/chat/completions/{chunks[0].id}", {"stream": "true", "starting_after": str(len(chunks))}
    rest = openai.Stream[ChatCompletionChunk]
    chunks += client.get(path, cast_to=ChatCompletionChunk, options={"params": asked}, stream=True, stream_cls=rest)
    pieces_of([chunk.choices[0].delta.content or "" for chunk in chunks])
    same(chats.retrieve(chunks[0].id).choices[0].message.content, ASKED["poem"]["answer"])
    same([one.id for one in chats.list(metadata=mark)], [whole.id])
    chats.update(chunks[0].id, metadata=mark)
    same({one.id for one in chats.list(metadata=mark, limit=1)}, {whole.id, chunks[0].id})
    same([one.content for one in chats.messages.list(whole.id)], [ASKED["sum"]["question"]])
    assert chats.delete(whole.id).deleted
    gone(lambda: chats.retrieve(whole.id))


def gone(call: Callable[[], object]) -> None:
    try:
        call()
    except openai.NotFoundError:
        return
    raise AssertionError("what was deleted is there")


def error() -> None:
    refused(lambda: ask(messages=[user("sum")], max_tokens=ASKED["refusal"]["max_tokens"]), openai.BadRequestError)
    try:
        ask(model="unknown", messages=[user("sum")])
    except openai.NotFoundError as caught:
        same(caught.code, "model_not_found")
    else:
        raise AssertionError("no error for an unknown model")


def embed() -> None:
    found = client.embeddings.create(model=ASKED["embed"]["model"], input=ASKED["embed"]["texts"])
    vectors([one.embedding for one in found.data])


CHECKS = openai_checks(ask, openai.BadRequestError)

if __name__ == "__main__":
    run({**CHECKS, "chat": chat, "stream": stream, "image": images, "stored": stored, "embed": embed, "error": error})
