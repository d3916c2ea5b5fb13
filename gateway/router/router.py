"""The life of a request below the text: wait for places, try, try again elsewhere, end. Lives on the asyncio thread."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.errors import ApiError, missed_deadline, not_ready
from gateway.router.attempt import Attempt
from gateway.router.attempt_record import AttemptRecord
from gateway.router.autoscaling import FleetMetrics, Goals
from gateway.router.drain_gate import DRAINING, DrainGate
from gateway.router.engine_client import Admitted, Load, TokenizedRequest, Tokens
from gateway.router.fleet import Fleet
from gateway.router.placement import Role, count_places, find_no_prefill, find_unready
from gateway.router.placer import Placer
from gateway.router.queue import Queue, Waiter
from gateway.router.request import AttemptFailed, Request
from gateway.router.sleep import ModelGate
from gateway.router.worker_client import WorkerClient
from runtime.ops import SECONDS_BUCKETS

ADAPTER_POLL_S = 0.1
log = structlog.get_logger()


class Router:
    """The EngineClient of this gateway."""

    def __init__(
        self,
        fleet: Fleet,
        max_queue: int,
        request_timeout_s: float,
        patience_s: float,
        registry: CollectorRegistry,
        goals: Goals,
        placer: Placer,
        clock: Callable[[], float] = time.monotonic,
        gate: DrainGate | None = None,
        model: ModelGate | None = None,
    ) -> None:
        """`patience_s`: how long requests wait for a worker to come back, while there is none.

        `goals`: of the desired numbers of workers. `gate`: what the routers of several models share. `model`: where
        requests wait until it is awake.
        """
        self.gate = DrainGate() if gate is None else gate  # an empty one is false
        self.model = model or ModelGate(fleet.changes, clock=clock)
        self._fleet = fleet
        self._placer = placer
        workers: dict[Role, Mapping[str, WorkerClient]] = {"prefill": fleet.prefill, "decode": fleet.decode}
        self._queue = Queue(workers, placer, max_queue, patience_s, fleet.changes.mark, has_goal=bool(goals.itl_s))
        fleet.changes.follow(self._pump)
        self._decided: dict[Waiter, asyncio.Future[None]] = {}
        self._request_timeout_s = request_timeout_s
        self._patience_s = patience_s
        self._clock = clock
        registry.register(FleetMetrics(self._queue, goals))
        text = "Time a request waits for a worker"
        self._queue_seconds = Histogram(
            "baton:request_queue_time_seconds", text, registry=registry, buckets=SECONDS_BUCKETS
        )
        self._failed_attempts = Counter(
            "baton:attempts_failed", "Tries that ended without an answer", registry=registry
        )

    def check_ready(self) -> str | None:
        adapters = ("", *self._fleet.adapters.pending)
        return next(filter(None, map(self.find_obstacle, adapters)), None)

    def find_obstacle(self, adapter: str = "") -> str | None:
        if self.gate.is_draining():
            return DRAINING
        if self.model.has_just_failed:
            return f"the model could not be woken: {self.model.reason}"
        if self.model.state != "awake":
            return None  # the next request wakes it
        if unready := find_unready(self._fleet.views(), self._placer.no_prefill):
            return unready.detail
        reason = self._fleet.adapters.pending.get(adapter)
        return f"adapter {adapter} is not loaded yet: {reason}" if reason else None

    def load(self) -> Load:
        return Load(len(self.gate), self._queue.num_waiting, *count_places(self._queue.views()))

    def is_awake(self) -> bool:
        return self.model.is_open

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
        return self._placer.explain_no_hand_off(self._fleet.views())

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Admitted]:
        with self.gate.inside():
            admitted = self._queue.admit(num_choices)
            try:
                yield admitted
            finally:
                self._queue.dismiss(admitted)

    async def generate(
        self, wanted: TokenizedRequest, admitted: Admitted, attempts: list[AttemptRecord] | None = None
    ) -> AsyncGenerator[Tokens, None]:
        now = self._clock()
        arrived = now - wanted.age_s
        deadline = arrived + self._request_timeout_s
        first_by = None if wanted.deadline_s is None else arrived + wanted.deadline_s
        with self.gate.waiting():
            wake_s = await self._wake(deadline, first_by)
        if wake_s:
            admitted.note(f"the model was asleep: the request waited {wake_s:.1f} s until it was awake")
        with ExitStack() as held:
            held.enter_context(self.model.inside())
            with self.gate.waiting():
                await self._wait_for_adapter(wanted.adapter, first_by)
            self._queue.begin_choice(admitted)
            adapter = held.enter_context(self._fleet.adapters.hold(wanted.adapter))
            request = Request(wanted, deadline, self._patience_s, now, first_by, adapter, wake_s=wake_s)
            try:
                while True:
                    record = AttemptRecord(request.attempt, self._clock())
                    if attempts is not None:
                        attempts.append(record)
                    with self.gate.waiting():
                        waiter = await self._wait_for_places(request)
                    if waiter.places and waiter.places.placement.is_fallback and self._placer.expects_prefill:
                        admitted.note(f"{waiter.places.placement.why}: a decode worker computes the prompt")
                    try:
                        with Attempt(request, waiter, self._queue, record, self._clock) as attempt:
                            with self.gate.waiting():
                                await attempt.reserve()
                            while True:
                                with self.gate.waiting():
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

    async def _wake(self, deadline: float, first_by: float | None) -> float:
        """Wait until the model is awake; returns the seconds that it took. Raises ApiError."""
        until = deadline if first_by is None else min(first_by, deadline)
        try:
            return await self.model.enter(until - self._clock())
        except ApiError as error:
            if first_by is not None and self._clock() >= first_by:
                raise missed_deadline() from error
            raise

    async def _wait_for_adapter(self, name: str, first_by: float | None) -> None:
        """Wait up to `patience_s` for a pending adapter; `hold` then raises. ApiError at the deadline."""
        until = self._clock() + self._patience_s
        until = until if first_by is None else min(until, first_by)
        while name in self._fleet.adapters.pending:  # the registry is pure
            if (left_s := until - self._clock()) <= 0:
                if until == first_by:
                    raise missed_deadline()
                return
            await asyncio.sleep(min(left_s, ADAPTER_POLL_S))

    async def _wait_for_places(self, request: Request) -> Waiter:
        """Raises ApiError where the request gets none."""
        began = self._clock()
        if request.resumes_at > began:
            with self._queue.apart():
                await asyncio.sleep(request.resumes_at - began)
        if request.due <= began:
            raise request.end_late()
        if request.attempt == 1 and (error := self._queue.find_refusal(request, began)) is not None:
            raise error
        waiter = self._queue.join(request)
        decided = self._decided[waiter] = asyncio.get_running_loop().create_future()
        timeout_s = request.due - self._clock()
        self._fleet.changes.mark()
        try:
            # not wait_for, which before Python 3.12 swallows a cancellation that comes with the decision
            async with asyncio.timeout(timeout_s):
                await decided
            if waiter.error is not None:
                raise request.end_with(waiter.error)
        except TimeoutError:
            self._queue.leave(waiter)
            is_over = request.due == request.deadline
            error = not_ready(f"no worker had room within {timeout_s:.0f} s") if is_over else missed_deadline()
            raise request.end_with(error) from None
        except BaseException:
            self._queue.leave(waiter)
            raise
        finally:
            del self._decided[waiter]
        waited_s = self._clock() - began
        request.queue_s += waited_s
        self._queue_seconds.observe(waited_s)
        return waiter

    def _pump(self) -> None:
        """After changes and after each poll, as time counts: wakes requests that now have places or an error."""
        try:
            self._queue.decide(self._clock())
        finally:  # a bug there is no reason to lose those that it has decided on
            for waiter, decided in self._decided.items():
                if (waiter.places or waiter.error) and not decided.done():
                    decided.set_result(None)

    def _note(self, failed: AttemptFailed, request_id: str) -> None:
        if failed.is_failure:
            self._failed_attempts.inc()
        write = log.warning if failed.is_failure else log.debug
        write("attempt ended", request_id=request_id, reason=failed.detail, is_failure=failed.is_failure)
