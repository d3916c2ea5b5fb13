"""Keeps answers of the Responses API: computes them though nobody may listen, writes them behind, takes over those of
gateways that died, and reads them back."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.access.allowance import Allowance
from gateway.access.keys import Key
from gateway.answer.choices import HOLD_CHOICES, Totals, begin, stream_choices
from gateway.api.access import unique_id, warning_headers
from gateway.api.http.answer import (
    COMMENT_PING,
    HOLD_S,
    PING_S,
    Events,
    EventStream,
    encode,
    json_response,
    named_event,
    until_disconnect,
    while_connected,
)
from gateway.api.responses.types import CountInputRequest, ResponsesRequest
from gateway.api.responses.writer import ResponseWriter, Stored, new_response_id
from gateway.api.routes import answer_once
from gateway.errors import ApiError, bad_request
from gateway.metrics import RequestMetrics
from gateway.request.prepare import ServedModel, ServedModels
from gateway.request.types import PreparedRequest
from gateway.router.engine_client import Tokens
from gateway.shares import Shared
from gateway.store.database import RUNNING, Answer, Change, Database, Status, StoreError
from gateway.store.line import Line, unavailable
from gateway.store.run import ChoiceTokens, Run, join_parts, singly
from gateway.store.tail import EndedError, StoredTokens
from runtime.tasks import keep_running

_log = structlog.get_logger()

WRITE_S = 0.2  # what was generated is in the store so soon
LOOK_S = 1.0  # between two looks at leases; --state-lease-s is longer
CLEAN_S = 60.0
MOST_TAKEN = 16  # answers at once, of gateways that died
MAX_TURNS = 1000  # of a conversation

Asked_ = TypeVar("Asked_", bound=CountInputRequest)


class Asked(msgspec.Struct):
    """How to compute an answer again, besides its request."""

    request_id: str  # ids of its calls follow from it
    seeds: list[int]  # by choice
    digest: bytes  # of its prompts
    is_background: bool
    is_streamed: bool


class AnswerKeeper:
    """Owns the answers that this gateway computes and keeps. Lives on the asyncio thread."""

    def __init__(
        self, served: ServedModels, place: str | Path, *, ttl_s: float, max_bytes: int, lease_s: float
    ) -> None:
        """`place`: as in Database. `lease_s`: how long others wait for a sign of this gateway."""
        self._served, self._ttl_s, self._max_bytes, self._lease_s = served, ttl_s, max_bytes, lease_s
        self._writes, self._reads = Line(place, "store-write"), Line(place, "store-read")
        self.id = new_response_id().replace("resp_", "gateway_")
        self._runs: dict[str, Run] = {}
        self._num_others = 0  # gateways with the same store
        self._is_draining = False
        self._writing = asyncio.Lock()
        self._due = asyncio.Event()
        self._failed_since: float | None = None  # when the store last began to fail
        self._tasks: list[asyncio.Task[None]] = []
        self._taking = set[asyncio.Task[None]]()  # over what others leave
        self._metrics = RequestMetrics(CollectorRegistry(), 0.0)  # of answers that are only read: nobody's

    async def start(self) -> None:
        """Raises StoreError if the store cannot be used."""
        await self._reads.call(Database.find, "")
        follow = {"writing answers": self._write, "keeping leases": self._hold, "deleting old answers": self._clean}
        self._tasks = [asyncio.create_task(keep_running(work, name)) for name, work in follow.items()]

    async def drain(self) -> None:
        """Another gateway goes on with the answers, if there is one."""
        self._is_draining = True
        if self._num_others:
            await self.let_go()

    async def close(self) -> None:
        await self.let_go()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writes.close()
        self._reads.close()

    async def let_go(self) -> None:
        """Whoever comes goes on with the answers; clients may read here meanwhile what they write. Idempotent."""
        runs = [run for run in self._runs.values() if not run.is_over]
        await asyncio.gather(*(run.pause() for run in runs))
        with suppress(StoreError):
            await self._save()
            await self._writes.call(Database.release, self.id)
        for run in runs:
            await run.stop(is_lost=True)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """As Keeper."""
        is_line = hasattr(request.state, HOLD_CHOICES)  # of a batch: its file has the answer
        if body.store is False or is_line:
            if body.background:
                raise bad_request("background needs store: an answer that is not kept cannot be read later", "store")
            return await answer_once(self._served, await self.with_history(body, request), request)
        whole, state = await self.with_history(body, request), request.state
        one = self._served.find(whole.model, state.key)
        await state.turn.step()
        raw = whole.raw()
        await state.turn.last_step()
        request_id = unique_id(state.request_id)
        beginning = begin(one, raw, request_id, state.arrived_s, state.key, request.headers.items)
        totals = await while_connected(request, raw, beginning)
        job, is_background = totals.job, bool(body.background)
        asked = Asked(
            request_id, [each.sampling.seed for each in job.generations], _digest(job), is_background, bool(body.stream)
        )
        stored = Stored(new_response_id(), int(time.time()), is_background)
        writer = ResponseWriter(totals, whole, one.tokenizer.token_bytes, stored)
        status: Status = "queued" if is_background else "in_progress"
        answer = Answer(
            stored.id, "responses", state.key.owner, body.model, body.previous_response_id or "", stored.created_s,
            msgspec.msgpack.encode(asked), body.model_dump_json(by_alias=True, exclude_unset=True).encode(), status,
            encode(writer.so_far(status)),
        )  # fmt: skip
        kept = [ChoiceTokens() for _ in job.generations]
        run = Run(answer, one, totals, writer, kept, self._due.set, is_new=True, is_waited_for=not is_background)
        if totals.trace is not None:
            totals.trace.note({"gen_ai.response.id": answer.id})
        self._runs[answer.id] = run
        if is_background:
            try:
                await self._save()
                if run.is_new:
                    raise StoreError("the store of answers did not take the request")
            except StoreError as error:
                del self._runs[answer.id]
                raise unavailable(error) from error
        run.start()
        self._due.set()  # others are to know it before its client does
        if body.stream:
            has_grammar = any(each.grammar for each in job.generations)
            hold_s = 0.0 if is_background else PING_S if has_grammar else HOLD_S
            adapter = job.generations[0].adapter
            frame = _Frame(run.log[: run.num_begun])
            return EventStream(
                self._follow(run, run.num_begun), frame, hold_s, lambda: one.ring.can_serve(adapter), totals.warnings
            )
        if not is_background:
            try:
                await until_disconnect(request.receive, run.wait())
            except ClientDisconnect:
                await run.stop()  # nobody knows its id
                raise
            if run.error is not None:
                raise run.error
            if run.is_lost:
                raise ApiError(503, f"another gateway computes the answer {answer.id}: ask there", None, "moved")
        response = json_response(answer.result)
        response.headers.update(warning_headers(totals.warnings()))
        return response

    async def with_history(self, body: Asked_, request: Request) -> Asked_:
        """As Keeper."""
        if body.previous_response_id is None:
            return body
        history = await self._find_history(body.previous_response_id, request.state.key)
        await request.state.turn.step()
        return _join(body, history, self._served.options.max_body_bytes)

    async def _find_history(self, answer_id: str, key: Key) -> list[Answer]:
        """The conversation that ends with an answer. Raises ApiError."""
        await self._save_one(answer_id)
        try:
            history = await self._reads.call(Database.find_history, answer_id, key.owner, MAX_TURNS)
        except StoreError as error:
            raise unavailable(error) from error
        name = "previous_response_id"
        if not history:
            raise ApiError(404, f"no answer has the id {answer_id[:100]}", name, "previous_response_not_found")
        if history[0].previous:
            why = f"the answer {history[0].previous} before it was deleted, or {MAX_TURNS} turns are exceeded"
            raise bad_request(f"the conversation of {name} is not whole: {why}; send it as input", name)
        if history[-1].status in RUNNING:
            raise bad_request(f"the answer {answer_id} is not over; wait until it is", name)
        return history

    async def find(self, answer_id: str, key: Key) -> Answer:
        """The answer, as far as it is known here or in the store. Raises ApiError 404 unless it is the key's own."""
        run = self._runs.get(answer_id)
        answer: Answer | None
        if run is not None and not run.is_lost:
            answer = run.answer
        else:
            try:
                answer = await self._reads.call(Database.find, answer_id)
            except StoreError as error:
                raise unavailable(error) from error
        if answer is None or answer.owner != key.owner:
            raise ApiError(404, f"no answer has the id {answer_id[:100]}", "response_id", "not_found")
        return answer

    async def events(self, answer_id: str, key: Key, begin: int) -> Response:
        """The answer's events from number `begin` on, those to come as well. Raises ApiError."""
        answer = await self.find(answer_id, key)
        run = self._runs.get(answer_id)
        events = self._read(answer, begin) if run is None else self._follow(run, begin)
        return EventStream(events, _Frame(), 0.0, lambda: True, tuple)

    async def cancel(self, answer_id: str, key: Key) -> bytes:
        """Ends a background answer; returns what there is of it. No effect on one that is over. Raises ApiError."""
        answer = await self.find(answer_id, key)
        if not msgspec.msgpack.decode(answer.asked, type=Asked).is_background:
            raise bad_request("only answers with background can be cancelled; close the others' connection", None)
        run = self._runs.get(answer_id)
        if run is not None and not run.is_lost:
            await run.stop()
            return run.answer.result
        try:
            await self._reads.call(Database.ask_cancel, answer_id)
        except StoreError as error:
            raise unavailable(error) from error
        until = time.monotonic() + self._lease_s + 3 * LOOK_S
        while answer.status in RUNNING and time.monotonic() < until:
            await asyncio.sleep(LOOK_S / 4)
            answer = await self.find(answer_id, key)
        return answer.result

    async def delete(self, answer_id: str, key: Key) -> None:
        """Raises ApiError."""
        await self.find(answer_id, key)
        run = self._runs.pop(answer_id, None)
        if run is not None:
            await run.stop(is_lost=True)
        async with self._writing:  # after what is being written
            try:
                await self._writes.call(Database.delete, answer_id)
            except StoreError as error:
                raise unavailable(error) from error

    async def _follow(self, run: Run, begin: int) -> Events:
        """Events of an answer, here as long as it is computed here, and then in the store."""
        async for events in run.follow(begin):
            yield events
            begin = len(run.log)
        if run.is_lost:
            try:
                answer = await self._reads.call(Database.find, run.answer.id)
            except StoreError as error:
                raise unavailable(error) from error
            if answer is not None:
                async for events in self._read(answer, begin):
                    yield events

    async def _read(self, answer: Answer, begin: int) -> Events:
        """Events of an answer in the store, made again from its tokens."""
        at = 0
        async with aclosing(self._read_all(answer)) as groups:
            async for events in groups:
                first, at = max(begin - at, 0), at + len(events)
                if shown := b"".join(events[first:]):
                    yield shown

    async def _read_all(self, answer: Answer) -> AsyncGenerator[list[bytes], None]:
        asked = msgspec.msgpack.decode(answer.asked, type=Asked)
        body, one, totals = await self._prepare(answer, asked)
        tokens = StoredTokens(self._reads, answer)
        reader = replace(one, ring=tokens, metrics=self._metrics, waiting=Shared(1 << 30))
        stored = Stored(answer.id, answer.created_s, asked.is_background, lambda: tokens.result)
        writer = ResponseWriter(totals, body, one.tokenizer.token_bytes, stored)
        stops = iter([each.stop_token_ids for each in totals.job.generations])
        yield writer.begin()
        try:
            async with aclosing(stream_choices(reader, totals, lambda stream: _split(stream, next(stops)))) as pieces:
                async for index, piece in pieces:
                    yield writer.events(index, piece)
        except EndedError as ended:
            yield writer.end_as(ended.result)

    async def _prepare(
        self, answer: Answer, asked: Asked, kept: Sequence[ChoiceTokens] = ()
    ) -> tuple[ResponsesRequest, ServedModel, Totals]:
        """The request of an answer as it was first prepared, and then what is `kept`. Raises ApiError."""
        key = self._served.keys.find_owner(answer.owner)
        if key is None:
            raise ApiError(403, "the key that asked for this answer is no longer accepted", None, "key_gone")
        key = replace(key, allowance=Allowance())  # it has paid
        history = await self._find_history(answer.previous, key) if answer.previous else []
        turn = self._served.new_turn(key.name, len(answer.body) + sum(len(one.body) for one in history))
        try:
            await turn.step()
            body = ResponsesRequest.model_validate_json(answer.body)
            await turn.step()
            if history:
                body = _join(body, history, self._served.options.max_body_bytes)
            one = self._served.find(body.model, key)
            await turn.last_step()
            raw = replace(body.raw(), deadline_ms=None)
        finally:
            turn.end()
        job = await one.prepare(raw, unique_id(asked.request_id.rpartition(".")[0]), time.perf_counter(), key)
        if _digest(job) != asked.digest:
            why = "the prompt of this answer is read in another way now: its model, template or an image has changed"
            raise ApiError(409, f"{why}; ask again", None, "prompt_changed")
        generations = [
            replace(each, sampling=replace(each.sampling, seed=seed))
            for each, seed in zip(job.generations, asked.seeds, strict=True)
        ]
        if kept:
            pairs = zip(generations, kept, strict=True)
            generations = [replace(each, emitted=tuple(one.ids), computes=answer.computes) for each, one in pairs]
        job = replace(job, generations=tuple(generations), call_seed=asked.request_id)
        return body, one, Totals(job, time.perf_counter())

    # -- the store ---------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_S):
                    await self._due.wait()
            self._due.clear()
            with suppress(StoreError):
                await self._save()

    async def _save(self) -> None:
        """What is known here is in the store. Raises StoreError; then it is tried again later."""
        async with self._writing:
            taken = [(run, *news) for run in self._runs.values() if (news := run.take_change())]
            if taken:
                try:
                    changes = [change for _, change, _ in taken]
                    lost = await self._writes.call(Database.write, changes, self.id, self._lease_s)
                except StoreError as error:
                    self._note_failure(error)
                    raise
                self._note_success()
                for run, change, sizes in taken:
                    if change.answer.id in lost:
                        await run.stop(is_lost=True)
                        run.is_lost = True
                    else:
                        run.mark_saved(change, sizes)
            for answer_id, run in list(self._runs.items()):
                if run.is_over and run.is_saved:
                    del self._runs[answer_id]

    async def _save_one(self, answer_id: str) -> None:
        """An answer that ended here just now is in the store."""
        if answer_id in self._runs:
            with suppress(StoreError):
                await self._save()

    async def _hold(self) -> None:
        """Keep leases, look for answers to cancel and to take over."""
        while True:
            try:
                own, unwanted, self._num_others = await self._writes.call(Database.renew, self.id, self._lease_s)
                for answer_id, run in list(self._runs.items()):
                    if answer_id in unwanted:
                        await run.stop()
                    elif answer_id not in own and not run.is_new and not run.is_over:
                        await run.stop(is_lost=True)
                if not self._is_draining:
                    for answer in await self._writes.call(Database.claim, self.id, self._lease_s, MOST_TAKEN):
                        work = asyncio.create_task(self._take_over(answer))
                        self._taking.add(work)
                        work.add_done_callback(self._taking.discard)
            except StoreError as error:
                self._note_failure(error)
            await asyncio.sleep(LOOK_S)

    async def _take_over(self, answer: Answer) -> None:
        """Go on with an answer whose gateway died."""
        asked = msgspec.msgpack.decode(answer.asked, type=Asked)
        try:
            if not (asked.is_streamed or asked.is_background):
                raise ApiError(503, "the gateway that computed the answer ended, and its client with it", None, "lost")
            kept = join_parts(await self._reads.call(Database.find_tokens, answer.id), len(asked.seeds))
            body, one, totals = await self._prepare(answer, asked, kept)
        except StoreError as error:  # its lease ends, and somebody takes it again
            self._note_failure(error)
            return
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.exception("an answer cannot be prepared again", answer=answer.id)
                error = ApiError(500, "the answer could not be taken over; the gateway's log says why", None, "bug")
            await self._give_up(answer, error)
            return
        stored = Stored(answer.id, answer.created_s, asked.is_background)
        writer = ResponseWriter(totals, body, one.tokenizer.token_bytes, stored)
        run = Run(answer, one, totals, writer, kept, self._due.set, is_new=False, is_waited_for=False)
        self._runs[answer.id] = run
        _log.info("an answer goes on here", answer=answer.id, tokens=sum(len(each.ids) for each in kept))
        run.start()

    async def _give_up(self, answer: Answer, error: ApiError) -> None:
        result = msgspec.json.decode(answer.result)
        result |= {"status": "failed", "error": {"code": error.code or "server_error", "message": error.message}}
        answer.status, answer.result = "failed", encode(result)
        _log.warning("an answer cannot go on", answer=answer.id, reason=error.message)
        with suppress(StoreError):
            await self._writes.call(Database.write, [Change(answer, is_new=False)], self.id, self._lease_s)

    async def _clean(self) -> None:
        while True:
            with suppress(StoreError):
                num_bytes = await self._writes.call(Database.clean, self._ttl_s, self._max_bytes)
                if num_bytes > self._max_bytes:
                    _log.warning("answers that are not over need more than --state-max-mib", bytes=num_bytes)
            await asyncio.sleep(CLEAN_S)

    def _note_failure(self, error: StoreError) -> None:
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            _log.warning("answers are not stored for now; what is answered goes on", reason=str(error))

    def _note_success(self) -> None:
        if self._failed_since is not None:
            _log.info("answers are stored again", after_s=round(time.monotonic() - self._failed_since, 1))
            self._failed_since = None


class _Frame:
    """Around the events of a stored answer, which say themselves how it ends."""

    ping, done = COMMENT_PING, b""

    def __init__(self, begun: Sequence[bytes] = ()) -> None:
        self._begun = list(begun)

    def begin(self) -> list[bytes]:
        return self._begun

    def failure(self, error: ApiError) -> bytes:
        """Of reading it: the answer itself may go on."""
        return named_event("error", message=error.message, code=error.code, param=error.param)


async def _split(stream: AsyncGenerator[Tokens, None], stop_token_ids: frozenset[int]) -> AsyncGenerator[Tokens, None]:
    async with aclosing(stream):
        async for tokens in stream:
            for one in singly(tokens, stop_token_ids):
                yield one


def _digest(job: PreparedRequest) -> bytes:
    """Of all that workers get of its prompts."""
    digest = blake2b(digest_size=16)
    for prompt in job.prompts:
        digest.update(np.array(prompt.ids, np.int32).tobytes())
        for image in prompt.images:
            digest.update(image.span.digest)
    return digest.digest()


def _join(body: Asked_, history: Sequence[Answer], max_bytes: int) -> Asked_:
    """The request with the whole conversation as its input. Raises ApiError."""
    num_bytes = sum(len(answer.body) + len(answer.result) for answer in history)
    if num_bytes > max_bytes:
        why = f"the conversation of previous_response_id has {num_bytes} bytes; at most {max_bytes} are read"
        raise bad_request(f"{why}: begin a new one, or raise --body-limit-bytes", "previous_response_id")
    items: list[Any] = []
    for answer in history:
        items += as_items(msgspec.json.decode(answer.body).get("input"))
        items += msgspec.json.decode(answer.result)["output"]
    whole = body.model_dump(by_alias=True, exclude_unset=True)
    return type(body).model_validate(whole | {"input": [*items, *as_items(whole["input"])]})


def as_items(given: Any) -> list[Any]:
    """A request's input as a list."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
