"""The checks of every client, and how a script reports them. Runs in the clients' own environments: only the stdlib.

A check's name says what the client must be able to do with the demo model:

    chat       a whole answer, word for word
    stream     a longer answer, in several pieces
    tool       the model calls a tool of its own accord, and answers from the tool's result
    required   a call that the model would not make by itself, with arguments that fit their schema
    schema     a right answer in JSON that fits its schema
    enforced   an answer in JSON to a question that the model would answer in prose
    image      an image's tokens count in the usage, asked again they are cached; a damaged one ends in the client's own
               exception, with the part and the reason
    stored     stored answers, where the client knows them: three turns of a conversation by their ids, in the
               background, cancelled, and streams of responses and chats that are left and read on
    embed      texts' vectors, alike where the texts are; or a reranker's order, the document that is the query first
    error      a request with max_tokens -1 ends in the client's own exception, with the service's message
"""

import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKS = ("chat", "stream", "tool", "required", "schema", "enforced", "image", "stored", "embed", "error")
AGENT_CHECKS = ("answer", "call", "again", "overflow", "begin", "qwen-xml", "harmony")  # see with_agents.py
MARK = "CHECK"  # begins a report's line: MARK, check, "ok", "skip" or "fail", reason
ASKED: dict[str, Any] = json.loads((Path(__file__).parent / "asked.json").read_text(encoding="utf-8"))


def base_url() -> str:
    """The service's URL, with /v1: the script's argument."""
    return sys.argv[1]


def run(checks: Mapping[str, Callable[[], object] | str], names: Sequence[str] = CHECKS) -> None:
    """Run a client's checks, print one line each, and exit: with 1 if any failed.

    A text instead of a check is the reason why this client cannot run it; a text that a check returns is shown.
    """
    has_failed, checks = False, {"stored": "not in its API", "embed": "not asked of it", **checks}
    for name in names:
        outcome, reason = _try(checks[name])
        has_failed |= outcome == "fail"
        print(MARK, name, outcome, reason.replace("\n", " ")[:300], flush=True)
    sys.exit(has_failed)


def _try(check: Callable[[], object] | str) -> tuple[str, str]:
    if isinstance(check, str):
        return "skip", check
    try:
        found = check()
    except Exception as error:
        traceback.print_exc()
        return "fail", f"{type(error).__name__}: {error}"
    return "ok", found if isinstance(found, str) else ""


def vectors(found: Sequence[Sequence[float]]) -> None:
    """Fails unless they are of ASKED's texts, of which the first two are equal."""
    lengths = [sum(number * number for number in vector) for vector in found]
    assert len(found) == len(ASKED["embed"]["texts"]) and all(abs(length - 1) < 1e-3 for length in lengths), lengths
    first, second, third = found
    assert max(abs(one - other) for one, other in zip(first, second, strict=True)) < 1e-4, "equal texts differ"
    assert max(abs(one - other) for one, other in zip(first, third, strict=True)) > 1e-2, "all texts are alike"


def same(found: object, expected: object) -> None:
    """Fails if they differ."""
    assert found == expected, f"{found!r} instead of {expected!r}"


def pieces_of(pieces: list[str]) -> None:
    """Fails unless a stream's pieces are the poem, and several."""
    same("".join(pieces), ASKED["poem"]["answer"])
    assert len([piece for piece in pieces if piece]) > 1, f"not streamed: {pieces}"


def light_call(name: str, arguments: object) -> None:
    """Fails unless this call is right for the check `required`."""
    same(name, ASKED["light"]["name"])
    assert arguments in ({"state": "on"}, {"state": "off"}), f"arguments that do not fit: {arguments!r}"


def mood(answer: object) -> None:
    """Fails unless this answer is right for the check `enforced`."""
    assert answer in ({"mood": "happy"}, {"mood": "sad"}), f"an answer that does not fit: {answer!r}"


def refused(call: Callable[[], object], error: type[Exception], message: str = ASKED["refusal"]["message"]) -> None:
    """Fails unless `call` raises an `error` that carries the service's message and the status 400."""
    try:
        call()
    except error as caught:
        assert message in str(caught), f"the message is lost: {caught}"
        same(getattr(caught, "status_code", None), 400)
        return
    raise AssertionError("no error was raised")


def image(count: Callable[[Sequence[str]], tuple[int, int]], error: type[Exception], part: str) -> None:
    """Fails unless images are taken as the check `image` wants it.

    count: PNG files in base64, asked about before ASKED's question |-> the request's tokens, and how many were cached.
    part: the field of the first one.
    """
    asked = ASKED["image"]
    text, _ = count([])
    first, _ = count([asked["file"]])
    again, cached = count([asked["file"]])
    same((first - text, again), (asked["tokens"], first))
    assert cached > asked["tokens"], f"{cached} of {again} tokens are cached"
    refused(lambda: count([asked["damaged"]]), error, f"{part}: {asked['message']}")


def data_uri(file: str) -> str:
    return f"data:image/png;base64,{file}"


def tool(name: str) -> dict[str, Any]:
    """A tool of ASKED in OpenAI's format."""
    return {"type": "function", "function": {key: ASKED[name][key] for key in ("name", "description", "parameters")}}


def user(name: str) -> dict[str, Any]:
    """A question of ASKED as a message."""
    return {"role": "user", "content": ASKED[name]["question"]}


def openai_checks(ask: Callable[..., Any], error: type[Exception]) -> dict[str, Callable[[], object]]:
    """Checks of tools, schemas and images for a client with OpenAI's names.

    ask: fields of a request |-> the answer. error: of a request that is refused.
    """
    return dict(
        tool=lambda: _call_tool(ask),
        required=lambda: _call_required(ask),
        schema=lambda: same(_in_form(ask, "person"), ASKED["person"]["answer"]),
        enforced=lambda: mood(_in_form(ask, "mood")),
        image=lambda: image(lambda files: _count(ask, files), error, "messages[0].content[0].image_url.url"),
    )


def _call_tool(ask: Callable[..., Any]) -> None:
    (choice,) = ask(messages=[user("weather")], tools=[tool("weather")]).choices
    same(choice.finish_reason, "tool_calls")
    (call,) = choice.message.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", ASKED["weather"]["arguments"]))
    result = {"role": "tool", "tool_call_id": call.id, "content": ASKED["weather"]["result"]}
    (choice,) = ask(messages=[user("weather"), choice.message, result], tools=[tool("weather")]).choices
    same(choice.message.content, ASKED["weather"]["answer"])


def _call_required(ask: Callable[..., Any]) -> None:
    for choice in ("required", {"type": "function", "function": {"name": ASKED["light"]["name"]}}):
        (answer,) = ask(messages=[user("light")], tools=[tool("light")], tool_choice=choice).choices
        assert answer.message.tool_calls, f"no call but {answer.message.content!r}"
        function = answer.message.tool_calls[0].function
        light_call(function.name, json.loads(function.arguments))


def _in_form(ask: Callable[..., Any], name: str) -> Any:
    form = {"name": name, "schema": ASKED[name]["schema"], "strict": True}
    answer = ask(messages=[user(name)], response_format={"type": "json_schema", "json_schema": form})
    return json.loads(answer.choices[0].message.content)


def _count(ask: Callable[..., Any], files: Sequence[str]) -> tuple[int, int]:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(file)}} for file in files]
    content = [*parts, {"type": "text", "text": ASKED["image"]["question"]}]
    message = {"role": "user", "content": content}
    usage = ask(model=ASKED["image"]["model"], messages=[message], max_tokens=4).usage
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
