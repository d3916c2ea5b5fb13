"""One try of a text that has a place: a prefill worker makes its vector."""

from collections.abc import Callable

import grpc

from gateway.router.attempt_record import AttemptRecord, WorkerName
from gateway.router.engine_client import Tokens
from gateway.router.prefill_client import PrefillClient
from gateway.router.queue import Queue, Waiter
from gateway.router.refusals import read_refusal
from gateway.router.request import Request
from protos import prefill_pb2
from wire.timing import Timing


class EmbeddingAttempt:
    """Owns the place of `waiter`, and a call. When its block ends, nothing of it is left here, and soon none there."""

    def __init__(
        self, request: Request, waiter: Waiter, queue: Queue, record: AttemptRecord, clock: Callable[[], float]
    ) -> None:
        """`record`: filled in."""
        assert waiter.places is not None and isinstance(waiter.places.decode, PrefillClient)
        self._request, self._waiter, self._queue, self._record, self._clock = request, waiter, queue, record, clock
        self._worker = waiter.places.decode
        self.incarnations: tuple[str, str | None] = (self._worker.incarnation, None)
        record.place(WorkerName(self._worker.address, self._worker.incarnation), None, clock())

    def __enter__(self) -> "EmbeddingAttempt":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self._waiter)

    async def reserve(self) -> None:
        """Does nothing: a text needs no session."""

    async def next(self) -> Tokens:
        """The vector. Raises AttemptFailed, or ApiError at the request's deadline."""
        request, places = self._request, self._waiter.places
        assert places is not None
        asked = prefill_pb2.EmbedPromptRequest(
            request_id=request.wanted.request_id, prompt=request.packed_tokens, cache_salt=request.wanted.cache_salt,
            adapter=request.adapter,
        )  # fmt: skip
        try:
            done = await self._worker.embed(asked, max(request.due - self._clock(), 0.001))
        except grpc.aio.AioRpcError as error:
            if self._clock() >= request.due:
                raise request.end_late() from error
            failed = read_refusal("decode", self._worker.address, error)
            if failed.why == "no room":
                places.release(self._worker, is_refused=True)
            elif failed.why in ("no adapter", "no slot"):
                self._worker.refuse_adapter(request.adapter, is_loaded=failed.why == "no slot")
            raise failed from error
        places.is_reserved = True
        timing = Timing(
            wake_s=request.wake_s, queue_s=request.queue_s + done.queue_seconds, prefill_s=done.prefill_seconds,
            cached_tokens=done.cached_tokens, attempts=request.attempt,
        )  # fmt: skip
        self._record.close(self._clock())
        return Tokens((), "stop", timing=timing, vector=done.vector)
