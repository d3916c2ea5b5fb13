"""Requests for answers that are kept: they are computed even if no client listens, and read back."""

import asyncio
import re
import time
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.access.keys import Key
from gateway.answer.choices import HOLD_CHOICES, begin
from gateway.api.access import unique_id, warning_headers
from gateway.api.http.answer import (
    COMMENT_PING,
    Events,
    EventStream,
    Stored,
    find_hold_s,
    json_response,
    until_disconnect,
    while_connected,
)
from gateway.api.openai.types import ChatCompletionRequest
from gateway.api.responses.types import ResponsesRequest
from gateway.api.routes import answer_once
from gateway.errors import ApiError, bad_request
from gateway.request.prepare import ServedModels
from gateway.store.database import RUNNING, Answer, Database, Status, StoreError
from gateway.store.kinds import (
    Kind,
    Place,
    Prepared,
    StoredRequest,
    find_kind,
    find_place,
    new_id,
    show,
    trouble,
)
from gateway.store.line import for_clients
from gateway.store.replay import Asked, SomeBody, digest_of, unknown_history
from gateway.store.run import ChoiceTokens, Run
from gateway.store.runs import LOOK_S, Runs

_ID: dict[Kind, re.Pattern[str]] = {
    "responses": re.compile(r"resp_[0-9a-f]{48}"),
    "chat": re.compile(r"chatcmpl-[0-9a-f]{24}"),
}
_PARAM: dict[Kind, str] = {"responses": "response_id", "chat": "completion_id"}


class AnswerKeeper:
    """Answers what clients ask of answers that are kept. Lives on the asyncio thread."""

    def __init__(self, served: ServedModels, runs: Runs) -> None:
        self._served, self.runs = served, runs

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """As Keeper."""
        is_line = hasattr(request.state, HOLD_CHOICES)  # of a batch: its file has the answer
        if is_line and body.store:
            raise _line_refusal()
        if body.store is False or is_line:
            if body.background:
                raise bad_request("background needs store: an answer that is not kept cannot be read later", "store")
            return await answer_once(self._served, await self.with_history(body, request), request)
        whole, previous = await self.with_history(body, request), body.previous_response_id or ""
        answer_id = new_id("responses")
        if not previous:
            whole.continue_from(answer_id)  # by that its conversation will be known
        background = bool(body.background)
        return await self._answer(body, whole, request, answer_id, previous=previous, is_background=background)

    async def complete(self, body: ChatCompletionRequest, request: Request) -> Response:
        """As Keeper."""
        if hasattr(request.state, HOLD_CHOICES):
            raise _line_refusal()
        body.check_stored()
        return await self._answer(body, body, request, new_id(find_kind(body)))

    async def _answer(
        self,
        body: StoredRequest,
        whole: StoredRequest,
        request: Request,
        answer_id: str,
        *,
        previous: str = "",
        is_background: bool = False,
    ) -> Response:
        """`body`: as it came; `whole`: with its conversation."""
        prepared = await self._prepare(whole, request)
        one, totals = prepared.served, prepared.totals
        run = self._new_run(body, prepared, request.state.key, answer_id, previous, is_background=is_background)
        answer = run.answer
        if totals.trace is not None:
            totals.trace.note({"gen_ai.response.id": answer.id})
        self.runs.running[answer.id] = run
        if is_background:
            await self.runs.insert(run)
        run.start()
        self.runs.wake()  # others know it before its client does, unless the first token is sooner
        if body.stream:
            hold_s = 0.0 if is_background else find_hold_s(prepared.raw, totals.job)
            ring, adapter = one.ring, totals.job.generations[0].adapter
            kind = find_kind(body)
            place = find_place(kind, len(totals.job.generations))
            events = run.follow(place, self._elsewhere(run, place), run.num_begun, is_asked=not is_background)
            return EventStream(
                events, _Frame(kind, place, run), hold_s, lambda: ring.can_serve(adapter), totals.warnings, run.is_known
            )
        if not is_background:
            try:
                await until_disconnect(request.receive, run.wait())
            except ClientDisconnect:
                await run.stop()  # no client knows its id
                raise
            if run.error is not None:
                raise run.error
            if run.is_lost:
                raise ApiError(503, "the gateway ends, and with it this answer; ask again", None, "draining")
        response = json_response(show(answer))
        response.headers.update(warning_headers(totals.warnings()))
        return response

    def _new_run(
        self, body: StoredRequest, prepared: Prepared, key: Key, answer_id: str, previous: str, *, is_background: bool
    ) -> Run:
        kind, job = find_kind(body), prepared.totals.job
        seeds = [each.sampling.seed for each in job.generations]
        asked = Asked(job.call_seed, seeds, digest_of(job), is_background, bool(body.stream))
        stored = Stored(answer_id, int(time.time()), is_background)
        writer = prepared.new_writer(stored)
        status: Status = "queued" if is_background else "in_progress"
        labels = msgspec.json.encode(body.metadata or {}).decode()
        answer = Answer(
            stored.id, kind, key.owner, job.model, previous, stored.created_s, msgspec.msgpack.encode(asked),
            body.model_dump_json(by_alias=True, exclude_unset=True).encode(), status, writer.so_far(status),
            labels=labels,
        )  # fmt: skip
        kept = [ChoiceTokens() for _ in job.generations]
        return Run(
            answer, prepared, writer, kept, self.runs.wake, self.runs.is_held,
            is_new=True, is_waited_for=not is_background, is_kept=asked.is_kept,
        )  # fmt: skip

    async def _prepare(self, body: StoredRequest, request: Request) -> Prepared:
        state = request.state
        one = self._served.find(body.model, state.key)
        await state.turn.step()
        raw = body.raw()
        await state.turn.last_step()
        request_id = unique_id(state.request_id)
        beginning = begin(one, raw, request_id, state.arrived_s, state.key, request.headers.items)
        return Prepared(body, raw, one, await while_connected(request, raw, beginning))

    async def with_history(self, body: SomeBody, request: Request) -> SomeBody:
        """As Keeper."""
        if (previous := body.previous_response_id) is None:
            return body
        key: Key = request.state.key
        if previous in self.runs.running:  # it ended here just now
            with suppress(StoreError):
                await self.runs.save()
        if not _ID["responses"].fullmatch(previous):
            raise unknown_history(previous)
        history = await self.runs.replays.find_history(previous, key, waits=bool(self.runs.num_others))
        return await self.runs.replays.join(body, history, key)

    async def find(self, kind: Kind, answer_id: str, key: Key) -> Answer:
        """The answer, as far as it is known here or in the store. Raises ApiError 404 unless it is the key's own."""
        run = self.runs.running.get(answer_id)
        answer: Answer | None = None
        if run is not None and not (run.is_new or run.is_saved or self.runs.is_held()):
            with suppress(StoreError, TimeoutError):  # without the store we answer by what is known here
                async with asyncio.timeout(LOOK_S):
                    await self._look_whether_lost(run)
        if run is not None and not run.is_lost:
            answer = run.answer
        elif _ID[kind].fullmatch(answer_id):
            answer = await self.runs.reads.ask(Database.find, answer_id)
        if answer is None or (answer.kind, answer.owner) != (kind, key.owner):
            raise ApiError(404, f"no answer has the id {answer_id[:100]}", _PARAM[kind], "not_found")
        return answer

    async def _look_whether_lost(self, run: Run) -> None:
        """Another gateway may have ended an answer whose lease ran out here."""
        known = await self.runs.reads.call(Database.find, run.answer.id)
        if known is None or known.status not in RUNNING:
            await run.stop(is_lost=True)
            run.is_lost = True

    async def events(self, kind: Kind, answer_id: str, key: Key, after: str) -> Response:
        """The answer's events, behind the SSE id `after` unless that is empty, and those to come. Raises ApiError."""
        answer = await self.find(kind, answer_id, key)
        place = find_place(kind, len(msgspec.msgpack.decode(answer.asked, type=Asked).seeds), after)
        run = self.runs.running.get(answer_id)
        if run is None or run.is_lost:
            events = self.runs.replays.read(answer, place)
        else:
            events = run.follow(place, self._elsewhere(run, place))
        return EventStream(events, _Frame(kind, place), 0.0, lambda: True, tuple)

    async def list_chats(self, key: Key, after: str, limit: int, **wanted: Any) -> tuple[list[Answer], bool]:
        """As Database.list_own."""
        with suppress(StoreError):
            await self.runs.save()  # those that ended here just now
        most = self._served.options.max_body_bytes
        found = await self.runs.reads.ask(Database.list_own, key.owner, "chat", after, limit, max_bytes=most, **wanted)
        if found is None:
            raise bad_request("after names nothing in this list", "after")
        return found

    async def set_labels(self, kind: Kind, answer_id: str, key: Key, labels: str) -> Answer:
        """Gives an answer other metadata. Raises ApiError."""
        answer = await self.find(kind, answer_id, key)
        answer.labels = labels
        with for_clients():
            await self.runs.save()
            await self.runs.writes.call(Database.set_labels, answer_id, labels)
        return answer

    async def cancel(self, answer_id: str, key: Key) -> bytes:
        """Ends a background answer; returns what there is of it. No effect on one that is over. Raises ApiError."""
        answer = await self.find("responses", answer_id, key)
        if not msgspec.msgpack.decode(answer.asked, type=Asked).is_background:
            raise bad_request("only answers with background can be cancelled; close the others' connection", None)
        run = self.runs.running.get(answer_id)
        if run is not None and not run.is_lost and (run.is_new or self.runs.is_held()):
            await run.stop()
            return run.answer.result
        await self.runs.reads.ask(Database.ask_cancel, answer_id)
        until = time.monotonic() + self.runs.lease_s + 3 * LOOK_S
        while answer.status in RUNNING and time.monotonic() < until:
            await asyncio.sleep(LOOK_S / 4)
            answer = await self.find("responses", answer_id, key)
        return answer.result

    async def delete(self, kind: Kind, answer_id: str, key: Key) -> None:
        """Deletes an answer. Raises ApiError."""
        await self.find(kind, answer_id, key)
        await self.runs.delete(answer_id)

    async def _elsewhere(self, run: Run, place: Place) -> Events:
        """Events of an answer in the store that is no longer computed here."""
        answer = await self.runs.reads.ask(Database.find, run.answer.id)
        if answer is None:
            raise ApiError(404, f"the answer {run.answer.id} was deleted", None, "not_found")
        async for events in self.runs.replays.read(answer, place):
            yield events


def _line_refusal() -> ApiError:
    return bad_request("the answer to a line of a batch is kept in its file; set store to false", "store")


class _Frame:
    """The frame of a stored answer's stream, whose events say themselves how it ends."""

    ping, done = COMMENT_PING, b""

    def __init__(self, kind: Kind, place: Place, run: Run | None = None) -> None:
        """`run`: of a client that asks for the answer, and learns of it when it has been let in."""
        self._kind, self._place, self._run = kind, place, run

    def begin(self) -> list[bytes]:
        return [self._place.take(self._run.log[: self._run.num_begun])] if self._run else []

    def failure(self, error: ApiError) -> bytes:
        """The answer's own end; else of reading it: it may go on."""
        if self._run is not None and self._run.error is error:
            return self._place.take(self._run.log[self._run.num_begun :])
        return trouble(self._kind, error)
