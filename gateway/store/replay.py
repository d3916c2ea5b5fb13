"""Answers made again from the store: their requests, their conversations, and their events."""

import time
from asyncio import Event, sleep
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from gateway.access.allowance import Allowance
from gateway.access.keys import Key
from gateway.answer.choices import Totals, stream_choices
from gateway.api.access import unique_id
from gateway.api.http.answer import Events, Stored
from gateway.api.responses.types import CountInputRequest, ResponsesRequest
from gateway.errors import ApiError, bad_request, overloaded
from gateway.metrics import RequestMetrics
from gateway.request.prepare import ServedModels
from gateway.request.types import PreparedRequest
from gateway.router.engine_client import Tokens
from gateway.shares import Shared
from gateway.store.database import RUNNING, Answer, Database
from gateway.store.kinds import Place, Prepared, read_request
from gateway.store.line import Line
from gateway.store.run import AT_ONCE, ChoiceTokens, find_end, singly
from gateway.store.tail import EndedError, StoredTokens, Tail

MAX_TURNS = 1000  # of a conversation
MAX_FOLLOWERS = 200  # streams that are read from the store
PATIENCE_S, LOOK_S = 1.0, 0.1  # for the end of an answer that another gateway writes just now

SomeBody = TypeVar("SomeBody", bound=CountInputRequest)


class Asked(msgspec.Struct):
    """How to compute an answer again, besides its request."""

    request_id: str  # ids of its calls follow from it
    seeds: list[int]  # by choice
    digest: bytes  # of its prompts
    is_background: bool
    is_streamed: bool

    @property
    def is_kept(self) -> bool:
        """Whether its client knows its id before its end, and may read it anywhere."""
        return self.is_background or self.is_streamed


class CannotGoOnError(ApiError):
    """An answer cannot be computed again, now or later."""


class Replays:
    """Reads the store for all that is to be made again. Lives on the asyncio thread."""

    def __init__(self, served: ServedModels, reads: Line) -> None:
        self._served, self._reads = served, reads
        self._tail = Tail(reads)
        self._followers = Shared(MAX_FOLLOWERS)
        self._metrics = RequestMetrics(CollectorRegistry(), 0.0)  # of answers that are only read: not exported

    async def find_history(self, answer_id: str, key: Key, *, waits: bool) -> list[Answer]:
        """The conversation that ends with an answer. `waits`: another gateway may be writing it. Raises ApiError."""
        name, until = "previous_response_id", time.monotonic() + (PATIENCE_S if waits else 0.0)
        while True:
            history = await self._reads.ask(Database.find_history, answer_id, key.owner, MAX_TURNS)
            if (history and history[-1].status not in RUNNING) or time.monotonic() >= until:
                break
            await sleep(LOOK_S)
        if not history:
            raise unknown_history(answer_id)
        if history[0].previous:
            why = f"the answer {history[0].previous} before it was deleted, or {MAX_TURNS} turns are exceeded"
            raise bad_request(f"the conversation of {name} is not whole: {why}; send it as input", name)
        if history[-1].status in RUNNING:
            raise bad_request(f"the answer {answer_id} is not over; wait until it is", name)
        return history

    async def join(self, body: SomeBody, history: Sequence[Answer], key: Key) -> SomeBody:
        """The request with the whole conversation as its input. Raises ApiError."""
        most = self._served.options.max_body_bytes
        num_bytes = sum(len(answer.body) + len(answer.result) for answer in history)
        if num_bytes > most:
            why = f"the conversation of previous_response_id has {num_bytes} bytes; at most {most} are read"
            raise bad_request(f"{why}: begin a new one, or raise --body-limit-bytes", "previous_response_id")
        items: list[Any] = []
        turn = self._served.new_turn(key.name, num_bytes)
        try:
            for answer in history:
                await turn.step()
                items += as_items(msgspec.json.decode(answer.body).get("input"))
                items += msgspec.json.decode(answer.result)["output"]
            await turn.step()
            whole = body.model_dump(by_alias=True, exclude_unset=True)
            await turn.last_step()
            joined = type(body).model_validate(whole | {"input": [*items, *as_items(whole["input"])]})
            joined.continue_from(history[0].id)
            return joined
        finally:
            turn.end()

    async def prepare(self, answer: Answer, asked: Asked, kept: Sequence[ChoiceTokens] = ()) -> Prepared:
        """The request of an answer as it was first prepared, and then what is `kept`. Raises ApiError."""
        key = self._served.keys.find_owner(answer.owner)
        if key is None:
            raise CannotGoOnError(403, "the key that asked for this answer is no longer accepted", None, "key_gone")
        key = replace(key, allowance=Allowance())  # it has paid
        turn = self._served.new_turn(key.name, len(answer.body))
        try:
            await turn.last_step()
            body = read_request(answer.kind, answer.body)
        finally:
            turn.end()
        if isinstance(body, ResponsesRequest) and answer.previous:
            history = await self.find_history(answer.previous, key, waits=False)
            body = await self.join(body, history, key)
        one = self._served.find(body.model, key)
        raw = replace(body.raw(), deadline_ms=None, num_prompt_logprobs=None)  # which streams do not have
        job = await one.prepare(raw, unique_id(asked.request_id.rpartition(".")[0]), time.perf_counter(), key)
        if digest_of(job) != asked.digest:
            why = "the prompt of this answer is read in another way now: its model, template or an image has changed"
            raise CannotGoOnError(409, f"{why}; ask again", None, "prompt_changed")
        generations = [
            replace(each, sampling=replace(each.sampling, seed=seed))
            for each, seed in zip(job.generations, asked.seeds, strict=True)
        ]
        if kept:
            pairs = list(zip(generations, kept, strict=True))
            for each, choice in pairs:
                if len(choice.ids) >= each.max_tokens:  # its gateway may have died before the end was stored
                    choice.finish = choice.finish or "length"
            generations = [replace(each, emitted=tuple(had.ids), computes=answer.computes) for each, had in pairs]
        job = replace(job, generations=tuple(generations), call_seed=asked.request_id)
        return Prepared(body, raw, one, Totals(job, time.perf_counter()))

    async def read(self, answer: Answer, place: Place) -> Events:
        """Events of an answer in the store that a client lacks, those that other gateways add as well."""
        place.begin_again()
        owner = answer.owner if self._served.keys.are_several else ""
        if not self._followers.has_room(owner):
            raise overloaded(f"of {MAX_FOLLOWERS} streams that are read from the store your key has its share")
        with self._followers.held(owner):
            async with aclosing(self._read_all(answer, place)) as parts:
                async for shown in parts:
                    if shown:
                        yield shown

    async def _read_all(self, answer: Answer, place: Place) -> Events:
        """Yields the same events; some are empty."""
        asked = msgspec.msgpack.decode(answer.asked, type=Asked)
        prepared, tokens = await self.prepare(answer, asked), StoredTokens(self._tail, answer)
        totals = prepared.totals
        reader = replace(prepared.served, ring=tokens, metrics=self._metrics, waiting=Shared(1 << 30))
        stored = Stored(answer.id, answer.created_s, asked.is_background, lambda: tokens.result)
        writer = prepared.new_writer(stored)
        stops, num_read = iter([each.stop_token_ids for each in totals.job.generations]), 0
        open_choices = _OpenChoices(len(totals.job.generations))
        last = writer.begin()
        yield place.take(last)
        pieces = stream_choices(
            reader, totals, lambda stream: open_choices.split(stream, next(stops)), is_whole=not asked.is_kept
        )
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    events = writer.events(index, piece)
                    last = events or last
                    yield place.take(events)
                    if (num_read := num_read + 1) % AT_ONCE == 0:
                        await sleep(0)  # others have their turn
            yield place.take_end(find_end(last)) + writer.end
        except EndedError as ended:
            last = writer.end_as(ended.result)
            yield place.take(last) + place.take_end(last)


class _OpenChoices:
    """Choices of an answer that is read. One that has no end says so when all tokens of the others have been read."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._are_read = Event()

    async def split(
        self, stream: AsyncGenerator[Tokens, None], stop_token_ids: frozenset[int]
    ) -> AsyncGenerator[Tokens, None]:
        """Yields a choice's tokens one by one."""
        failure: EndedError | None = None
        try:
            async with aclosing(stream):
                async for tokens in stream:
                    for one in singly(tokens, stop_token_ids):
                        yield one
        except EndedError as error:
            failure = error
        finally:
            self._number -= 1
            if not self._number:
                self._are_read.set()
        if failure is not None:
            await self._are_read.wait()
            raise failure


def digest_of(job: PreparedRequest) -> bytes:
    """A digest of all that workers get of a job's prompts."""
    digest = blake2b(digest_size=16)
    for prompt in job.prompts:
        digest.update(np.array(prompt.ids, np.int32).tobytes())
        for image in prompt.images:
            digest.update(image.span.digest)
    return digest.digest()


def unknown_history(answer_id: str) -> ApiError:
    why = f"no answer has the id {answer_id[:100]}"
    return ApiError(404, why, "previous_response_id", "previous_response_not_found")


def as_items(given: Any) -> list[Any]:
    """A request's input as a list."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
