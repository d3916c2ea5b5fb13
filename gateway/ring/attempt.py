"""One try of a request on one pair of workers: reserve, run, and the session's news. Lives on the asyncio thread."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc
import structlog

from gateway.errors import bad_request, took_too_long
from gateway.generation import Generation, Sampling, Tokens
from gateway.ring.admission import Places
from gateway.ring.decode_link import Lost, RemoteSession
from gateway.ring.policy import NO_LIMIT
from gateway.ring.worker_link import PrefillLink
from protos import decode_pb2, kv_pb2

log = structlog.get_logger()


class AttemptFailedError(Exception):
    """This try ended without an answer; another may succeed. `culprit` is the incarnation to avoid."""

    def __init__(self, reason: str, culprit: str) -> None:
        super().__init__(reason)
        self.culprit = culprit


class NoRoomError(Exception):
    """A worker had less room than it seemed; the request goes back to the head of the queue."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A try of `generation`, of which `emitted` tokens are with the client already."""

    generation: Generation
    number: int
    emitted: tuple[int, ...]
    places: Places
    deadline: float  # time.monotonic() at which the request has taken too long
    local_prefill_max_tokens: int

    async def run(self) -> AsyncGenerator[Tokens, None]:
        """The tokens after `emitted`. Raises AttemptFailedError, NoRoomError or ApiError."""
        decode = self.places.decode
        with decode.open_session() as session:
            answer = await self._reserve(session)
            if not answer.needs_prefill and self.places.prefill is not None:
                self.places.release(self.places.prefill)
            prefilling = self._start_prefill(answer, session)
            try:
                async for tokens in self._listen(session):
                    yield tokens
            finally:
                if prefilling is not None:
                    prefilling.cancel()

    async def _reserve(self, session: RemoteSession) -> decode_pb2.ReserveResponse:
        generation, decode = self.generation, self.places.decode
        request = decode_pb2.ReserveRequest(
            request_id=generation.request_id,
            attempt=self.number,
            gateway=session.stream,
            handle=session.handle,
            prompt_ids=[*generation.prompt_ids, *self.emitted],
            max_tokens=generation.max_tokens - len(self.emitted),
            sampling=_sampling_message(generation.sampling),
            stop_token_ids=sorted(generation.stop_token_ids),
            local_prefill_max_tokens=self.local_prefill_max_tokens if self.places.prefill else NO_LIMIT,
        )
        try:
            return await decode.reserve(request, timeout_s=self._remaining_s())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.places.give_back_refused(decode)
                raise NoRoomError(error.details()) from error
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise bad_request(error.details() or "the decode worker refused the request", None) from error
            raise AttemptFailedError(f"{decode.address}: {error.details()}", session.incarnation) from error

    def _start_prefill(self, answer: decode_pb2.ReserveResponse, session: RemoteSession) -> asyncio.Task[None] | None:
        prefill = self.places.prefill
        if not answer.needs_prefill or prefill is None:
            return None
        return asyncio.create_task(self._prefill(prefill, answer.ticket, session))

    async def _prefill(self, prefill: PrefillLink, ticket: kv_pb2.Ticket, session: RemoteSession) -> None:
        """Run the prompt on the prefill worker; trouble goes to the session's inbox, where the request listens."""
        prompt_ids = [*self.generation.prompt_ids, *self.emitted]
        try:
            await prefill.run(self.generation.request_id, prompt_ids, ticket, timeout_s=self._remaining_s())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.places.give_back_refused(prefill)
            session.inbox.put_nowait(_prefill_trouble(prefill, error))
        except Exception as error:  # a bug; the request must hear of it rather than wait
            session.inbox.put_nowait(error)
        finally:
            self.places.release(prefill)

    async def _listen(self, session: RemoteSession) -> AsyncGenerator[Tokens, None]:
        while True:
            try:
                # not wait_for, which before Python 3.12 swallows a cancellation that comes with the news
                async with asyncio.timeout(self._remaining_s()):
                    news = await session.inbox.get()
            except TimeoutError:
                raise took_too_long() from None
            if isinstance(news, Exception):
                raise news
            if isinstance(news, Lost):
                raise AttemptFailedError(news.reason, session.incarnation)
            reason = news.finish_reason
            if reason not in ("", "stop", "length"):
                late = self.places.prefill if reason == "expired" else None
                culprit = late.status.peer.incarnation if late else session.incarnation
                raise AttemptFailedError(f"{self.places.decode.address}: {news.error or reason}", culprit)
            yield Tokens(tuple(news.token_ids), "stop" if reason == "stop" else "length" if reason else None)
            if reason:
                return

    def _remaining_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)


def _prefill_trouble(prefill: PrefillLink, error: grpc.aio.AioRpcError) -> Exception:
    detail = f"{prefill.address}: {error.details()}"
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return NoRoomError(detail)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return bad_request(detail, None)
    return AttemptFailedError(detail, prefill.status.peer.incarnation)


def _sampling_message(sampling: Sampling) -> decode_pb2.SamplingParams:
    return decode_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )
