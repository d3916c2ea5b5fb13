"""The way to a decode worker: keeps one stream of tokens open, reserves and aborts sessions.

Lives on the asyncio thread. Where each token goes is decode_state.py's.
"""

import asyncio
import time

import grpc
import structlog

from gateway.ring.decode_state import DecodeState
from gateway.ring.worker_link import WorkerLink
from gateway.ring.worker_state import RETRY_S
from protos import decode_pb2, decode_pb2_grpc
from runtime.rpc import new_incarnation

log = structlog.get_logger()


class DecodeLink(WorkerLink):
    """A decode worker."""

    state: DecodeState
    stub_type = decode_pb2_grpc.DecodeStub
    _stub: decode_pb2_grpc.DecodeStub

    def __init__(self, state: DecodeState, channel: grpc.aio.Channel) -> None:
        super().__init__(state, channel)
        self._has_unwanted = asyncio.Event()
        state.on_unwanted = self._has_unwanted.set
        self._aborting = asyncio.Lock()  # held during an Abort call

    def start(self) -> None:
        super().start()
        self._spawn(self._listen())
        self._spawn(self._abort_unwanted())

    async def _listen(self) -> None:
        """Keep one Steps stream open."""
        while True:
            name = new_incarnation()
            detail = "closed its stream"
            try:
                async for events in self._stub.Steps(decode_pb2.StepsRequest(gateway=name)):
                    if self.state.stream != name:
                        self.state.open_stream(name, events.incarnation)
                    now = time.monotonic()
                    for delta in events.deltas:
                        self.state.deliver(delta, now)
            except grpc.aio.AioRpcError as error:
                detail = f"broke its stream ({error.code().name})"
            self.state.close_stream(detail)
            await asyncio.sleep(RETRY_S)

    async def reserve(self, request: decode_pb2.ReserveRequest, timeout_s: float) -> decode_pb2.ReserveResponse:
        """Raises grpc.aio.AioRpcError. A worker that is alive answers within a heartbeat.

        The worker first gets the aborts of the sessions that made room for this one.
        """
        await self._send_aborts()
        timeout_s = min(timeout_s, self._heartbeat_s)
        with self._doubting():
            response: decode_pb2.ReserveResponse = await self._stub.Reserve(request, timeout=timeout_s)
        return response

    async def _abort_unwanted(self) -> None:
        while True:
            await self._has_unwanted.wait()
            await self._send_aborts()

    async def _send_aborts(self) -> None:
        """Many handles at a time."""
        async with self._aborting:
            self._has_unwanted.clear()
            handles = self.state.take_unwanted()
            if not handles:
                return
            request = decode_pb2.AbortRequest(gateway=self.state.stream, handles=handles)
            try:
                await self._stub.Abort(request, timeout=self._heartbeat_s)
            except asyncio.CancelledError:  # of a request that waited for this; the other sessions must still end
                self.state.abort(handles)
                raise
            except grpc.aio.AioRpcError as error:
                log.warning("abort failed", address=self.address, code=error.code().name)
