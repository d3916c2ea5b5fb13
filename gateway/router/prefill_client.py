"""Calls of one prefill worker. Lives on the asyncio thread."""

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.router.request import AttemptFailed
from gateway.router.worker_client import WorkerClient
from gateway.router.worker_view import Role
from protos import prefill_pb2, prefill_pb2_grpc


class PrefillClient(WorkerClient):
    """A prefill worker."""

    role: Role = "prefill"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._runs: set[Callable[[AttemptFailed], None]] = set()  # `on_lost` of those under way

    def _judge(self) -> None:
        if (lost := self._find_loss()) is not None:
            for on_lost in self._runs:
                on_lost(lost)

    def _find_loss(self) -> AttemptFailed | None:
        """The failure of runs here; None while the worker answers and makes progress."""
        if (stall := self.find_stall()) is None:
            return None
        return AttemptFailed("lost", f"{self.address} {stall}", "prefill", is_stuck=self.find_silence() is None)

    async def run(
        self, request: prefill_pb2.RunRequest, timeout_s: float, on_lost: Callable[[AttemptFailed], None]
    ) -> prefill_pb2.RunResponse:
        """Have a prompt prefilled and handed over. Raises grpc.aio.AioRpcError, and AttemptFailed if it cannot begin.

        `on_lost`: called at each poll that finds the worker silent or stuck meanwhile.
        """
        if (lost := self._find_loss()) is not None:  # since it was chosen
            raise lost
        self._runs.add(on_lost)
        try:
            with self._doubting():
                response: prefill_pb2.RunResponse = await self._stub.Run(request, timeout=timeout_s)
        finally:
            self._runs.discard(on_lost)
        return response

    async def embed(self, request: prefill_pb2.EmbedPromptRequest, timeout_s: float) -> prefill_pb2.EmbedPromptResponse:
        """The vector of a text. Raises as `run`, AttemptFailed also where the worker is lost meanwhile."""
        if (lost := self._find_loss()) is not None:
            raise lost
        losses: list[AttemptFailed] = []

        def on_lost(failed: AttemptFailed) -> None:
            losses.append(failed)
            call.cancel()

        with self._doubting():
            call = self._stub.EmbedPrompt(request, timeout=timeout_s)
            self._runs.add(on_lost)
            try:
                response: prefill_pb2.EmbedPromptResponse = await call
            except asyncio.CancelledError:
                if losses:
                    raise losses[0] from None
                raise
            finally:
                self._runs.discard(on_lost)
        return response
