"""The life of a request below the text: wait for places, try, try again elsewhere, end. Lives on the asyncio thread."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.ring.admission import Admission
from gateway.ring.attempt import Attempt
from gateway.ring.door import DRAINING, Door
from gateway.ring.fleet import Fleet
from gateway.ring.generation import Admitted, Generation, Tokens
from gateway.ring.policy import find_unready
from gateway.ring.queue import Queue
from gateway.ring.reasons import as_error
from gateway.ring.request_machine import Phase, Request
from gateway.ring.routing import Router
from runtime.metrics import SECONDS_BUCKETS

log = structlog.get_logger()


class Dispatcher:
    """The Ring that the rest of the gateway uses."""

    def __init__(
        self,
        fleet: Fleet,
        max_queue: int,
        local_prefill_max_tokens: int | None,
        request_timeout_s: float,
        patience_s: float,
        registry: CollectorRegistry,
        cache_routing: bool = True,
    ) -> None:
        """`patience_s`: how long requests wait for a worker to come back, while there is none.

        `cache_routing`: whether what workers probably have of a prompt counts beside their load.
        """
        self.door = Door()
        self._fleet = fleet
        self._queue = Queue(fleet.states(), Router(local_prefill_max_tokens, cache_routing), max_queue, patience_s)
        self._admission = Admission(self._queue)
        fleet.subscribe(self._admission.pump)
        self._request_timeout_s = request_timeout_s
        self._patience_s = patience_s
        running = Gauge("baton:num_requests_running", "Requests placed on workers", registry=registry)
        running.set_function(lambda: self._queue.num_placed)
        waiting = Gauge("baton:num_requests_waiting", "Requests that wait for a worker", registry=registry)
        waiting.set_function(lambda: self._queue.num_waiting)
        self._queue_seconds = Histogram(
            "baton:request_queue_time_seconds", "Time a request waits for a worker", registry=registry,
            buckets=SECONDS_BUCKETS,
        )  # fmt: skip
        self._failed_attempts = Counter(
            "baton:attempts_failed", "Tries that ended without an answer", registry=registry
        )

    def check_ready(self) -> str | None:
        return DRAINING if self.door.is_draining() else find_unready(self._fleet.views())

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Admitted]:
        with self.door.inside(), self._admission.admit(num_choices) as admitted:
            yield admitted

    async def generate(self, generation: Generation, admitted: Admitted) -> AsyncGenerator[Tokens, None]:
        self._queue.begin_choice(admitted)
        now = time.monotonic()
        request = Request(generation, now + self._request_timeout_s, self._patience_s, now)
        while request.phase is Phase.WAITING:
            async with Attempt(request, self._admission, self._fleet, self._queue_seconds.observe) as attempt:
                while (tokens := await self.door.wait(attempt.next)) is not None:
                    yield tokens
            self._note_end(attempt, generation.request_id)
        if request.failure is not None:
            raise as_error(request.failure)

    def _note_end(self, attempt: Attempt, request_id: str) -> None:
        end = attempt.end
        if end is None or not end.reason:
            return
        if end.is_failure:
            self._failed_attempts.inc()
        write = log.warning if end.is_failure else log.debug
        write("attempt ended", request_id=request_id, reason=end.reason, is_failure=end.is_failure)
