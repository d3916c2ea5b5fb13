"""Writes a choice as an answer for clients of OpenAI's Responses API, streamed or whole. Must not know HTTP."""

import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.answer.choices import Totals
from gateway.answer.output_items import Begun, Ended, Grown, Item, ItemEvent, ItemReader
from gateway.api.http.body import Body
from gateway.api.http.errors import build_error
from gateway.api.http.json_answer import encode
from gateway.api.http.sse import COMMENT_PING, named_event
from gateway.api.openai.logprobs import ChatLogprobs, TokenBytes
from gateway.api.responses.answers import (
    Asked,
    Failure,
    Incomplete,
    InputDetails,
    ItemStatus,
    OutputCall,
    OutputCustomCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseBody,
    ResponseUsage,
    Status,
)
from gateway.api.responses.tool_types import Called, CalledByName, FunctionTool, custom_input
from gateway.api.responses.types import ResponsesRequest
from gateway.errors import ApiError
from gateway.request.types import PreparedRequest
from gateway.tools.parse import CallBegin

_ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_GROWN = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def asked_of(request: ResponsesRequest, job: PreparedRequest) -> Asked:
    """The fields of a request that its answer repeats."""
    sampling = job.generations[0].sampling
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    choice = request.tool_choice or "auto"
    return Asked(
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=sampling.temperature,
        text={"format": {"type": "text"}} | text,
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[_told(tool) for tool in request.tools or ()],
        top_p=sampling.top_p,
    )


def _told(tool: Body) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return {**tool.model_dump(), "strict": bool(tool.strict)}
    return tool.model_dump(by_alias=True, exclude_none=True)


class ResponseWriter:
    """Writes the answer to one request, which has one choice. A failed answer contains the items before the error."""

    done = b""
    ping = COMMENT_PING

    def __init__(self, totals: Totals, asked: Asked, called: CalledByName, token_bytes: TokenBytes) -> None:
        """`called`: tools that the model knows under other names."""
        self.id = f"resp_{secrets.token_hex(24)}"
        self._created_s = int(time.time())
        self._asked = asked
        self._called = called
        self._totals = totals
        self._token_bytes = token_bytes
        self._reader = ItemReader()
        self._item_ids: list[str] = []
        self._statuses: list[ItemStatus] = []  # of the finished items
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
        response.error = Failure(error.code or body.type, error.message)
        failed = self._event("response.failed", response=response)
        # OpenAI's clients raise an exception only for `error`
        return failed + self._event("error", message=body.message, code=body.code, param=body.param, error=body)

    def _read(self, piece: OutputDelta) -> list[ItemEvent]:
        """Returns the events of a piece. An item cut off by the token limit is incomplete."""
        events = self._reader.read(piece)
        for event in events:
            if isinstance(event, Begun):
                prefix = "ctc" if self._is_custom(event.item) else _ID_PREFIXES[event.item.kind]
                self._item_ids.append(f"{prefix}_{secrets.token_hex(24)}")
            elif isinstance(event, Ended):
                is_cut_off = piece.finish_reason == "length" and event is events[-1]
                self._statuses.append("incomplete" if is_cut_off else "completed")
        return events

    def _item_events(self, event: ItemEvent) -> list[bytes]:
        item = event.item
        place = {"item_id": self._item_ids[item.index], "output_index": item.index}
        part_place = place if item.kind == "call" else {**place, "content_index": 0}
        match event:
            case Begun():
                added = self._event(
                    "response.output_item.added", output_index=item.index, item=self._item(item, is_new=True)
                )
                part = _part(item.kind, "")
                begin = "response.content_part.added"
                return [added] if part is None else [added, self._event(begin, **part_place, part=part)]
            case Grown() if self._is_custom(item):  # a text is read from whole arguments
                return []
            case Grown():
                logprobs = {"logprobs": self._logprobs(event.tokens)} if item.kind == "text" else {}
                return [self._event(f"{_GROWN[item.kind]}.delta", **part_place, delta=event.text, **logprobs)]
        return self._done_events(item, part_place)

    def _done_events(self, item: Item, place: dict[str, object]) -> list[bytes]:
        content = item.content
        if self._is_custom(item):
            kind, text = "response.custom_tool_call_input", custom_input(content)
            done = [self._event(f"{kind}.delta", **place, delta=text), self._event(f"{kind}.done", **place, input=text)]
        elif item.call is not None:
            done = [
                self._event(
                    f"{_GROWN[item.kind]}.done", **place, name=self._called_by(item.call).name, arguments=content
                )
            ]
        else:
            logprobs = {"logprobs": self._logprobs(item.tokens)} if item.kind == "text" else {}
            part = _part(item.kind, content, self._logprobs(item.tokens))
            done = [
                self._event(f"{_GROWN[item.kind]}.done", **place, text=content, **logprobs),
                self._event("response.content_part.done", **place, part=part),
            ]
        return [*done, self._event("response.output_item.done", output_index=item.index, item=self._item(item))]

    def _event(self, kind: str, **fields: object) -> bytes:
        self._num_events += 1
        return named_event(kind, sequence_number=self._num_events - 1, **fields)

    def _item(self, item: Item, *, is_new: bool = False) -> OutputItem:
        """An item so far: an unfinished one is incomplete, a new one empty."""
        item_id, status = self._item_ids[item.index], self._status(item)
        if is_new:
            status = "in_progress"
        if item.call is not None:
            called, content = self._called_by(item.call), "" if is_new else item.content
            if called.is_custom:
                content = custom_input(content)
            kind = OutputCustomCall if called.is_custom else OutputCall
            return kind(item_id, status, item.call.id, called.name, content, called.namespace or UNSET)
        if item.kind == "reasoning":
            return OutputReasoning(item_id, status, [] if is_new else [ReasoningText(item.content)])
        text = OutputText(item.content, logprobs=self._logprobs(item.tokens))
        return OutputMessage(item_id, status, [] if is_new else [text])

    def _called_by(self, call: CallBegin) -> Called:
        return self._called.get(call.name) or Called(call.name)

    def _is_custom(self, item: Item) -> bool:
        return item.call is not None and self._called_by(item.call).is_custom

    def _status(self, item: Item) -> ItemStatus:
        return self._statuses[item.index] if item.index < len(self._statuses) else "incomplete"

    def _logprobs(self, tokens: Iterable[ShownToken]) -> list[Raw]:
        logprobs = ChatLogprobs()
        logprobs.extend(tokens, self._token_bytes)
        return logprobs.content

    def _response(self, status: Status) -> ResponseBody:
        return ResponseBody(
            id=self.id,
            created_at=self._created_s,
            model=self._totals.job.model,
            status=status,
            output=[self._item(item) for item in self._reader.items],
            **msgspec.structs.asdict(self._asked),
        )

    def _finished(self, last: OutputDelta) -> ResponseBody:
        is_cut_off = last.finish_reason == "length"
        response = self._response("incomplete" if is_cut_off else "completed")
        response.incomplete_details = Incomplete() if is_cut_off else None
        response.completed_at = None if is_cut_off else int(time.time())
        totals = self._totals
        response.usage = ResponseUsage(
            totals.num_prompt,
            InputDetails(totals.num_cached),
            totals.num_completion,
            OutputDetails(totals.num_reasoning),
            totals.num_prompt + totals.num_completion,
        )
        return response


def _part(kind: str, content: str, logprobs: list[Raw] | None = None) -> OutputText | ReasoningText | None:
    """The part of an item; a call has none."""
    if kind == "text":
        return OutputText(content, logprobs=logprobs or ())
    return ReasoningText(content) if kind == "reasoning" else None
