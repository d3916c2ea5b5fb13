"""The life of a request below the text: wait for places, try, try again elsewhere, end. Lives on the asyncio thread."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.errors import ApiError, missed_deadline, not_ready
from gateway.router.admission import DRAINING, Admission
from gateway.router.attempt import Attempt
from gateway.router.attempt_record import AttemptRecord
from gateway.router.engine_client import Admitted, Load, TokenizedRequest, Tokens
from gateway.router.fleet import Fleet
from gateway.router.interfaces import AnyAttempt, Gate
from gateway.router.placement import count_places
from gateway.router.placer import Placer
from gateway.router.policies import Expectations, KeepTimes
from gateway.router.queue import Queue, Waiter
from gateway.router.readiness import find_no_prefill, find_unready
from gateway.router.request import AttemptFailed, Request
from gateway.router.worker_client import WorkerClient
from gateway.router.worker_view import Role
from runtime.ops import SECONDS_BUCKETS

log = structlog.get_logger()


class Router:
    """The EngineClient of this gateway."""

    def __init__(
        self, fleet: Fleet, admission: Admission, request_timeout_s: float, patience_s: float,
        registry: CollectorRegistry, has_goal: bool, placer: Placer, clock: Callable[[], float] = time.monotonic,
        model: Gate | None = None, keep_times: KeepTimes | None = None, expectations: Expectations | None = None,
        begin: Callable[..., AnyAttempt] = Attempt,
    ) -> None:  # fmt: skip
        """`patience_s`: how long requests wait for a worker to come back, while there is none.

        `has_goal`: as in Queue. `model`: where requests wait until it is awake.
        `begin`: an attempt, given what `Attempt` is given.
        """
        self.admission = admission
        self.model = model or Gate()
        self._fleet = fleet
        self._changes = fleet.changes
        self._placer = placer
        workers: dict[Role, Mapping[str, WorkerClient]] = {"prefill": fleet.prefill, "decode": fleet.decode}
        self.queue = Queue(workers, fleet.views, placer, patience_s, fleet.changes.mark, has_goal, expectations)
        fleet.changes.follow(lambda: self.queue.decide(clock()))
        self._keep_times = keep_times or KeepTimes()
        self._begin = begin
        self._request_timeout_s = request_timeout_s
        self._patience_s = patience_s
        self._clock = clock
        name, text = "baton:request_queue_time_seconds", "Time a request waits for a worker"
        self._queue_seconds = Histogram(name, text, registry=registry, buckets=SECONDS_BUCKETS)
        self._failed_attempts = Counter(
            "baton:attempts_failed", "Tries that ended without an answer", registry=registry
        )

    def readiness(self) -> str | None:
        pending = (f"adapter {name} is not loaded yet: {why}" for name, why in self._fleet.adapters.pending.items())
        return self._find_obstacle() or next(pending, None)

    def can_serve(self, adapter: str = "") -> bool:
        return self.model.is_open and adapter not in self._fleet.adapters.pending and self._find_obstacle() is None

    def _find_obstacle(self) -> str | None:
        if self.admission.is_draining():
            return DRAINING
        if self.model.has_just_failed:
            return f"the model could not be woken: {self.model.reason}"
        if self.model.state != "awake":
            return None  # the next request wakes it
        unready = find_unready(self._fleet.views(), self._placer.no_prefill)
        return unready.detail if unready else None

    def load(self) -> Load:
        return Load(self.admission.num_inside, self.admission.num_waiting, *count_places(self.queue.views()))

    def find_trouble(self) -> str | None:
        """Why the service is degraded: no prefill worker is alive. None if one is, or if nothing is served."""
        views = self._fleet.views()
        if not self._placer.expects_prefill or find_unready(views):
            return None
        lacking = find_no_prefill(views)
        effects = {"fallback": "decode workers prefill", "wait": "prompts wait", "fail": "prompts are refused"}
        return f"{lacking.detail}; {effects[self._placer.no_prefill]}" if lacking else None

    def explain_no_hand_off(self) -> str:
        """Why prompts are not handed off although prefill workers are alive; or empty."""
        return self._placer.local_prefill.explain(self._fleet.views())

    def admit(self, num_choices: int) -> AbstractContextManager[Admitted]:
        return self.admission.inside(num_choices)

    async def generate(
        self, wanted: TokenizedRequest, admitted: Admitted, attempts: list[AttemptRecord] | None = None
    ) -> AsyncGenerator[Tokens, None]:
        now = self._clock()
        arrived = now - wanted.age_s
        first_by = None if wanted.deadline_s is None else arrived + wanted.deadline_s
        request = Request(wanted, arrived + self._request_timeout_s, self._patience_s, now, first_by)
        request.keep_s = self._keep_times.expect(wanted.session, wanted.call or wanted.request_id, now)
        with ExitStack() as held:
            with self.admission.waits(admitted):
                await self._enter(request, admitted, held)
            try:
                while True:
                    record = AttemptRecord(request.attempt, self._clock())
                    if attempts is not None:
                        attempts.append(record)
                    with self.admission.waits():
                        waiter = await self._wait_for_places(request)
                    if waiter.places and waiter.places.placement.is_fallback and self._placer.expects_prefill:
                        admitted.note(f"{waiter.places.placement.why}: a decode worker computes the prompt")
                    try:
                        with self._begin(request, waiter, self.queue, record, self._clock) as attempt:
                            with self.admission.cuttable():
                                await attempt.reserve()
                            while True:
                                with self.admission.cuttable():
                                    tokens = await attempt.next()
                                yield tokens
                                if tokens.finish_reason:
                                    return
                    except AttemptFailed as failed:
                        error = request.go_on(failed, *attempt.incarnations, self._clock())
                        self._note(failed, wanted.request_id)
                        record.close(self._clock(), failed.detail, failed.is_failure)
                        if error is not None:
                            raise error from failed
            except ApiError as error:
                record.close(self._clock())
                record.reason, record.is_failure = error.message, True
                raise
            finally:
                record.close(self._clock())

    async def _enter(self, request: Request, admitted: Admitted, held: ExitStack) -> None:
        """Wait until the model is awake, and up to `patience_s` for a pending adapter; hold both. Raises ApiError."""
        now = self._clock()
        try:
            request.wake_s = await self.model.enter(request.due - now)
        except ApiError as error:
            if request.first_by is not None and self._clock() >= request.first_by:
                raise missed_deadline() from error
            raise
        held.enter_context(self.model.inside())
        if request.wake_s:
            admitted.note(f"the model was asleep: the request waited {request.wake_s:.1f} s until it was awake")
        name, adapters, now = request.wanted.adapter, self._fleet.adapters, self._clock()
        left_s = self._patience_s if request.first_by is None else min(self._patience_s, request.first_by - now)
        await self._changes.until(lambda: name not in adapters.pending, left_s)
        if name in adapters.pending and request.first_by is not None and self._clock() >= request.first_by:
            raise missed_deadline()
        request.hold_adapter(held.enter_context(adapters.hold(name)))

    async def _wait_for_places(self, request: Request) -> Waiter:
        """Wait until the request has places. Raises ApiError where it gets none."""
        began = self._clock()
        if request.resumes_at > began:
            await asyncio.sleep(request.resumes_at - began)
        if request.due <= began:
            raise request.end_late()
        if request.attempt == 1 and (error := self.queue.find_refusal(request, began)) is not None:
            raise error
        waiter = self.queue.join(request)
        self._changes.mark()
        timeout_s = request.due - self._clock()
        try:
            if not await self._changes.until(lambda: waiter.is_over, timeout_s):
                is_over = request.due == request.deadline
                waiter.error = (
                    not_ready(f"no worker had room within {timeout_s:.0f} s") if is_over else missed_deadline()
                )
            if waiter.error is not None:
                raise request.end_with(waiter.error)
        except BaseException:
            self.queue.leave(waiter)
            raise
        waited_s = self._clock() - began
        request.queue_s += waited_s
        self._queue_seconds.observe(waited_s)
        return waiter

    def _note(self, failed: AttemptFailed, request_id: str) -> None:
        if failed.is_failure:
            self._failed_attempts.inc()
        write = log.warning if failed.is_failure else log.debug
        write("attempt ended", request_id=request_id, reason=failed.detail, is_failure=failed.is_failure)
