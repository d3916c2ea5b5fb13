"""The life of a request below the text: wait for places, try, try again elsewhere, end. Lives on the asyncio thread."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.ring.admission import Admission
from gateway.ring.advice import Goals
from gateway.ring.attempt import Attempt
from gateway.ring.attempt_record import AttemptRecord
from gateway.ring.door import DRAINING, Door
from gateway.ring.fleet import Fleet
from gateway.ring.fleet_metrics import FleetMetrics
from gateway.ring.generation import Admitted, Generation, Tokens
from gateway.ring.policy import find_no_prefill, find_unready
from gateway.ring.queue import Queue
from gateway.ring.reasons import as_error
from gateway.ring.request_machine import Phase, Request
from gateway.ring.routing import Router
from runtime.ops import SECONDS_BUCKETS

log = structlog.get_logger()


class Dispatcher:
    """The Ring that the rest of the gateway uses."""

    def __init__(
        self,
        fleet: Fleet,
        max_queue: int,
        request_timeout_s: float,
        patience_s: float,
        registry: CollectorRegistry,
        goals: Goals,
        router: Router,
    ) -> None:
        """`patience_s`: how long requests wait for a worker to come back, while there is none.

        `goals`: of the desired numbers of workers.
        """
        self.door = Door()
        self._fleet = fleet
        self._queue = Queue(fleet.states(), router, max_queue, patience_s)
        fleet.on_join, fleet.on_leave = self._queue.add, self._queue.remove
        self._admission = Admission(self._queue)
        fleet.subscribe(self._admission.pump)
        self._request_timeout_s = request_timeout_s
        self._patience_s = patience_s
        registry.register(FleetMetrics(self._queue, goals))
        self._queue_seconds = Histogram(
            "baton:request_queue_time_seconds", "Time a request waits for a worker", registry=registry,
            buckets=SECONDS_BUCKETS,
        )  # fmt: skip
        self._failed_attempts = Counter(
            "baton:attempts_failed", "Tries that ended without an answer", registry=registry
        )

    def check_ready(self) -> str | None:
        if self.door.is_draining():
            return DRAINING
        unready = find_unready(self._fleet.views(), self._queue.router.no_prefill)
        return unready.detail if unready else None

    def find_trouble(self) -> str | None:
        """Why the service is degraded: no prefill worker is alive. None if one is, or if nothing is served."""
        views = self._fleet.views()
        if not self._queue.router.expects_prefill or find_unready(views):
            return None
        lacking = find_no_prefill(views)
        effects = {"fallback": "decode workers prefill", "wait": "prompts wait", "fail": "prompts are refused"}
        return f"{lacking.detail}; {effects[self._queue.router.no_prefill]}" if lacking else None

    def explain_no_hand_off(self) -> str:
        """Why prompts are not handed off although prefill workers are alive; or empty."""
        return self._queue.router.explain_no_hand_off(self._fleet.views())

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Admitted]:
        with self.door.inside(), self._admission.admit(num_choices) as admitted:
            yield admitted

    async def generate(
        self, generation: Generation, admitted: Admitted, attempts: list[AttemptRecord] | None = None
    ) -> AsyncGenerator[Tokens, None]:
        self._queue.begin_choice(admitted)
        now = time.monotonic()
        request = Request(generation, now + self._request_timeout_s, self._patience_s, now)
        while request.phase is Phase.WAITING:
            record = None
            if attempts is not None:
                attempts.append(record := AttemptRecord(request.attempt, time.monotonic()))
            async with Attempt(request, self._admission, self._fleet, self._queue_seconds.observe, record) as attempt:
                while (tokens := await self.door.wait(attempt.next)) is not None:
                    yield tokens
            self._note_end(attempt, generation.request_id)
        if request.failure is not None:
            error = as_error(request.failure)
            if attempts:
                attempts[-1].reason, attempts[-1].is_failure = error.message, True
            raise error

    def _note_end(self, attempt: Attempt, request_id: str) -> None:
        end = attempt.end
        if end is None or not end.reason:
            return
        if end.is_failure:
            self._failed_attempts.inc()
        write = log.warning if end.is_failure else log.debug
        write("attempt ended", request_id=request_id, reason=end.reason, is_failure=end.is_failure)
