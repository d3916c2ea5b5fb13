"""`baton drain` at a worker whose answers are broken once."""

from typing import Any

import pytest

from cli.drain import _drain
from protos import worker_pb2, worker_pb2_grpc
from runtime.config_parts import ProcessConfig
from runtime.rpc import bind, build_server
from tests.support.garbling import Garbler


class Draining(worker_pb2_grpc.WorkerServicer):
    """Has one request, which ends after the first question."""

    def __init__(self) -> None:
        self.num_left = 1

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:  # noqa: N802
        return worker_pb2.DrainResponse(num_left=self.num_left, drain_s=60)

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.WorkerStatus:  # noqa: N802
        self.num_left -= 1
        return worker_pb2.WorkerStatus(draining=self.num_left >= 0, num_running=max(self.num_left, 0))


@pytest.mark.parametrize("method", ["Drain", "Status"])
async def test_a_broken_answer_is_asked_for_again(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    garbler = Garbler()
    garbler.wanted[method] = 1
    server = build_server([garbler])
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    worker_pb2_grpc.add_WorkerServicer_to_server(Draining(), server)
    await server.start()
    try:
        assert await _drain(address, ProcessConfig(), True) == 0
    finally:
        await server.stop(None)
    assert garbler.garbled == [method]
    told = capsys.readouterr().out
    assert f"{address} drains: 1 requests left" in told and f"{address} has ended" in told
