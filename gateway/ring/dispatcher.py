"""The life of a request below the text: wait for places, try, try again elsewhere, end. Lives on the asyncio thread."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.errors import ApiError, took_too_long
from gateway.generation import Generation, Tokens
from gateway.ring.admission import Admission
from gateway.ring.attempt import Attempt, AttemptFailedError, NoRoomError
from gateway.ring.fleet import Fleet
from gateway.ring.policy import find_unready
from runtime.metrics import SECONDS_BUCKETS

log = structlog.get_logger()

MAX_ATTEMPTS = 3


class Dispatcher:
    """The Ring as the front sees it."""

    def __init__(
        self,
        fleet: Fleet,
        max_queue: int,
        local_prefill_max_tokens: int,
        request_timeout_s: float,
        patience_s: float,
        registry: CollectorRegistry,
    ) -> None:
        """`patience_s`: how long a request that lost its worker waits for one to come back."""
        self._fleet = fleet
        self._admission = Admission(fleet, max_queue, local_prefill_max_tokens)
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._request_timeout_s = request_timeout_s
        self._patience_s = patience_s
        self._num_running = 0
        Gauge("baton:num_requests_running", "Requests placed on workers", registry=registry).set_function(
            lambda: self._num_running
        )
        Gauge("baton:num_requests_waiting", "Requests that wait for a worker", registry=registry).set_function(
            lambda: self._admission.num_waiting
        )
        self._queue_seconds = Histogram(
            "baton:request_queue_time_seconds", "Time a request waits for a worker", registry=registry,
            buckets=SECONDS_BUCKETS,
        )  # fmt: skip
        self._failed_attempts = Counter(
            "baton:attempts_failed", "Tries that ended without an answer", registry=registry
        )

    def check_ready(self) -> str | None:
        return find_unready(self._fleet.views())

    async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        deadline = time.monotonic() + self._request_timeout_s
        emitted: list[int] = []
        avoid: set[str] = set()
        failures = tries = 0
        while True:
            tries += 1
            try:
                async with aclosing(self._try(generation, tries, tuple(emitted), frozenset(avoid), deadline)) as news:
                    async for tokens in news:
                        emitted.extend(tokens.token_ids)
                        yield tokens
                return
            except NoRoomError as error:
                log.debug("no room after all", request_id=generation.request_id, reason=str(error))
            except AttemptFailedError as error:
                self._failed_attempts.inc()
                failures += 1
                avoid.add(error.culprit)
                log.warning("attempt failed", request_id=generation.request_id, attempt=tries, reason=str(error))
                if time.monotonic() >= deadline:
                    raise took_too_long() from error
                if failures == MAX_ATTEMPTS:
                    raise ApiError(
                        503, f"gave up after {failures} attempts; the last: {error}", code="failed", retry_after_s=1
                    ) from error

    async def _try(
        self, generation: Generation, number: int, emitted: tuple[int, ...], avoid: frozenset[str], deadline: float
    ) -> AsyncGenerator[Tokens, None]:
        """One attempt, from the queue to its end."""
        started = time.monotonic()
        num_missing = len(generation.prompt_ids) + len(emitted) - 1
        async with self._admission.place(
            num_missing, avoid, is_retry=number > 1, timeout_s=deadline - started, patience_s=self._patience_s
        ) as places:
            self._queue_seconds.observe(time.monotonic() - started)
            self._num_running += 1
            attempt = Attempt(generation, number, emitted, places, deadline, self._local_prefill_max_tokens)
            try:
                async with aclosing(attempt.run()) as news:
                    async for tokens in news:
                        yield tokens
            finally:
                self._num_running -= 1
