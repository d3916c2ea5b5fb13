"""Answers the lines of batches, each by a request to the service's own REST API. Lives on the asyncio thread."""

import asyncio
import time
from collections import Counter, deque
from contextlib import ExitStack, closing, suppress
from contextvars import ContextVar
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

import httpx
import msgspec
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.keys import ANYBODY, KEY_OF_REQUEST, Key, Keys
from gateway.answer.choices import HOLD_CHOICES
from gateway.batches.lines import Input, InputLine, Journal, LineError, LineResponse, OutputLine, read_line, scan
from gateway.batches.objects import OVER, Batch, BatchFault, BatchFaults, Status
from gateway.batches.pace import Pace, count_room
from gateway.batches.records import Record
from gateway.batches.store import BatchStore, sharer
from gateway.batches.turns import LineTurns
from gateway.errors import ApiError
from gateway.metrics import Gaps
from gateway.router.engine_client import Load
from gateway.store.database import StoreError

_log = structlog.get_logger()

MAX_OPENING = 4  # inputs that are read at the same time, one of each owner
TICK_S = 0.1  # between two looks at the load, while there are lines to answer
IDLE_S = 600.0  # between two looks for what is to be deleted
SYNC_S = 1.0
TROUBLE_S = 10.0  # after an error of the disk
RETRIED = (429, 503)  # statuses: as long as it takes
MAX_FAILED = 3  # tries of a line that ends all attempts of workers: it may be what kills them
MAX_RETRY_S = 60.0
_KEY_GONE = "the API key that made the batch is not accepted any more"
MAX_DROPS = 3  # of one line, in favour of live answers; then it runs to its end


_turns: ContextVar[LineTurns] = ContextVar("turns")  # of the line whose task this is


class _Job:
    """A batch that is not over, with its files open."""

    def __init__(self, record: Record, batch: Batch, key: Key, path: Path) -> None:
        """`path`: of its input."""
        self.record, self.batch, self.key, self.path = record, batch, key, path
        self.input: Input
        self.output: Journal
        self.errors: Journal
        self.pending: deque[int] = deque()  # numbers of lines
        self.running: dict[int, tuple[asyncio.Task[None], LineTurns]] = {}
        self.num_lines = 0  # of the input, that can be asked or not
        self.ended: list[Record] = []  # files of one that is over; the store may lack its end
        self.drops: Counter[int] = Counter()

    def open(self, store: BatchStore, max_line_bytes: int) -> None:
        """Reads everything; in a thread. Raises ValueError if the input cannot be used, OSError also while another
        gateway writes the output."""
        if not self.path.exists():
            raise ValueError("the input file is not there any more")
        with ExitStack() as opened:
            self.output = opened.enter_context(closing(Journal(store.path(self.record.output_id))))
            self.errors = opened.enter_context(closing(Journal(store.path(self.record.error_id))))
            self.input = scan(self.path, self.batch.endpoint, max_line_bytes)
            done = self.output.numbers | self.errors.numbers
            self.pending.extend(number for number in self.input.numbers if number not in done)
            for fault in self.input.faults:
                if fault.number not in done:
                    self.write(fault.number, fault.custom_id, LineError(fault.code, fault.message))
            self.num_lines = len(self.input.numbers) + len(self.input.faults)
            self.input.faults.clear()
            self.input.numbers.clear()
            self.sync()
            opened.pop_all()

    def read(self, number: int) -> InputLine:
        return read_line(self.path, self.input.offsets[number - 1])

    def write(self, number: int, custom_id: str | None, result: LineResponse | LineError) -> None:
        """Writes the result of a line to the output or to the errors. Raises OSError."""
        line = OutputLine(f"{self.batch.id.replace('_', '_req_')}_{number}", custom_id)
        if isinstance(result, LineError):
            line.error = result
        else:
            line.response = result
        is_answered = isinstance(result, LineResponse) and result.status_code < 400
        (self.output if is_answered else self.errors).append(number, line)

    def count(self) -> None:
        counts = self.batch.request_counts
        counts.total = self.num_lines
        counts.completed, counts.failed = len(self.output.numbers), len(self.errors.numbers)
        self.record.num_bytes = self.output.size + self.errors.size

    def sync(self) -> None:
        self.output.sync()
        self.errors.sync()

    def close(self) -> None:
        """Closes the output, so that another gateway may write it."""
        self.output.close()
        self.errors.close()


class _Lines(httpx.AsyncBaseTransport):
    """Hands requests to the REST API in this process, with their turns and their batch's key in their state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        state = {HOLD_CHOICES: _turns.get().hold, KEY_OF_REQUEST: request.extensions[KEY_OF_REQUEST]}

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, "state": dict(state)}, receive, send)

        return await httpx.ASGITransport(call, raise_app_exceptions=False).handle_async_request(request)


class Service(Protocol):
    """The models that are served, as the runner sees them."""

    @property
    def live_gaps(self) -> Gaps:
        """Gaps between tokens of answers that are not of lines."""

    def can_serve(self) -> bool:
        """Whether a request for one of the models would be served now."""

    def readiness(self) -> str | None:
        """Why no model is ready; None when one is, or the next request wakes it."""

    def load(self) -> Load:
        """The load of all models together."""


class BatchRunner:
    """Runs all batches of a store, their lines in turn. A line is redone unless its answer is on disk."""

    def __init__(
        self,
        store: BatchStore,
        app: ASGIApp,
        served: Service,
        keys: Keys,
        max_line_bytes: int,
    ) -> None:
        """`app`: the REST API."""
        self._client = httpx.AsyncClient(transport=_Lines(app), base_url="http://localhost", timeout=None)
        self._store, self._served = store, served
        self._keys = keys
        self._max_line_bytes = max_line_bytes
        self._pace = Pace()
        self._jobs: deque[_Job] = deque()  # in turn
        self._changed = asyncio.Event()
        self._has_new = True  # batches in the store
        self._opening: dict[str, asyncio.Task[None]] = {}  # by owner
        self._cleaned_s = self._renewed_s = -inf
        self._is_failing = False  # the store
        self._stranded = set[str]()  # batches, as logged
        self._pauses_until = 0.0  # by the loop's clock: the disk is full, or the like
        self._synced_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Goes on with what is in the store."""
        self._store.on_change = self._wake
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends at once: lines that run are redone after the next start."""
        tasks = [task for job in self._jobs for task, _ in job.running.values()]
        tasks += [*self._opening.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in self._jobs:
            job.sync()
            job.close()
        await self._store.release()
        await self._client.aclose()

    def _wake(self) -> None:
        self._has_new = True
        self._changed.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() >= self._pauses_until:
                    await self._look()
            except Exception as error:
                self._has_new = True
                self._pause(error)
            self._changed.clear()
            with suppress(TimeoutError):
                idle_s = SYNC_S if self._store.is_shared else IDLE_S
                async with asyncio.timeout(TICK_S if self._jobs or self._has_new else idle_s):
                    await self._changed.wait()

    async def _look(self) -> None:
        """Starts lines where there is room, and ends batches that are done. Raises OSError, StoreError."""
        now = asyncio.get_running_loop().time()
        if self._has_new or now - self._renewed_s > SYNC_S:
            self._has_new, self._renewed_s = False, now
            await self._renew()
        for job in list(self._jobs):
            if (key := self._keys.find_owner(job.record.owner)) is None:
                await self._end(job, "failed")
            else:
                job.key = key
        self._fill(now)
        for job in list(self._jobs):
            job.count()
            if job.batch.status == "cancelling":
                await self._end(job, "cancelled")
            elif job.batch.status in OVER or not (job.pending or job.running):
                await self._end(job, "completed")
            elif time.time() > job.batch.expires_at:
                await self._end(job, "expired")
        if now - self._synced_s > SYNC_S:
            self._synced_s = now
            for job in list(self._jobs):
                await asyncio.to_thread(job.sync)

    async def _renew(self) -> None:
        """Lines that run go on without the store; what it lacks is written later. Raises OSError."""
        store, now = self._store, self._renewed_s
        try:
            for record in await store.renew():
                await self._leave(record)
            await store.count()
            if now - self._cleaned_s > IDLE_S:
                self._cleaned_s = now
                for batch_id in set(await store.clean()) - self._stranded:
                    self._stranded.add(batch_id)
                    why = "its files are in the --batch-dir of a gateway that is gone; have the gateways share one"
                    _log.warning("a batch does not go on", batch=batch_id, reason=why)
        except (StoreError, ApiError) as error:
            self._has_new = True
            if not self._is_failing:
                _log.warning("batches are not stored for now; their lines go on", reason=str(error))
            self._is_failing = True
        else:
            self._is_failing = False
        known = {job.batch.id for job in self._jobs}
        for record in store.held.values():
            if record.id not in known:
                self._open_beside(record)

    async def _leave(self, record: Record) -> None:
        """Stops a batch that another gateway has by now."""
        _log.warning("a batch is another gateway's now", batch=record.id)
        for job in [job for job in self._jobs if job.record is record]:
            await _stop(job)
            self._jobs.remove(job)
            job.close()

    def _open_beside(self, record: Record) -> None:
        """Reads its input while the others go on, unless many are read or one of its owner is: later, then."""
        if record.owner in self._opening or len(self._opening) >= MAX_OPENING:
            return

        def end(task: asyncio.Task[None]) -> None:
            del self._opening[record.owner]
            self._wake()
            if not task.cancelled() and (error := task.exception()):
                self._pause(error)

        task = self._opening[record.owner] = asyncio.create_task(self._open(record))
        task.add_done_callback(end)

    async def _open(self, record: Record) -> None:
        batch, key = record.value, self._keys.find_owner(record.owner)
        assert isinstance(batch, Batch)
        job = _Job(record, batch, key or ANYBODY, self._store.path(batch.input_file_id))
        try:
            if key is None:
                raise ValueError(_KEY_GONE)
            await asyncio.to_thread(job.open, self._store, self._max_line_bytes)
        except BlockingIOError:  # a gateway that still believes it has the batch
            await asyncio.sleep(SYNC_S)
            return
        except ValueError as error:
            _fail(batch, "invalid_api_key" if key is None else "invalid_input_file", str(error))
        else:
            job.count()
            self._jobs.append(job)
            if batch.status == "validating":
                batch.enter("in_progress")
            _log.info("batch begins", batch=batch.id, lines=batch.request_counts.total, left=len(job.pending))
        await self._store.save(record)
        if not record.is_open:
            self._store.held.pop(record.id, None)

    # -- lines -------------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> None:
        """Lets answers of lines run, or drops some for live answers. More of lines that run come before new lines."""
        running = [(job, number, turns) for job in self._jobs for number, (_, turns) in job.running.items()]
        if not self._served.can_serve():  # draining, no worker is there, or all models sleep: one line wakes its own
            if not running and self._served.readiness() is None:
                self._start_next()
            return
        load, num_answers = self._served.load(), self._pace.num_answers
        gaps = self._served.live_gaps
        most = self._pace.look(now, max(load.num_inside - len(running), 0), gaps.total_s, gaps.count)
        for job, number, turns in reversed(running):
            if num_answers <= most:
                break
            if job.drops[number] < MAX_DROPS:
                job.drops[number] += 1
                job.running[number][0].cancel()
                num_answers -= turns.num_allowed
        num_live_waiting = max(load.num_waiting - sum([turns.num_waiting for *_, turns in running]), 0)
        left = int(min(count_room(load.num_places, load.num_free, num_live_waiting), most - num_answers))
        for *_, turns in running:
            while left > 0 and turns.num_waiting:
                left -= 1
                self._pace.begin()
                turns.allow()
        while left > 0 and (num_begun := self._start_next()):
            left -= num_begun

    def _start_next(self) -> int:
        """How many answers the line asks for that begins; 0: there is none to begin."""
        for _ in range(len(self._jobs)):
            job = self._jobs[0]
            self._jobs.rotate(-1)
            has_room = self._store.bytes.has_room(sharer(job.record.owner))
            if job.pending and job.batch.status == "in_progress" and has_room:
                number = job.pending.popleft()
                self._pace.begin()
                turns = LineTurns(self._pace.end)
                _turns.set(turns)
                task = asyncio.create_task(self._answer(job, number))
                job.running[number] = task, turns
                task.add_done_callback(partial(self._finish, job, number))
                return job.input.num_answers[number - 1]
        return 0

    async def _answer(self, job: _Job, number: int) -> None:
        """Answers one line, from its input to its output. Raises OSError."""
        line = await asyncio.to_thread(job.read, number)
        response = await self._ask(job, line)
        request_id = response.headers.get("x-request-id", "")
        job.write(number, line.custom_id, LineResponse(response.status_code, request_id, msgspec.Raw(response.content)))

    async def _ask(self, job: _Job, line: InputLine) -> httpx.Response:
        headers = {b"content-type": b"application/json"}
        num_failed = 0
        while True:
            extensions = {KEY_OF_REQUEST: job.key}
            response = await self._client.post(
                line.url, content=bytes(line.body), headers=headers, extensions=extensions
            )
            if response.status_code not in RETRIED:
                return response
            num_failed += response.json()["error"]["code"] == "failed"
            if num_failed == MAX_FAILED:
                return response
            await asyncio.sleep(min(float(response.headers.get("retry-after", 1)), MAX_RETRY_S))

    def _finish(self, job: _Job, number: int, task: asyncio.Task[None]) -> None:
        _, turns = job.running.pop(number)
        for _ in range(turns.num_allowed):
            self._pace.end()
        self._changed.set()
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error:
            job.pending.appendleft(number)
        if error:
            self._pause(error)

    def _pause(self, error: BaseException) -> None:
        """The disk is full, or the like; a bug, which must not be silent."""
        now, bug = asyncio.get_running_loop().time(), None if isinstance(error, OSError | StoreError) else error
        if now >= self._pauses_until:
            _log.warning("batches pause", reason=str(error), pause_s=TROUBLE_S, exc_info=bug)
        self._pauses_until = now + TROUBLE_S

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _end(self, job: _Job, status: Status) -> None:
        """Raises OSError, StoreError; then it is tried again. A batch that is over was not saved, and stays so."""
        batch, record, store = job.batch, job.record, self._store
        if batch.status not in OVER:
            await self._finish_files(job, status)
            if status == "failed":
                _fail(batch, "invalid_api_key", _KEY_GONE)
            else:
                batch.enter(status)
        record.num_bytes = 0  # those of its files
        await store.save(record, job.ended)
        store.held.pop(record.id, None)
        self._jobs.remove(job)
        job.close()
        counts = batch.request_counts
        _log.info("batch ends", batch=batch.id, status=batch.status, answered=counts.completed, failed=counts.failed)

    async def _finish_files(self, job: _Job, status: Status) -> None:
        batch, record, store = job.batch, job.record, self._store
        await _stop(job)
        if status == "completed" and batch.status != "finalizing":
            batch.enter("finalizing")
            await store.save(record)
        if status == "expired":
            await asyncio.to_thread(self._fail_rest, job)
        await asyncio.to_thread(job.sync)
        job.count()
        output = store.take_output(record.owner, record.output_id, f"{batch.id}_output.jsonl")
        errors = store.take_output(record.owner, record.error_id, f"{batch.id}_error.jsonl")
        batch.output_file_id = output.id if output else None
        batch.error_file_id = errors.id if errors else None
        job.ended = [file for file in (output, errors) if file]

    def _fail_rest(self, job: _Job) -> None:
        error = LineError("batch_expired", "the line was not answered before the completion window ended")
        for number in job.pending:
            if number not in job.errors.numbers:  # of a try before
                job.write(number, job.read(number).custom_id, error)


async def _stop(job: _Job) -> None:
    """Stops the lines that run, which are pending again."""
    tasks = [task for task, _ in job.running.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _fail(batch: Batch, code: str, why: str) -> None:
    """Fails the whole batch, not a line."""
    batch.errors = BatchFaults([BatchFault(code, why)])
    batch.enter("failed")
    _log.info("batch fails", batch=batch.id, reason=why)
