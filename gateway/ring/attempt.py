"""One try of a request, from the queue to its end: calls workers as attempt_state.py decides.

Lives on the asyncio thread.
"""

import asyncio
import time
from asyncio import sleep
from collections.abc import Callable, Sequence

import grpc

from gateway.ring.admission import Admission
from gateway.ring.attempt_record import AttemptRecord
from gateway.ring.attempt_state import AttemptState
from gateway.ring.fleet import Fleet
from gateway.ring.generation import Tokens
from gateway.ring.request_machine import Request
from gateway.ring.request_steps import EndAttempt, Event, Prefilled, Refused, Role, SessionUpdate, update_of
from gateway.ring.worker_link import GONE
from protos import decode_pb2, prefill_pb2
from runtime import rpc
from wire.logprobs import TokenLogprobs
from wire.messages import unpack_logprobs, unpack_prefill_timing

_READ_AT_ONCE = 512  # log-probabilities; reading them holds the event loop, 7 us each with the 20 likeliest tokens


class Attempt:
    """One try of `request`. When its block ends, nothing of it is left here, and soon nothing on the workers."""

    def __init__(
        self,
        request: Request,
        admission: Admission,
        fleet: Fleet,
        on_placed: Callable[[float], None],
        record: AttemptRecord | None = None,
    ) -> None:
        """`on_placed`: gets the seconds that the request waited for its places; `record`: filled in, for a trace."""
        self._request = request
        self._admission = admission
        self._fleet = fleet
        self._on_placed = on_placed
        self._record = record
        self._state: AttemptState | None = None  # None until it has places
        self._woken: asyncio.Future[None] | None = None  # while `next` waits for an event
        self._prefilling: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def end(self) -> EndAttempt | None:
        """How it ended; None when it is not over or never had places."""
        return self._state.end if self._state else None

    async def __aenter__(self) -> "Attempt":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._prefilling is not None:
            self._prefilling.cancel()
        if self._state is not None:
            self._state.close()
        if self._record is not None:
            self._record.close(time.monotonic())

    async def next(self) -> Tokens | None:
        """New tokens. None: it is over, and the request waits again or has ended."""
        state = self._state or await self._open()
        while state is not None and state.is_open:
            tokens = self._take(state, await self._next_event(state))
            if tokens is not None:
                return tokens
        return None

    async def _open(self) -> AttemptState | None:
        """Wait for places and reserve a session. None when there are no places."""
        request, started = self._request, time.monotonic()
        if request.resumes_at > started:
            with self._admission.queue.apart():
                await sleep(request.resumes_at - started)
        waiter = await self._admission.wait(request)
        if waiter.reason is not None:
            request.step(waiter.reason, time.monotonic())
            return None
        self._state = state = AttemptState(self._admission.queue, waiter, self._record)
        state.session.on_event = self._wake
        waited_s = time.monotonic() - started
        request.queue_s += waited_s
        self._on_placed(waited_s)
        self._take(state, await self._reserve(state))
        self._ring_alarm()
        return state

    async def _reserve(self, state: AttemptState) -> Event:
        link = self._fleet.decode[state.places.decode.address]
        try:
            return await link.reserve(state.begin(time.monotonic()), timeout_s=self._remaining_s())
        except grpc.aio.AioRpcError as error:
            return _refusal("decode", link.address, error)

    def _take(self, state: AttemptState, event: Event) -> Tokens | None:
        tokens = None
        for command in state.step(event, time.monotonic()):
            if isinstance(command, Tokens):
                tokens = command
            else:
                self._prefilling = asyncio.create_task(self._prefill(state, command))
                self._prefilling.add_done_callback(lambda _task: self._wake())
        return tokens

    async def _prefill(self, state: AttemptState, run: prefill_pb2.RunRequest) -> None:
        """Have the prompt prefilled; the answer goes to the session's inbox, where the request listens."""
        assert state.places.prefill is not None
        link = self._fleet.prefill[state.places.prefill.address]
        try:
            done = await link.run(run, timeout_s=self._remaining_s())
        except grpc.aio.AioRpcError as error:
            state.take_prefill(_refusal("prefill", link.address, error))
        else:
            state.take_prefill(Prefilled(unpack_prefill_timing(done), await _logprobs(done.prompt_logprobs)))

    async def _next_event(self, state: AttemptState) -> Event:
        while (event := state.next_event(time.monotonic())) is None:
            if self._prefilling is not None and self._prefilling.done():
                self._prefilling.result()  # raises where it has a bug: nothing else would come
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        return await _update(event) if isinstance(event, decode_pb2.SessionDelta) else event

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _ring_alarm(self) -> None:
        """Wake at the deadline."""
        remaining_s = self._request.deadline - time.monotonic()
        if remaining_s > 0:
            self._alarm = asyncio.get_running_loop().call_later(remaining_s + 0.001, self._ring_alarm)
        else:
            self._wake()

    def _remaining_s(self) -> float:
        return max(self._request.deadline - time.monotonic(), 0.001)


def _refusal(role: Role, address: str, error: grpc.aio.AioRpcError) -> Refused:
    detail = f"{address}: {error.details()}"
    metadata = tuple(error.trailing_metadata() or ())
    if (rpc.REFUSED_FOR, rpc.NO_ROOM) in metadata:
        return Refused(role, "no room", detail)
    if (rpc.REFUSED_FOR, rpc.GRAMMAR_BUSY) in metadata:
        return Refused(role, "compiling", detail)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        if role == "decode":
            detail = error.details() or "the decode worker refused the request"
        is_grammar = (rpc.FIELD_AT_FAULT, "grammar") in metadata
        return Refused(role, "invalid", detail, is_grammar, str(dict(metadata).get(rpc.PARAM_AT_FAULT, "")))
    is_absent = error.code() in GONE or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return Refused(role, "absent" if is_absent else "failed", detail)


async def _update(delta: decode_pb2.SessionDelta) -> SessionUpdate:
    if not delta.logprobs and not delta.prompt_logprobs:
        return update_of(delta)
    return update_of(delta, await _logprobs(delta.logprobs), await _logprobs(delta.prompt_logprobs))


async def _logprobs(messages: Sequence[decode_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    """Other tasks get their turn while those of a long prompt are read."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(messages), _READ_AT_ONCE):
        if start:
            await sleep(0)
        found += map(unpack_logprobs, messages[start : start + _READ_AT_ONCE])
    return found
