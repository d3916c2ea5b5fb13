"""The APIs whose answers are stored: how their requests are read, and what writes their events."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from msgspec import Raw

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals
from gateway.api.http.answer import Stored, data_event, encode, named_event
from gateway.api.http.errors import ErrorBody, build_error
from gateway.api.openai.types import ChatCompletionRequest
from gateway.api.openai.writer import AnswerWriter, new_completion_id
from gateway.api.responses.types import ResponsesRequest
from gateway.api.responses.writer import ResponseWriter, new_response_id
from gateway.errors import ApiError, bad_request
from gateway.request.prepare import ServedModel
from gateway.request.types import GenerateRequest
from gateway.store.database import RUNNING, Answer, Status

Kind = Literal["responses", "chat"]
StoredRequest = ResponsesRequest | ChatCompletionRequest
Event = tuple[int, bytes]  # its choice, or how many there are if it belongs to none; and what is sent, without an id
_NUMBERS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")


class StoredWriter(Protocol):
    """Writes the events of a stored answer: those of one choice follow from its tokens alone."""

    end: bytes  # after the events of an answer that ended well

    @property
    def ended(self) -> tuple[Status, bytes] | None:
        """The status and the whole answer, as JSON, once it has ended; None before."""

    def begin(self) -> list[Event]:
        """Events that need no piece yet."""

    def events(self, index: int, piece: OutputDelta) -> list[Event]:
        """Events for a piece of a choice."""

    def failed(self, error: ApiError) -> list[Event]:
        """The events that end it after an error."""

    def cancelled(self) -> list[Event]:
        """The events that end it because its client asked for that, or left."""

    def end_as(self, result: bytes) -> list[Event]:
        """The events that end it without its last token. `result`: the whole answer, JSON, and over."""

    def so_far(self, status: Status) -> bytes:
        """The answer without its output, JSON."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request of a stored answer, ready to be computed or read."""

    body: StoredRequest
    raw: GenerateRequest
    served: ServedModel
    totals: Totals

    def new_writer(self, stored: Stored) -> StoredWriter:
        if isinstance(self.body, ResponsesRequest):
            return _ResponseEvents(ResponseWriter(self.totals, self.body, self.served.tokenizer.token_bytes, stored))
        usage = self.body.streamed_usage
        writer = AnswerWriter(self.totals, self.raw, usage, self.served.tokenizer.token_bytes, stored)
        return _ChatEvents(writer, stored, len(self.totals.job.generations))


class Place:
    """How far a client has read a stream: so many events of each choice, and of those that belong to none.

    Choices may have been merged in another order where it was read before, but each one's events are the same ones.
    """

    def __init__(self, counts: Sequence[int], *, begins_at: int = 1) -> None:
        """`begins_at`: number of a choice's first event."""
        self._counts, self._before = list(counts), begins_at - 1
        self.begin_again()

    def begin_again(self) -> None:
        """Starts over: the next events that are taken are the first of all."""
        self._num_passed = [0] * len(self._counts)

    def take(self, events: Sequence[Event]) -> bytes:
        """The events that the client lacks, each with the numbers of the last events that it then has."""
        shown: list[bytes] = []
        for choice, event in events:
            self._num_passed[choice] += 1
            if self._num_passed[choice] > self._counts[choice]:
                self._counts[choice] += 1
                numbers = ",".join([str(count + self._before) for count in self._counts])
                while numbers.endswith(",0"):
                    numbers = numbers[:-2]
                shown += (b"id: %b\n" % numbers.encode(), event)
        return b"".join(shown)

    def take_end(self, events: Sequence[Event]) -> bytes:
        """The last events, just taken, again for a client that has had more than there is.

        Another gateway may have sent more of an answer that then failed.
        """
        if all(had <= passed for had, passed in zip(self._counts, self._num_passed, strict=True)):
            return b""
        for choice, _ in events:
            self._num_passed[choice] -= 1
            self._counts[choice] = min(self._counts[choice], self._num_passed[choice])
        return self.take(events)


class _ResponseEvents:
    """Events of the Responses API: one choice, numbers in the events themselves."""

    end = ResponseWriter.done

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    @property
    def ended(self) -> tuple[Status, bytes] | None:
        whole = self._writer.ended
        return (whole.status, encode(whole)) if whole else None

    def begin(self) -> list[Event]:
        return _of_first(self._writer.begin())

    def events(self, index: int, piece: OutputDelta) -> list[Event]:
        return _of_first(self._writer.events(index, piece))

    def failed(self, error: ApiError) -> list[Event]:
        return _of_first(self._writer.failed(error))

    def cancelled(self) -> list[Event]:
        return _of_first(self._writer.cancelled())

    def end_as(self, result: bytes) -> list[Event]:
        return _of_first(self._writer.end_as(result))

    def so_far(self, status: Status) -> bytes:
        return encode(self._writer.so_far(status))


class _ChatEvents:
    """Events of chats."""

    end = AnswerWriter.end

    def __init__(self, writer: AnswerWriter, stored: Stored, num_choices: int) -> None:
        self._writer, self._stored, self._no_choice = writer, stored, num_choices
        self._choices = [Raw(b"null")] * num_choices  # those that have ended are whole
        self._num_open = num_choices
        self.ended: tuple[Status, bytes] | None = None

    def begin(self) -> list[Event]:
        return list(enumerate(self._writer.begin()))

    def events(self, index: int, piece: OutputDelta) -> list[Event]:
        events = [(index, event) for event in self._writer.events(index, piece)]
        is_known = self._stored.find_result() is not None  # the whole answer
        if not is_known:
            self._writer.add(index, piece)
        if piece.finish_reason is not None:
            self._num_open -= 1
            if not is_known:
                self._choices[index] = self._writer.whole_choice(index)
            if not self._num_open and (usage := self._writer.usage()):
                events.append((self._no_choice, usage))
            if not (self._num_open or is_known):
                self.ended = "completed", self._writer.join(self._choices)
        return events

    def failed(self, error: ApiError) -> list[Event]:
        result = encode(build_error(error))
        self.ended = "failed", result
        return self.end_as(result)

    def cancelled(self) -> list[Event]:
        error = ApiError(404, f"the client of {self._writer.id} left before its end", None, "cancelled")
        result = encode(build_error(error))
        self.ended = "cancelled", result
        return self.end_as(result)

    def end_as(self, result: bytes) -> list[Event]:
        return [(self._no_choice, data_event(result))]

    def so_far(self, status: Status) -> bytes:
        return self._writer.join([])


def _of_first(events: Sequence[bytes]) -> list[Event]:
    return [(0, event) for event in events]


def find_kind(body: StoredRequest) -> Kind:
    return "responses" if isinstance(body, ResponsesRequest) else "chat"


def new_id(kind: Kind) -> str:
    return new_response_id() if kind == "responses" else new_completion_id(is_chat=True)


def read_request(kind: str, body: bytes) -> StoredRequest:
    """A stored request."""
    if kind == "responses":
        return ResponsesRequest.model_validate_json(body)
    return ChatCompletionRequest.model_validate_json(body)


def failed_result(kind: str, result: bytes, error: ApiError) -> bytes:
    """A whole answer that failed, in place of what there was of it."""
    if kind != "responses":
        return encode(build_error(error))
    told = {"code": error.code or "server_error", "message": error.message}
    return encode(msgspec.json.decode(result) | {"status": "failed", "error": told})


def trouble(kind: str, error: ApiError) -> bytes:
    """The event for an error of reading an answer, which may go on."""
    if kind == "responses":
        return named_event("error", message=error.message, code=error.code, param=error.param)
    return data_event(encode(build_error(error)))


def show(answer: Answer) -> bytes:
    """The answer as its client sees it, JSON. Raises ApiError for a chat that is not over, or has failed."""
    if answer.kind == "responses":
        return answer.result
    if answer.status in RUNNING:
        why = "it is not over: read it with stream=true, or ask again later"
        raise ApiError(409, f"the completion {answer.id} cannot be read as a whole yet; {why}", None, "not_over")
    result = msgspec.json.decode(answer.result, type=dict[str, Raw])
    if answer.status != "completed":
        error = msgspec.json.decode(result["error"], type=ErrorBody)
        raise ApiError(500, f"the completion {answer.id} has no end: {error.message}", None, error.code)
    return encode(result | {"metadata": Raw(answer.labels.encode())})


def find_place(kind: Kind, num_choices: int, after: str = "") -> Place:
    """Behind the event with the SSE id `after`; at the beginning if that is empty. Raises ApiError 400."""
    if after and not _NUMBERS.fullmatch(after):
        raise bad_request(f"starting_after is {after[:40]!r}; give the id of an event", "starting_after")
    given = [int(number) for number in after.split(",")] if after else []
    if kind == "responses":
        if len(given) > 1:
            raise bad_request("starting_after is one number", "starting_after")
        return Place([number + 1 for number in given] or [0], begins_at=0)
    if len(given) > num_choices + 1:
        raise bad_request(f"starting_after has {len(given)} numbers; {num_choices + 1} is the most", "starting_after")
    return Place(given + [0] * (num_choices + 1 - len(given)))
