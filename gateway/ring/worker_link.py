"""One worker as this gateway sees it: its status, asked for again and again, and what we have there.

Lives on the asyncio thread. Which worker serves what is policy.py's.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Literal

import grpc
import structlog

from gateway.ring.policy import WorkerView
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from runtime import rpc
from runtime.rpc import OpenChannel

log = structlog.get_logger()

POLL_S = 1.0  # between two questions for a worker's status, at most
HURRY = 0.2  # part of that time after which a worker is asked that just refused a request
RETRY_S = 0.2  # before a worker that does not answer is asked again
# How a call ends when nobody is there, or only an incarnation that drains or has not heard of us.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What a gateway's links have in common."""

    heartbeat_s: float  # silence after which a worker counts as dead
    stall_s: float  # the same for an engine step
    on_change: Callable[[], None]  # called whenever a worker may have got room or died
    open_channel: OpenChannel


class WorkerLink:
    """One worker: asks for its status again and again, counts what we have there."""

    role: Literal["prefill", "decode"]
    stub_type: type[prefill_pb2_grpc.PrefillStub] | type[decode_pb2_grpc.DecodeStub]

    def __init__(self, address: str, options: LinkOptions) -> None:
        self.address = address
        self.status = decode_pb2.WorkerStatus()
        self.num_mine = 0
        self.is_full = False
        self._heartbeat_s = options.heartbeat_s
        self._stall_s = options.stall_s
        self._on_change = options.on_change
        self._channel = options.open_channel(address)
        self._stub = self.stub_type(self._channel)
        self._heard = -float("inf")  # when it last answered
        self._trouble = "has not answered yet"
        self._is_doubted = False  # a call found nobody since it last answered
        self._has_refused = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._spawn(self._poll())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_report_bug)
        self._tasks.append(task)

    async def _ask_status(self) -> decode_pb2.WorkerStatus:
        status: decode_pb2.WorkerStatus = await self._stub.Status(decode_pb2.StatusRequest(), timeout=self._heartbeat_s)
        return status

    async def _poll(self) -> None:
        while True:
            try:
                status = await self._ask_status()
            except grpc.aio.AioRpcError as error:
                self._note_silence(error)
                pause = RETRY_S
            else:
                self._learn(status)
                pause = min(POLL_S, self._heartbeat_s / 3)  # so that one late answer is no silence
            self._judge()
            self.is_full = False  # ask again at the latest now
            self._on_change()
            await self._rest(pause)

    async def _rest(self, pause: float) -> None:
        """Before the next question: the whole pause, or little of it once a request was refused."""
        self._has_refused.clear()
        try:
            async with asyncio.timeout(pause):
                await self._has_refused.wait()
                await asyncio.sleep(HURRY * pause)
        except TimeoutError:
            pass

    def _note_silence(self, error: grpc.aio.AioRpcError) -> None:
        """No answer: remember why, and say so once when it is a matter of trust, which time does not heal."""
        distrust = rpc.find_distrust(error)
        trouble = f"does not answer ({distrust or error.code().name})"
        if distrust is not None and trouble != self._trouble:
            log.error("worker not trusted", address=self.address, reason=distrust)
        self._trouble = trouble

    def _judge(self) -> None:
        """Act on what the last answer, or its absence, says of the worker."""

    def _learn(self, status: decode_pb2.WorkerStatus) -> None:
        if self.status.peer.incarnation not in ("", status.peer.incarnation):
            log.warning("worker restarted", address=self.address, incarnation=status.peer.incarnation)
        self.status = status
        self._heard = time.monotonic()
        self._trouble = ""
        self._is_doubted = False

    def find_trouble(self) -> str | None:
        """Why this worker cannot take work; None when it can."""
        if (stall := self.find_stall()) is not None:
            return stall
        if self.status.draining:
            return "is draining"
        return "did not take a call" if self._is_doubted else None

    def find_stall(self) -> str | None:
        """Why the work that it has makes no progress; None when it does."""
        if time.monotonic() - self._heard > self._heartbeat_s:
            return self._trouble or f"has been silent for more than {self._heartbeat_s:g} s"
        if self.status.step_age_s > self._stall_s:
            return f"has been in one engine step for {self.status.step_age_s:.0f} s"
        return None

    @property
    def incarnation(self) -> str:
        """Of the worker that would get a request."""
        return self.status.peer.incarnation

    def view(self) -> WorkerView:
        trouble = self.find_trouble()
        peer = self.status.peer
        return WorkerView(
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            layout=peer.layout.SerializeToString(deterministic=True),
            is_alive=trouble is None,
            trouble=trouble or "",
            max_running=max(self.status.max_running, 1),
            num_mine=self.num_mine,
            is_full=self.is_full,
            free_pages=self.status.free_pages,
            num_pages=peer.num_pages,
            page_tokens=peer.layout.page_tokens,
            weights=peer.layout.weights,
            host=peer.host,
            num_threads=self.status.threads,
            num_cores=self.status.cores,
        )

    def leave(self) -> None:
        """A request of ours is over here: its place is free."""
        self.num_mine -= 1
        self.is_full = False
        self._on_change()

    def doubt(self, error: grpc.aio.AioRpcError) -> None:
        """After a call that found nobody there it gets no more work until it answers a question, which comes soon."""
        if error.code() in GONE:
            self._is_doubted = True
            self._has_refused.set()

    def refuse(self) -> None:
        """It had no room for a request of ours: nothing more goes there until a place gets free or it is polled."""
        self.num_mine -= 1
        self.is_full = True
        self._has_refused.set()
        self._on_change()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()


def _report_bug(task: asyncio.Task[None]) -> None:
    """A link's tasks run until cancelled; one that ends otherwise leaves the link dead, which must not be silent."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a link to a worker stopped working", exc_info=task.exception())


class PrefillLink(WorkerLink):
    """A prefill worker."""

    role = "prefill"
    stub_type = prefill_pb2_grpc.PrefillStub
    _stub: prefill_pb2_grpc.PrefillStub

    async def run(self, request: prefill_pb2.RunRequest, timeout_s: float) -> prefill_pb2.RunResponse:
        """Have a prompt prefilled and handed over. Raises grpc.aio.AioRpcError."""
        try:
            response: prefill_pb2.RunResponse = await self._stub.Run(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self.doubt(error)
            raise
        return response
