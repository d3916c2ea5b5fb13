"""The answers that this gateway computes: writes them behind, holds their leases, takes over those of gateways that
died."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from gateway.api.http.answer import Stored
from gateway.errors import ApiError
from gateway.request.prepare import ServedModels
from gateway.store.database import Answer, Change, Database, NewerStoreError, StoreError
from gateway.store.kinds import failed_result, new_id
from gateway.store.line import Line, unavailable
from gateway.store.replay import Asked, CannotGoOnError, Replays
from gateway.store.run import Run, join_parts
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


class Runs:
    """Owns the answers that this gateway computes and keeps. Lives on the asyncio thread."""

    def __init__(
        self, served: ServedModels, place: str | Path, *, ttl_s: float, max_bytes: int, lease_s: float
    ) -> None:
        """`place`: as in Database. `lease_s`: how long others wait for a sign of this gateway."""
        self._ttl_s, self._max_bytes, self.lease_s = ttl_s, max_bytes, lease_s
        self.writes, self.reads, self._place = Line(place, "store-write"), Line(place, "store-read"), place
        self.replays = Replays(served, self.reads)
        self.id = new_id("responses").replace("resp_", "gateway_")
        self.running: dict[str, Run] = {}  # by id
        self.num_others = 0  # gateways with the same store
        self._is_first = False  # of the gateways with the same store, by id
        self._held_until = 0.0  # leases that were renewed
        self._is_draining = False
        self._writing = asyncio.Lock()
        self._due = asyncio.Event()
        self._failed_since: float | None = None  # when the store last began to fail
        self._tasks: list[asyncio.Task[None]] = []
        self._taking: dict[str, asyncio.Task[None]] = {}  # answers that others left
        self._tries = Counter[str]()  # of taking them over, that failed
        self._refused = set[str]()  # answers that must not run, and that the store may have

    async def start(self) -> None:
        """Raises StoreError if the store cannot be used. A database that does not answer may do so later."""
        try:
            await self.reads.call(Database.find, "")
        except StoreError as error:
            if isinstance(self._place, Path):
                raise StoreError(f"--state-dir {self._place} cannot be used: {error}") from error
            if isinstance(error, NewerStoreError):
                raise
            self.note_failure(error)
        self._tasks = [asyncio.create_task(keep_running(self._write, "writing answers"))]
        self._tasks.append(asyncio.create_task(keep_running(self._clean, "deleting old answers")))

    def serve(self) -> None:
        """Begin to take over what others have left, as the service can answer now."""
        self._tasks.append(asyncio.create_task(keep_running(self._hold, "keeping leases")))

    async def drain(self) -> None:
        """Leave the answers that clients can read elsewhere to another gateway, if there is one."""
        self._is_draining = True
        if self.num_others:
            await self._let_go([run for run in self.running.values() if run.is_kept])

    async def let_go(self) -> None:
        """Whichever gateway comes goes on; clients may read here meanwhile what it writes. Idempotent."""
        self._is_draining = True
        await self._let_go(list(self.running.values()))

    async def close(self) -> None:
        await self.let_go()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.writes.close()
        self.reads.close()

    async def _let_go(self, runs: Sequence[Run]) -> None:
        taking = dict(self._taking)
        for work in taking.values():
            work.cancel()
        await asyncio.gather(*taking.values(), return_exceptions=True)
        runs = [run for run in runs if not run.is_over]
        await asyncio.gather(*(run.pause() for run in runs))
        with suppress(StoreError):
            await self.save()
            await self.writes.call(Database.release, self.id, [*(run.answer.id for run in runs), *taking])
        for run in runs:
            await run.stop(is_lost=True)

    async def insert(self, run: Run) -> None:
        """Write the answer before it is promised. Raises ApiError; then it does not run, here or elsewhere."""
        try:
            await self.save()
            if run.is_new:
                raise StoreError("the request was not taken")
        except StoreError as error:
            del self.running[run.answer.id]
            if len(self._refused) < MOST_UNSAVED:
                self._refused.add(run.answer.id)  # it may have been written all the same
            with suppress(StoreError):
                await self._delete_refused()
            raise unavailable(error) from error

    async def _delete_refused(self) -> None:
        for answer_id in list(self._refused):
            await self.writes.call(Database.delete, answer_id)
            self._refused.discard(answer_id)

    async def delete(self, answer_id: str) -> None:
        """Raises ApiError."""
        run = self.running.pop(answer_id, None)
        if run is not None:
            await run.stop(is_lost=True)
        async with self._writing:  # after what is being written
            await self.writes.ask(Database.delete, answer_id)

    async def _write(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_S):
                    await self._due.wait()
            self._due.clear()
            try:
                await self.save()
            except StoreError:
                await asyncio.sleep(PAUSE_S)

    async def save(self) -> None:
        """Writes to the store what it lacks. Raises StoreError; then it is tried again later."""
        async with self._writing:
            for is_new in (True, False):  # new ones first: clients wait for their ids
                await self._write_all([run for run in self.running.values() if run.is_new is is_new and run.has_news])
            for answer_id, run in list(self.running.items()):
                if run.is_over and run.is_saved:
                    del self.running[answer_id]

    async def _write_all(self, waiting: Sequence[Run]) -> None:
        """Writes what the store lacks of these answers. Raises StoreError."""
        for first in range(0, len(waiting), MOST_WRITTEN):
            taken = [(run, *run.take_change()) for run in waiting[first : first + MOST_WRITTEN]]
            try:
                changes = [change for _, change, _ in taken]
                lost = await self.writes.call(Database.write, changes, self.id, self.lease_s)
            except StoreError as error:
                self.note_failure(error)
                self._drop_oldest()
                raise
            self._note_success()
            for run, change, sizes in taken:
                if change.answer.id in lost:
                    await run.stop(is_lost=True)
                    run.is_lost = True
                else:
                    run.mark_saved(change, sizes)

    def _drop_oldest(self) -> None:
        """Bounds what is held for a store that fails: drops the oldest answers that are over."""
        over = [answer_id for answer_id, run in self.running.items() if run.is_over]
        for answer_id in over[: max(len(over) - MOST_UNSAVED, 0)]:
            _log.warning("an answer is lost: the store of answers has failed for too long", answer=answer_id)
            del self.running[answer_id]

    def wake(self) -> None:
        """Notes that there is something to write soon."""
        self._due.set()

    def is_held(self) -> bool:
        """Whether no other gateway can have taken what this one has."""
        return time.monotonic() < self._held_until

    @property
    def is_first(self) -> bool:
        """Whether this gateway decides what one alone must, of those that live."""
        return self._is_first and self.is_held()

    async def _hold(self) -> None:
        """Keep leases, look for answers to cancel and to take over."""
        while True:
            mine = {answer_id: run for answer_id, run in self.running.items() if not (run.is_new or run.is_over)}
            ids, began = [*mine, *self._taking], time.monotonic()
            try:
                own, unwanted, others = await self.writes.call(Database.renew, self.id, self.lease_s, ids)
                self.num_others, self._is_first = len(others), all(self.id < other for other in others)
                self._held_until = began + self.lease_s
                for answer_id, run in mine.items():
                    if answer_id in unwanted:
                        await run.stop()
                    elif answer_id not in own and not run.is_over:
                        await run.stop(is_lost=True)
                await self._delete_refused()
                if not self._is_draining:
                    for answer in await self.writes.call(Database.claim, self.id, self.lease_s, MOST_TAKEN):
                        self._begin_taking(answer)
            except StoreError as error:
                self.note_failure(error)
            await asyncio.sleep(LOOK_S)

    def _begin_taking(self, answer: Answer) -> None:
        """Go on with an answer that is this gateway's now. One that it has already goes on as it is."""
        run = self.running.get(answer.id)
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
            kept = join_parts(await self.reads.call(Database.find_tokens, answer.id), len(asked.seeds))
            prepared = await self.replays.prepare(answer, asked, kept)
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
        run = self.running[answer.id] = Run(
            answer, prepared, writer, kept, self.wake, self.is_held,
            is_new=False, is_waited_for=False, is_kept=True,
        )  # fmt: skip
        _log.info("an answer goes on here", answer=answer.id, tokens=sum(len(each.ids) for each in kept))
        run.start()

    async def _give_up(self, answer: Answer, error: ApiError) -> None:
        self._tries.pop(answer.id, None)
        answer.status, answer.result = "failed", failed_result(answer.kind, answer.result, error)
        _log.warning("an answer cannot go on", answer=answer.id, reason=error.message)
        with suppress(StoreError):
            await self.writes.call(Database.write, [Change(answer, is_new=False)], self.id, self.lease_s)

    async def _clean(self) -> None:
        while True:
            with suppress(StoreError):
                num_gone, num_left = 1, 0
                while num_gone:  # a few at a time: leases are renewed between
                    num_gone, num_left = await self.writes.call(Database.clean, self._ttl_s, self._max_bytes)
                if num_left > self._max_bytes:
                    _log.warning("answers that are not over need more than --state-max-mib", bytes=num_left)
            await asyncio.sleep(CLEAN_S)

    def note_failure(self, error: StoreError) -> None:
        """Says so once."""
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            _log.warning("answers are not stored for now; what is answered goes on", reason=str(error))

    def _note_success(self) -> None:
        if self._failed_since is not None:
            _log.info("answers are stored again", after_s=round(time.monotonic() - self._failed_since, 1))
            self._failed_since = None
