"""A real decode worker with a goal that it cannot keep: one answer at a time, and those that began elsewhere."""

import grpc
import pytest

from protos import worker_pb2
from runtime import rpc
from tests.support.fake_workers import Signal
from tests.support.real_workers import decode_worker, expected_answer, gateway

PROMPT = list(range(1, 9))
LOCAL = 100


async def test_answers_that_would_break_the_goal_are_refused_and_those_that_began_are_not() -> None:
    signal = Signal()
    async with decode_worker(signal, itl_goal_ms=0.001) as decode, gateway(decode, signal) as opened:
        await opened.ask(1, PROMPT, 4, local=LOCAL)
        await opened.end_of(1)  # steps are measured
        decode.runner.may_run.clear()
        await opened.ask(2, PROMPT, 6, local=LOCAL)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await opened.ask(3, PROMPT, 6, local=LOCAL)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata() or ())[rpc.REFUSED_FOR] == rpc.OVER_GOAL
        begun = [*PROMPT, *expected_answer(PROMPT, 2)]
        await opened.ask(4, begun, 4, local=LOCAL, num_emitted=2)
        status = await opened.worker.Status(worker_pb2.StatusRequest())
        assert (status.goal_answers, status.num_running) == (1, 2)
        decode.runner.may_run.set()
        assert await opened.end_of(2) == await opened.end_of(4) == ("length", "")
        assert opened.tokens[2] == expected_answer(PROMPT, 6) == [*expected_answer(PROMPT, 2), *opened.tokens[4]]


async def test_without_a_goal_workers_name_none() -> None:
    signal = Signal()
    async with decode_worker(signal) as decode, gateway(decode, signal) as opened:
        for handle in (1, 2, 3):
            await opened.ask(handle, PROMPT, 4, local=LOCAL)
        assert not (await opened.worker.Status(worker_pb2.StatusRequest())).goal_answers
        for handle in (1, 2, 3):
            assert await opened.end_of(handle) == ("length", "")
