"""Keeps answers: computes them though nobody may listen, writes them behind, takes over those of gateways that died,
and reads them back."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
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
from gateway.store.database import RUNNING, Answer, Change, Database, NewerStoreError, Status, StoreError
from gateway.store.kinds import (
    Kind,
    Place,
    Prepared,
    StoredRequest,
    failed_result,
    find_kind,
    find_place,
    new_id,
    show,
    trouble,
)
from gateway.store.line import Line, unavailable
from gateway.store.replay import Asked, CannotGoOnError, Replays, SomeBody, digest_of, unknown_history
from gateway.store.run import ChoiceTokens, Run, join_parts
from runtime.tasks import keep_running

_log = structlog.get_logger()

WRITE_S = 0.2  # what was generated is in the store so soon
PAUSE_S = 1.0  # after a failure of the store
LOOK_S = 1.0  # between two looks at leases; --state-lease-s is longer
CLEAN_S = 60.0
MOST_TAKEN = 16  # answers at once, of gateways that died
MOST_TRIES = 10  # of taking one over
MOST_DEATHS = 3  # of gateways, while they work on one answer and it gets no further
MOST_WRITTEN = 200  # answers in one transaction
MOST_UNSAVED = 2000  # answers that are over and that a failing store lacks; older ones are lost

_ID: dict[Kind, re.Pattern[str]] = {
    "responses": re.compile(r"resp_[0-9a-f]{48}"),
    "chat": re.compile(r"chatcmpl-[0-9a-f]{24}"),
}
_PARAM: dict[Kind, str] = {"responses": "response_id", "chat": "completion_id"}


class AnswerKeeper:
    """Owns the answers that this gateway computes and keeps. Lives on the asyncio thread."""

    def __init__(
        self, served: ServedModels, place: str | Path, *, ttl_s: float, max_bytes: int, lease_s: float
    ) -> None:
        """`place`: as in Database. `lease_s`: how long others wait for a sign of this gateway."""
        self._served, self._ttl_s, self._max_bytes, self._lease_s = served, ttl_s, max_bytes, lease_s
        self._writes, self._reads, self._place = Line(place, "store-write"), Line(place, "store-read"), place
        self._replays = Replays(served, self._reads)
        self.id = new_id("responses").replace("resp_", "gateway_")
        self._runs: dict[str, Run] = {}
        self._num_others = 0  # gateways with the same store
        self._held_until = 0.0  # leases that were renewed
        self._is_draining = False
        self._writing = asyncio.Lock()
        self._due = asyncio.Event()
        self._failed_since: float | None = None  # when the store last began to fail
        self._tasks: list[asyncio.Task[None]] = []
        self._taking: dict[str, asyncio.Task[None]] = {}  # answers that others left
        self._tries = Counter[str]()  # of taking them over, that failed

    async def start(self) -> None:
        """Raises StoreError if the store cannot be used. A database that does not answer may do so later."""
        try:
            await self._reads.call(Database.find, "")
        except StoreError as error:
            if isinstance(self._place, Path):
                raise StoreError(f"--state-dir {self._place} cannot be used: {error}") from error
            if isinstance(error, NewerStoreError):
                raise
            self._note_failure(error)
        self._tasks = [asyncio.create_task(keep_running(self._write, "writing answers"))]
        self._tasks.append(asyncio.create_task(keep_running(self._clean, "deleting old answers")))

    def serve(self) -> None:
        """Now the service can answer: go on with what others have left, too."""
        self._tasks.append(asyncio.create_task(keep_running(self._hold, "keeping leases")))

    async def drain(self) -> None:
        """Another gateway goes on with the answers that can be read there, if there is one."""
        self._is_draining = True
        if self._num_others:
            await self._let_go([run for run in self._runs.values() if run.is_kept])

    async def let_go(self) -> None:
        """Whichever gateway comes goes on; clients may read here meanwhile what it writes. Idempotent."""
        self._is_draining = True
        await self._let_go(list(self._runs.values()))

    async def close(self) -> None:
        await self.let_go()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writes.close()
        self._reads.close()

    async def _let_go(self, runs: Sequence[Run]) -> None:
        taking = dict(self._taking)
        for work in taking.values():
            work.cancel()
        await asyncio.gather(*taking.values(), return_exceptions=True)
        runs = [run for run in runs if not run.is_over]
        await asyncio.gather(*(run.pause() for run in runs))
        with suppress(StoreError):
            await self._save()
            await self._writes.call(Database.release, self.id, [*(run.answer.id for run in runs), *taking])
        for run in runs:
            await run.stop(is_lost=True)

    # -- requests ---------------------------------------------------------------------------------------------------

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
        self._runs[answer.id] = run
        if is_background:
            await self._insert(run)
        run.start()
        self._due.set()  # others are to know it before its client does
        if body.stream:
            hold_s = 0.0 if is_background else find_hold_s(prepared.raw, totals.job)
            ring, adapter = one.ring, totals.job.generations[0].adapter
            kind = find_kind(body)
            place = find_place(kind, len(totals.job.generations))
            events = self._follow(run, place, run.num_begun, is_asked=not is_background)
            return EventStream(
                events, _Frame(kind, place, run), hold_s, lambda: ring.can_serve(adapter), totals.warnings
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
            answer, prepared, writer, kept, self._due.set, self._is_held,
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

    async def _insert(self, run: Run) -> None:
        """Before it is promised. Raises ApiError; then it does not run, here or elsewhere."""
        try:
            await self._save()
            if run.is_new:
                raise StoreError("the request was not taken")
        except StoreError as error:
            del self._runs[run.answer.id]  # its lease ends if it was written all the same: `_take_over` gives it up
            with suppress(StoreError):
                await self._writes.call(Database.delete, run.answer.id)
            raise unavailable(error) from error

    async def with_history(self, body: SomeBody, request: Request) -> SomeBody:
        """As Keeper."""
        if (previous := body.previous_response_id) is None:
            return body
        key: Key = request.state.key
        if previous in self._runs:  # it ended here just now
            with suppress(StoreError):
                await self._save()
        if not _ID["responses"].fullmatch(previous):
            raise unknown_history(previous)
        history = await self._replays.find_history(previous, key, waits=bool(self._num_others))
        return await self._replays.join(body, history, key)

    async def find(self, kind: Kind, answer_id: str, key: Key) -> Answer:
        """The answer, as far as it is known here or in the store. Raises ApiError 404 unless it is the key's own."""
        run = self._runs.get(answer_id)
        answer: Answer | None = None
        if run is not None and not run.is_lost:
            answer = run.answer
        elif _ID[kind].fullmatch(answer_id):
            answer = await self._reads.ask(Database.find, answer_id)
        if answer is None or (answer.kind, answer.owner) != (kind, key.owner):
            raise ApiError(404, f"no answer has the id {answer_id[:100]}", _PARAM[kind], "not_found")
        return answer

    async def events(self, kind: Kind, answer_id: str, key: Key, after: str) -> Response:
        """The answer's events, behind the SSE id `after` unless that is empty, and those to come. Raises ApiError."""
        answer = await self.find(kind, answer_id, key)
        place = find_place(kind, len(msgspec.msgpack.decode(answer.asked, type=Asked).seeds), after)
        run = self._runs.get(answer_id)
        events = self._replays.read(answer, place) if run is None else self._follow(run, place)
        return EventStream(events, _Frame(kind, place), 0.0, lambda: True, tuple)

    async def list_chats(self, key: Key, after: str, limit: int, **wanted: Any) -> tuple[list[Answer], bool]:
        """As Database.list_own."""
        with suppress(StoreError):
            await self._save()  # those that ended here just now
        most = self._served.options.max_body_bytes
        found = await self._reads.ask(Database.list_own, key.owner, "chat", after, limit, max_bytes=most, **wanted)
        if found is None:
            raise bad_request("after names nothing in this list", "after")
        return found

    async def set_labels(self, kind: Kind, answer_id: str, key: Key, labels: str) -> Answer:
        """Gives an answer other metadata. Raises ApiError."""
        answer = await self.find(kind, answer_id, key)
        answer.labels = labels
        try:
            await self._save()
            await self._writes.call(Database.set_labels, answer_id, labels)
        except StoreError as error:
            raise unavailable(error) from error
        return answer

    async def cancel(self, answer_id: str, key: Key) -> bytes:
        """Ends a background answer; returns what there is of it. No effect on one that is over. Raises ApiError."""
        answer = await self.find("responses", answer_id, key)
        if not msgspec.msgpack.decode(answer.asked, type=Asked).is_background:
            raise bad_request("only answers with background can be cancelled; close the others' connection", None)
        run = self._runs.get(answer_id)
        if run is not None and not run.is_lost and (run.is_new or self._is_held()):
            await run.stop()
            return run.answer.result
        await self._reads.ask(Database.ask_cancel, answer_id)
        until = time.monotonic() + self._lease_s + 3 * LOOK_S
        while answer.status in RUNNING and time.monotonic() < until:
            await asyncio.sleep(LOOK_S / 4)
            answer = await self.find("responses", answer_id, key)
        return answer.result

    async def delete(self, kind: Kind, answer_id: str, key: Key) -> None:
        """Raises ApiError."""
        await self.find(kind, answer_id, key)
        run = self._runs.pop(answer_id, None)
        if run is not None:
            await run.stop(is_lost=True)
        async with self._writing:  # after what is being written
            await self._writes.ask(Database.delete, answer_id)

    async def _follow(self, run: Run, place: Place, at: int = 0, *, is_asked: bool = False) -> Events:
        """Events of an answer, here as long as it is computed here, and then in the store. `at`, `is_asked`: as in
        Run."""
        async for events in run.follow(place, at, is_asked=is_asked):
            yield events
        if run.is_lost:
            answer = await self._reads.ask(Database.find, run.answer.id)
            if answer is None:
                raise ApiError(404, f"the answer {run.answer.id} was deleted", None, "not_found")
            async for events in self._replays.read(answer, place):
                yield events

    # -- the store ---------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_S):
                    await self._due.wait()
            self._due.clear()
            try:
                await self._save()
            except StoreError:
                await asyncio.sleep(PAUSE_S)

    async def _save(self) -> None:
        """What is known here is in the store. Raises StoreError; then it is tried again later."""
        async with self._writing:
            waiting = [run for run in self._runs.values() if run.has_news]
            for first in range(0, len(waiting), MOST_WRITTEN):
                taken = [(run, *run.take_change()) for run in waiting[first : first + MOST_WRITTEN]]
                try:
                    changes = [change for _, change, _ in taken]
                    lost = await self._writes.call(Database.write, changes, self.id, self._lease_s)
                except StoreError as error:
                    self._note_failure(error)
                    self._drop_oldest()
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

    def _drop_oldest(self) -> None:
        """What a store that fails lacks is bounded."""
        over = [answer_id for answer_id, run in self._runs.items() if run.is_over]
        for answer_id in over[: max(len(over) - MOST_UNSAVED, 0)]:
            _log.warning("an answer is lost: the store of answers has failed for too long", answer=answer_id)
            del self._runs[answer_id]

    def _is_held(self) -> bool:
        """No other gateway can have taken what this one has."""
        return time.monotonic() < self._held_until

    async def _hold(self) -> None:
        """Keep leases, look for answers to cancel and to take over."""
        while True:
            mine = {answer_id: run for answer_id, run in self._runs.items() if not (run.is_new or run.is_over)}
            ids, began = [*mine, *self._taking], time.monotonic()
            try:
                own, unwanted, self._num_others = await self._writes.call(Database.renew, self.id, self._lease_s, ids)
                self._held_until = began + self._lease_s
                for answer_id, run in mine.items():
                    if answer_id in unwanted:
                        await run.stop()
                    elif answer_id not in own and not run.is_over:
                        await run.stop(is_lost=True)
                if not self._is_draining:
                    for answer in await self._writes.call(Database.claim, self.id, self._lease_s, MOST_TAKEN):
                        self._begin_taking(answer)
            except StoreError as error:
                self._note_failure(error)
            await asyncio.sleep(LOOK_S)

    def _begin_taking(self, answer: Answer) -> None:
        """Go on with an answer that is this gateway's now. One that it has already goes on as it is."""
        run = self._runs.get(answer.id)
        if self._is_draining or (run is not None and not run.is_lost) or answer.id in self._taking:
            return
        work = self._taking[answer.id] = asyncio.create_task(self._take_over(answer))
        work.add_done_callback(lambda _: self._taking.pop(answer.id))

    async def _take_over(self, answer: Answer) -> None:
        """Go on with an answer whose gateway died; where that fails for now, its lease ends, and it is taken again."""
        try:
            asked = msgspec.msgpack.decode(answer.asked, type=Asked)
            if answer.num_deaths > MOST_DEATHS:
                why = f"{answer.num_deaths} gateways ended while they worked on it, and it got no further"
                raise CannotGoOnError(503, why, None, "gateways_ended")
            if not asked.is_kept:
                raise CannotGoOnError(503, "its gateway ended, and with it its client's connection", None, "lost")
            kept = join_parts(await self._reads.call(Database.find_tokens, answer.id), len(asked.seeds))
            prepared = await self._replays.prepare(answer, asked, kept)
        except CannotGoOnError as error:
            await self._give_up(answer, error)
            return
        except Exception as error:
            reason = error.message if isinstance(error, ApiError) else repr(error)
            _log.warning("an answer is not taken over for now", answer=answer.id, reason=reason)
            self._tries[answer.id] += not isinstance(error, StoreError)
            if self._tries[answer.id] >= MOST_TRIES:
                why = f"it could not be taken over: {reason}"
                await self._give_up(answer, CannotGoOnError(503, why, None, "lost"))
            return
        writer = prepared.new_writer(Stored(answer.id, answer.created_s, asked.is_background))
        self._tries.pop(answer.id, None)
        run = self._runs[answer.id] = Run(
            answer, prepared, writer, kept, self._due.set, self._is_held,
            is_new=False, is_waited_for=False, is_kept=True,
        )  # fmt: skip
        _log.info("an answer goes on here", answer=answer.id, tokens=sum(len(each.ids) for each in kept))
        run.start()

    async def _give_up(self, answer: Answer, error: ApiError) -> None:
        self._tries.pop(answer.id, None)
        answer.status, answer.result = "failed", failed_result(answer.kind, answer.result, error)
        _log.warning("an answer cannot go on", answer=answer.id, reason=error.message)
        with suppress(StoreError):
            await self._writes.call(Database.write, [Change(answer, is_new=False)], self.id, self._lease_s)

    async def _clean(self) -> None:
        while True:
            with suppress(StoreError):
                num_gone, num_left = 1, 0
                while num_gone:  # a few at a time: leases are renewed between
                    num_gone, num_left = await self._writes.call(Database.clean, self._ttl_s, self._max_bytes)
                if num_left > self._max_bytes:
                    _log.warning("answers that are not over need more than --state-max-mib", bytes=num_left)
            await asyncio.sleep(CLEAN_S)

    def _note_failure(self, error: StoreError) -> None:
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            _log.warning("answers are not stored for now; what is answered goes on", reason=str(error))

    def _note_success(self) -> None:
        if self._failed_since is not None:
            _log.info("answers are stored again", after_s=round(time.monotonic() - self._failed_since, 1))
            self._failed_since = None


def _line_refusal() -> ApiError:
    return bad_request("the answer to a line of a batch is kept in its file; set store to false", "store")


class _Frame:
    """Around the events of a stored answer, which say themselves how it ends."""

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
