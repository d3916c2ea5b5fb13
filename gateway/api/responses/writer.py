"""Writes a choice as an answer for clients of OpenAI's Responses API, streamed or whole."""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.answer.choices import Totals
from gateway.answer.output_items import Begun, Ended, Grown, Item, ItemEvent, ItemReader
from gateway.api.http.answer import COMMENT_PING, encode, named_event
from gateway.api.http.body import Body
from gateway.api.http.errors import build_error
from gateway.api.openai.answers import ChatLogprobs, TokenBytes
from gateway.api.responses import answers
from gateway.api.responses.item_types import Called, FunctionTool
from gateway.api.responses.types import ResponsesRequest
from gateway.errors import ApiError
from gateway.request.types import PreparedRequest

_KINDS = {  # kind of item |-> prefix of its ids, and its events
    "text": ("msg", "response.output_text"),
    "reasoning": ("rs", "response.reasoning_text"),
    "call": ("fc", "response.function_call_arguments"),
    "custom": ("ctc", "response.custom_tool_call_input"),
}


@dataclass(slots=True)
class _Sent:
    """An item of the answer, as the client knows it."""

    item: Item
    called: Called | None  # what a call is to the client
    id: str = ""
    status: answers.ItemStatus = "incomplete"  # until it ends

    @property
    def kind(self) -> str:
        return "custom" if self.called and self.called.is_custom else self.item.kind


def _asked_of(request: ResponsesRequest, job: PreparedRequest) -> dict[str, Any]:
    """The fields of a request that its answer repeats."""
    sampling = job.generations[0].sampling
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    choice = request.tool_choice or "auto"
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_told(tool) for tool in request.tools or ()],
        "top_p": sampling.top_p,
    }


def _told(tool: Body) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return {**tool.model_dump(), "strict": bool(tool.strict)}
    return tool.model_dump(by_alias=True, exclude_none=True)


class ResponseWriter:
    """Writes the answer to one request, which has one choice. A failed answer contains the items before the error."""

    done = b""
    ping = COMMENT_PING

    def __init__(self, totals: Totals, request: ResponsesRequest, token_bytes: TokenBytes) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self._created_s = int(time.time())
        self._asked = _asked_of(request, totals.job)
        self._called = request.called()
        self._totals = totals
        self._token_bytes = token_bytes
        self._reader = ItemReader()
        self._items: list[_Sent] = []
        self._last = OutputDelta("")
        self._num_events = 0

    def begin(self) -> list[bytes]:
        begun = self._response("in_progress")
        return [self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        events = [sent for event in self._read(piece) for sent in self._item_events(event)]
        if piece.finish_reason is not None:
            kind = "incomplete" if piece.finish_reason == "length" else "completed"
            events.append(self._event(f"response.{kind}", response=self._finished(piece)))
        return events

    def add(self, index: int, piece: OutputDelta) -> None:
        self._read(piece)
        self._last = piece

    async def whole(self) -> bytes:
        return encode(self._finished(self._last))

    def failure(self, error: ApiError) -> bytes:
        """The events for an error in mid-stream."""
        body = build_error(error).error
        response = self._response("failed")
        response.error = answers.Failure(error.code or body.type, error.message)
        failed = self._event("response.failed", response=response)
        # OpenAI's clients raise an exception only for `error`
        return failed + self._event("error", message=body.message, code=body.code, param=body.param, error=body)

    def _read(self, piece: OutputDelta) -> list[ItemEvent]:
        """Returns the events of a piece. An item cut off by the token limit is incomplete."""
        events = self._reader.read(piece)
        for event in events:
            if isinstance(event, Begun):
                call = event.item.call
                sent = _Sent(event.item, None if call is None else self._called.get(call.name, Called(call.name)))
                sent.id = f"{_KINDS[sent.kind][0]}_{secrets.token_hex(24)}"
                self._items.append(sent)
            elif isinstance(event, Ended):
                is_cut_off = piece.finish_reason == "length" and event is events[-1]
                self._items[event.item.index].status = "incomplete" if is_cut_off else "completed"
        return events

    def _item_events(self, event: ItemEvent) -> list[bytes]:
        item, sent = event.item, self._items[event.item.index]
        name = _KINDS[sent.kind][1]
        place = {"item_id": sent.id, "output_index": item.index, **({} if item.call else {"content_index": 0})}
        if isinstance(event, Begun):
            new = self._item(sent, is_new=True)
            added = self._event("response.output_item.added", output_index=item.index, item=new)
            part = _part(item.kind, "")
            return [added, *([self._event("response.content_part.added", **place, part=part)] if part else [])]
        if isinstance(event, Grown):
            if sent.kind == "custom":  # a text is read from whole arguments
                return []
            return [self._event(f"{name}.delta", **place, delta=event.text, **self._told(item, event.tokens))]
        if sent.kind == "custom":
            text = _custom_input(item.content)
            done = [self._event(f"{name}.delta", **place, delta=text), self._event(f"{name}.done", **place, input=text)]
        elif sent.called is not None:
            done = [self._event(f"{name}.done", **place, name=sent.called.name, arguments=item.content)]
        else:
            part = _part(item.kind, item.content, self._logprobs(item.tokens))
            done = [
                self._event(f"{name}.done", **place, text=item.content, **self._told(item, item.tokens)),
                self._event("response.content_part.done", **place, part=part),
            ]
        return [*done, self._event("response.output_item.done", output_index=item.index, item=self._item(sent))]

    def _event(self, kind: str, **fields: object) -> bytes:
        self._num_events += 1
        return named_event(kind, sequence_number=self._num_events - 1, **fields)

    def _item(self, sent: _Sent, *, is_new: bool = False) -> answers.OutputItem:
        """An item so far; a new one is empty."""
        item, status = sent.item, sent.status
        if is_new:
            status = "in_progress"
        if item.call is not None and sent.called is not None:
            called, content = sent.called, "" if is_new else item.content
            if called.is_custom:
                content = _custom_input(content)
            kind = answers.OutputCustomCall if called.is_custom else answers.OutputCall
            return kind(sent.id, status, item.call.id, called.name, content, called.namespace or UNSET)
        if item.kind == "reasoning":
            return answers.OutputReasoning(sent.id, status, [] if is_new else [answers.ReasoningText(item.content)])
        text = answers.OutputText(item.content, logprobs=self._logprobs(item.tokens))
        return answers.OutputMessage(sent.id, status, [] if is_new else [text])

    def _told(self, item: Item, tokens: Iterable[ShownToken]) -> dict[str, object]:
        return {"logprobs": self._logprobs(tokens)} if item.kind == "text" else {}

    def _logprobs(self, tokens: Iterable[ShownToken]) -> list[Raw]:
        logprobs = ChatLogprobs()
        logprobs.extend(tokens, self._token_bytes)
        return logprobs.content

    def _response(self, status: answers.Status) -> answers.ResponseBody:
        return answers.ResponseBody(
            id=self.id,
            created_at=self._created_s,
            model=self._totals.job.model,
            status=status,
            output=[self._item(sent) for sent in self._items],
            **self._asked,
        )

    def _finished(self, last: OutputDelta) -> answers.ResponseBody:
        is_cut_off = last.finish_reason == "length"
        response = self._response("incomplete" if is_cut_off else "completed")
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


def _part(kind: str, content: str, logprobs: Iterable[Raw] = ()) -> answers.OutputText | answers.ReasoningText | None:
    """The part of an item; a call has none."""
    if kind == "text":
        return answers.OutputText(content, logprobs=tuple(logprobs))
    return answers.ReasoningText(content) if kind == "reasoning" else None


def _custom_input(arguments: str) -> str:
    """The text of a custom tool's call; arguments that have none as they are."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any]).get("input")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, str) else arguments
