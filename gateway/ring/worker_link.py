"""The way to one worker: asks for its status again and again, and calls it. Lives on the asyncio thread.

What follows from the answers is worker_state.py's.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

import grpc
import structlog

from gateway.ring.worker_state import WorkerState
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from runtime import rpc

log = structlog.get_logger()

QUIET_S = 1.5  # without an answer or an error to the first question, after which that is logged
# How a call ends when no worker is there, or only an incarnation that drains or does not know our stream.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)


class WorkerLink:
    """One worker: its channel and its state."""

    stub_type: type[prefill_pb2_grpc.PrefillStub] | type[decode_pb2_grpc.DecodeStub]

    def __init__(self, state: WorkerState, channel: grpc.aio.Channel) -> None:
        """`channel`: closed with the link."""
        self.state = state
        self.address = state.address
        self._hurry = asyncio.Event()
        state.on_hurry = self._hurry.set
        self._heartbeat_s = state.heartbeat_s
        self._channel = channel
        self._stub = self.stub_type(self._channel)
        self._silence: str | None = None  # why it does not answer, as logged; empty when it does, None before the first
        self._tasks: list[asyncio.Task[None]] = []

    def find_trouble(self) -> str | None:
        """Why this worker cannot take work; None when it can."""
        return self.state.find_trouble(time.monotonic())

    def start(self) -> None:
        self._spawn(self._poll())
        self._spawn(self._report_quiet())

    async def _report_quiet(self) -> None:
        await asyncio.sleep(QUIET_S)
        if self._silence is None:
            log.warning("worker does not answer", address=self.address, reason=f"nothing came for {QUIET_S:g} s")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_report_bug)
        self._tasks.append(task)

    async def _poll(self) -> None:
        while True:
            try:
                status = await self._stub.Status(decode_pb2.StatusRequest(), timeout=self._heartbeat_s)
            except grpc.aio.AioRpcError as error:
                self._miss(error)
            else:
                self._learn(status)
            await self._rest()

    def _learn(self, status: decode_pb2.WorkerStatus) -> None:
        if self.state.status.peer.incarnation not in ("", status.peer.incarnation):
            log.warning("worker restarted", address=self.address, incarnation=status.peer.incarnation)
        elif self._silence:
            log.info("worker answers again", address=self.address)
        self._silence = ""
        self.state.learn(status, time.monotonic())

    def _miss(self, error: grpc.aio.AioRpcError) -> None:
        """No answer. The reason is logged when it is new. Distrust does not go away by waiting."""
        distrust = rpc.find_distrust(error)
        silence = f"does not answer ({distrust or error.code().name})"
        if silence != self._silence and distrust is not None:
            log.error("worker not trusted", address=self.address, reason=distrust)
        elif silence != self._silence:
            reason = f"{error.code().name}: {error.details()}"
            log.warning("worker does not answer", address=self.address, reason=reason)
        self._silence = silence
        self.state.miss(silence, time.monotonic())

    async def _rest(self) -> None:
        """Until the next poll, which may come closer meanwhile."""
        while (pause_s := self.state.next_poll - time.monotonic()) > 0:
            self._hurry.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
            except TimeoutError:
                return

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """Around a call, which may fail."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() in GONE:
                self.state.doubt(time.monotonic())
            raise

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()


def _report_bug(task: asyncio.Task[None]) -> None:
    """A link's tasks run until cancelled. One that ends otherwise leaves the link dead, which must not be silent."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a link to a worker stopped working", exc_info=task.exception())


class PrefillLink(WorkerLink):
    """A prefill worker."""

    stub_type = prefill_pb2_grpc.PrefillStub
    _stub: prefill_pb2_grpc.PrefillStub

    async def run(self, request: prefill_pb2.RunRequest, timeout_s: float) -> prefill_pb2.RunResponse:
        """Have a prompt prefilled and handed over. Raises grpc.aio.AioRpcError."""
        with self._doubting():
            response: prefill_pb2.RunResponse = await self._stub.Run(request, timeout=timeout_s)
        return response
