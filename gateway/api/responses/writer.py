"""Writes a choice as an answer for clients of OpenAI's Responses API, streamed or whole."""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import pydantic_core
from msgspec import UNSET, Raw

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.answer.choices import Totals
from gateway.answer.output_items import Item, ItemEvent, ItemReader
from gateway.api.http.answer import COMMENT_PING, Stored, encode, named_event
from gateway.api.http.errors import ErrorBody, build_error
from gateway.api.openai.answers import ChatLogprobs, TokenBytes
from gateway.api.responses import answers
from gateway.api.responses.item_types import Called, FunctionTool
from gateway.api.responses.types import ResponsesRequest
from gateway.errors import ApiError
from gateway.request.types import PreparedRequest

_EVENTS: Mapping[type[answers.OutputItem], str] = {
    answers.OutputMessage: "response.output_text",
    answers.OutputReasoning: "response.reasoning_text",
    answers.OutputCall: "response.function_call_arguments",
    answers.OutputCustomCall: "response.custom_tool_call_input",
}


def _asked_of(request: ResponsesRequest, job: PreparedRequest) -> dict[str, Any]:
    """The fields of a request that its answer repeats."""
    sampling = job.generations[0].sampling
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    choice = request.tool_choice or "auto"
    tools = []
    for tool in request.tools or ():
        is_function = isinstance(tool, FunctionTool)
        told = tool.model_dump(by_alias=True, exclude_none=not is_function)
        tools.append(told | ({"strict": bool(told["strict"])} if is_function else {}))
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_p": sampling.top_p,
    }


class ResponseWriter:
    """Writes the answer to one request, which has one choice. A failed answer contains the items before the error.

    Ids of its items follow from its own.
    """

    done = b""
    ping = COMMENT_PING

    def __init__(
        self, totals: Totals, request: ResponsesRequest, token_bytes: TokenBytes, stored: Stored | None = None
    ) -> None:
        """`stored`: None if nothing is."""
        self.id = stored.id if stored else new_response_id()
        self.ended: answers.ResponseBody | None = None  # the whole answer, at its end
        self._stored = stored
        self._previous_id = request.previous_response_id
        self._created_s = stored.created_s if stored else int(time.time())
        self._asked = _asked_of(request, totals.job)
        self._called = request.called()
        self._totals = totals
        self._token_bytes = token_bytes
        self._reader = ItemReader()
        self._items: list[answers.OutputItem] = []  # the reader's, as the client knows them
        self._last = OutputDelta("")
        self._num_events = 0

    def begin(self) -> list[bytes]:
        waits = self._stored is not None and self._stored.is_background
        created = self._event("response.created", response=self.so_far("queued" if waits else "in_progress"))
        return [created, self._event("response.in_progress", response=self.so_far())]

    def so_far(self, status: answers.Status = "in_progress") -> answers.ResponseBody:
        """The answer without its output."""
        return self._body(status, [])

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        events = [sent for event in self._read(piece) for sent in self._item_events(event)]
        if piece.finish_reason is not None:
            kind = "incomplete" if piece.finish_reason == "length" else "completed"
            events.append(self._event(f"response.{kind}", response=self._finished(piece)))
        return events

    def add(self, index: int, piece: OutputDelta) -> None:
        self._last = piece
        for _ in self._read(piece):
            pass

    async def whole(self) -> bytes:
        return encode(self._finished(self._last))

    def failure(self, error: ApiError) -> bytes:
        return b"".join(self.failed(error))

    def failed(self, error: ApiError) -> list[bytes]:
        """The events for an error in mid-stream."""
        body = build_error(error).error
        response = self.ended = self._response("failed")
        response.error = answers.Failure(error.code or body.type, error.message)
        failed = self._event("response.failed", response=response)
        if self._stored is not None:  # as who reads it later sees it
            body = ErrorBody(error.message, "server_error", None, response.error.code)
        return [failed, self._error(body)]

    def cancelled(self) -> list[bytes]:
        """The events that end a stream because its client asked for that."""
        self.ended = self._response("cancelled")
        return [self._event("response.incomplete", response=self.ended)]

    def end_as(self, result: bytes) -> list[bytes]:
        """The events that end a stream without its last token. `result`: the whole answer, JSON, and over."""
        told = msgspec.json.decode(result)
        kind = "incomplete" if told["status"] == "cancelled" else told["status"]
        events = [self._event(f"response.{kind}", response=Raw(result))]
        if error := told["error"]:
            events.append(self._error(ErrorBody(error["message"], "server_error", None, error["code"])))
        return events

    def _error(self, body: ErrorBody) -> bytes:
        """OpenAI's clients raise an exception only for its field `error`."""
        return self._event("error", message=body.message, code=body.code, param=body.param, error=body)

    def _read(self, piece: OutputDelta) -> Iterator[ItemEvent]:
        """Yields the events of a piece. An item cut off by the token limit is incomplete."""
        events = self._reader.read(piece)
        for event in events:
            if event.kind == "begun":
                self._items.append(self._new_item(event.item))
            elif event.kind == "ended":
                is_cut_off = piece.finish_reason == "length" and event is events[-1]
                self._fill(event.item, "incomplete" if is_cut_off or not event.item.is_whole else "completed")
            yield event

    def _new_item(self, item: Item) -> answers.OutputItem:
        new_id = blake2b(f"{self.id} {item.index}".encode(), digest_size=24).hexdigest()
        if item.call is None:
            if item.kind == "text":
                return answers.OutputMessage(f"msg_{new_id}", "in_progress", [], phase=item.phase or UNSET)
            return answers.OutputReasoning(f"rs_{new_id}", "in_progress", [])
        called = self._called.get(item.call.name, Called(item.call.name))
        names = (item.call.id, called.name, "", called.namespace or UNSET)
        if called.is_custom:
            return answers.OutputCustomCall(f"ctc_{new_id}", "in_progress", *names)
        return answers.OutputCall(f"fc_{new_id}", "in_progress", *names)

    def _fill(self, item: Item, status: answers.ItemStatus) -> None:
        """Writes what an item has so far into what the client gets."""
        sent = self._items[item.index]
        sent.status = status
        match sent:
            case answers.OutputMessage():
                sent.content = [answers.OutputText(item.content, logprobs=self._logprobs(item.tokens))]
            case answers.OutputReasoning():
                sent.content = [answers.ReasoningText(item.content)]
            case answers.OutputCall():
                sent.arguments = item.content
            case answers.OutputCustomCall():
                sent.input = _custom_input(item)

    def _item_events(self, event: ItemEvent) -> list[bytes]:
        item, sent = event.item, self._items[event.item.index]
        name = _EVENTS[type(sent)]
        place = {"item_id": sent.id, "output_index": item.index, **({} if item.call else {"content_index": 0})}
        if event.kind == "begun":
            events = [self._event("response.output_item.added", output_index=item.index, item=sent)]
            if item.call is None:
                part = answers.OutputText("") if item.kind == "text" else answers.ReasoningText("")
                events.append(self._event("response.content_part.added", **place, part=part))
            return events
        told: dict[str, object] = {}
        if event.kind == "grown":
            if isinstance(sent, answers.OutputCustomCall):  # a text is read from whole arguments
                return []
            if item.kind == "text":
                told["logprobs"] = self._logprobs(event.tokens)
            return [self._event(f"{name}.delta", **place, delta=event.text, **told)]
        match sent:
            case answers.OutputCustomCall():
                events = [self._event(f"{name}.delta", **place, delta=sent.input)]
                events.append(self._event(f"{name}.done", **place, input=sent.input))
            case answers.OutputCall():
                events = [self._event(f"{name}.done", **place, name=sent.name, arguments=sent.arguments)]
            case _:
                (part,) = sent.content
                if isinstance(part, answers.OutputText):
                    told["logprobs"] = part.logprobs
                events = [self._event(f"{name}.done", **place, text=part.text, **told)]
                events.append(self._event("response.content_part.done", **place, part=part))
        return [*events, self._event("response.output_item.done", output_index=item.index, item=sent)]

    def _logprobs(self, tokens: Iterable[ShownToken]) -> list[Raw]:
        logprobs = ChatLogprobs()
        logprobs.extend(tokens, self._token_bytes)
        return logprobs.content

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, sequence_number=number, **fields)

    def _response(self, status: answers.Status) -> answers.ResponseBody:
        for item, sent in zip(self._reader.items, self._items, strict=True):
            if sent.status == "in_progress":  # the answer has failed
                self._fill(item, "incomplete")
        return self._body(status, self._items)

    def _body(self, status: answers.Status, output: list[answers.OutputItem]) -> answers.ResponseBody:
        return answers.ResponseBody(
            id=self.id,
            created_at=self._created_s,
            model=self._totals.job.model,
            status=status,
            output=output,
            background=self._stored is not None and self._stored.is_background,
            previous_response_id=self._previous_id,
            store=self._stored is not None,
            **self._asked,
        )

    def _finished(self, last: OutputDelta) -> answers.ResponseBody | Raw:
        if self._stored is not None and (result := self._stored.find_result()) is not None:
            return Raw(result)
        is_cut_off = last.finish_reason == "length"
        response = self.ended = self._response("incomplete" if is_cut_off else "completed")
        response.incomplete_details = answers.Incomplete() if is_cut_off else None
        response.completed_at = None if is_cut_off else int(time.time())
        totals = self._totals
        response.usage = answers.ResponseUsage(
            totals.num_prompt,
            answers.InputDetails(totals.num_cached),
            totals.num_completion,
            answers.OutputDetails(totals.num_reasoning),
            totals.num_prompt + totals.num_completion,
        )
        return response


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(24)}"


def _custom_input(call: Item) -> str:
    """The text of a custom tool's call, as far as it came; whole arguments that have none as they are."""
    try:
        read = pydantic_core.from_json(call.content, allow_partial=False if call.is_whole else "trailing-strings")
    except ValueError:
        return call.content if call.is_whole else ""
    found = read.get("input") if isinstance(read, dict) else None
    return found if isinstance(found, str) else call.content if call.is_whole else ""
