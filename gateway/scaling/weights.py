"""Has the workers of one model pause, and take other weights in their places. Lives on the asyncio thread.

All look at the folder first: if one cannot take it, nothing has changed. Then all pause, take it and go on together, so
that no request is given to old weights once one has the new. A worker that fails keeps what it had, gets no new
requests, and is asked again; so is one that has started again with weights that were replaced.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import structlog

from gateway.errors import ApiError, bad_request, not_ready
from gateway.router.fleet import Fleet
from gateway.router.worker_client import WorkerClient
from protos import worker_pb2
from runtime.malformed import ask_twice
from runtime.tasks import run_to_end

log = structlog.get_logger()
LOOK_S = 300.0  # for a worker to read a checkpoint once, from a disk that may be slow
READ_S = 600.0  # to read it into its place
CALL_S, RETRY_S = 10.0, 10.0
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
Errors = dict[str, grpc.aio.AioRpcError]  # by the worker's address


class WeightKeeper:
    """Owns what was given last, and the pauses that this gateway ordered."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._lock = asyncio.Lock()
        self._wanted = worker_pb2.SetWeightsRequest()
        self._paused_until = 0.0
        self._retry_at: dict[str, float] = {}  # incarnation |-> when it may be asked again; inf: it is being asked
        self._reasons: dict[str, str] = {}  # address |-> why it has not taken them, as logged
        fleet.changes.follow(self._look)

    def _find_workers(self) -> Sequence[WorkerClient]:
        """The workers that are there, each once, whatever its roles. Raises ApiError if none decodes."""
        there = [one for one in self._fleet.workers() if one.status.peer.incarnation and one.find_stall() is None]
        there = [one for one in there if not one.is_leaving and not one.duplicate_of]
        if not any(one.role == "decode" for one in there):
            raise not_ready("no decode worker is alive")
        return list({one.status.peer.incarnation: one for one in there}.values())

    async def pause(self, for_s: float, ends: bool = False) -> dict[str, int]:
        """Address of each worker |-> requests that are running there. 0 seconds: they go on. Raises ApiError."""
        async with self._lock:
            self._paused_until = self._clock() + for_s
            return await self._pause(self._find_workers(), for_s, ends)

    async def _pause(self, workers: Sequence[WorkerClient], for_s: float, ends: bool = False) -> dict[str, int]:
        wanted = worker_pb2.PauseRequest(for_s=for_s, ends=ends)
        calls = (one.order(lambda stub: ask_twice(lambda: stub.Pause(wanted, timeout=CALL_S))) for one in workers)
        found = dict(zip(workers, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for one, answer in found.items():
            if isinstance(answer, BaseException):
                log.warning("worker did not pause, or go on", address=one.address, reason=repr(answer))
        return {one.address: got.num_left for one, got in found.items() if not isinstance(got, BaseException)}

    async def change(self, path: str, revision: str, ends: bool, wait_s: float) -> dict[str, Any]:
        """Returns when all have them. ApiError: none has, or it names those that have and have not."""
        async with self._lock:
            workers = self._find_workers()
            weights = await self._agree(workers, path)
            wanted = worker_pb2.SetWeightsRequest(path=path, weights=weights, revision=revision, wait_s=wait_s)
            before, began = {one.status.peer.layout.weights for one in workers}, self._clock()
            await self._pause(workers, wait_s + READ_S, ends)
            try:
                done, errors = await _ask(workers, wanted, wait_s + READ_S)
                if done:
                    self._wanted = wanted
                    self._fleet.replaced |= before
                    self._fleet.replaced.discard(weights)
            finally:
                await self._pause(workers, max(self._paused_until - self._clock(), 0.0))
            if errors:
                raise _describe(errors, ", ".join(done))
            if self._paused_until <= self._clock():
                await self._fleet.changes.until(lambda: not any(one.find_trouble() for one in workers), CALL_S)
        log.info("weights changed", path=path, weights=weights, workers=list(done))
        still_s = {one: answer.still_s for one, answer in done.items()}
        return {"weights": weights, "still_s": still_s, "paused_s": self._clock() - began}

    async def _agree(self, workers: Sequence[WorkerClient], path: str) -> str:
        """The fingerprint that all find there. Raises ApiError."""
        found, errors = await _ask(workers, worker_pb2.SetWeightsRequest(path=path), LOOK_S)
        if errors:
            raise _describe(errors, "")
        there = {answer.weights: one for one, answer in found.items()}
        if len(there) > 1:
            raise bad_request(f"{path} is not the same for all workers: {there}", "path")
        return next(iter(there))

    def _look(self) -> None:
        """Have workers that came back with what was replaced take the new."""
        for one in () if self._lock.locked() else self._fleet.workers():
            name, is_late = one.status.peer.incarnation, one.status.peer.layout.weights in self._fleet.replaced
            if is_late and one.find_stall() is None and self._clock() >= self._retry_at.get(name, 0.0):
                self._retry_at[name] = float("inf")
                run_to_end(self._renew(one, name))

    async def _renew(self, one: WorkerClient, incarnation: str) -> None:
        wanted = self._wanted
        _, errors = await _ask([one], wanted, wanted.wait_s + READ_S)
        reason = "".join(map(_explain, errors.values()))
        if reason != self._reasons.get(one.address):
            write = log.error if reason else log.info
            write("new weights for one that came back", address=one.address, weights=wanted.weights, reason=reason)
        self._reasons[one.address] = reason
        self._retry_at[incarnation] = self._clock() + RETRY_S


async def _ask(
    workers: Sequence[WorkerClient], wanted: worker_pb2.SetWeightsRequest, timeout_s: float
) -> tuple[dict[str, worker_pb2.SetWeightsResponse], Errors]:
    async def ask(one: WorkerClient) -> worker_pb2.SetWeightsResponse | grpc.aio.AioRpcError:
        try:
            return await one.order(lambda stub: ask_twice(lambda: stub.SetWeights(wanted, timeout=timeout_s)))
        except grpc.aio.AioRpcError as error:
            return error

    answers = await asyncio.gather(*map(ask, workers))
    found = {one.address: answer for one, answer in zip(workers, answers, strict=True)}
    errors = {one: answer for one, answer in found.items() if isinstance(answer, grpc.aio.AioRpcError)}
    return {one: answer for one, answer in found.items() if not isinstance(answer, grpc.aio.AioRpcError)}, errors


def _explain(error: grpc.aio.AioRpcError) -> str:
    return error.details() or error.code().name


def _describe(errors: Mapping[str, grpc.aio.AioRpcError], done: str) -> ApiError:
    """Which workers keep what they had, and why. `done`: those that do not."""
    said = "; ".join(f"worker {one}: {_explain(error)}" for one, error in errors.items())
    if done:
        rest = "those get no new requests, and are asked again"
        return not_ready(f"{done} has the new weights; not so {said}; {rest}", "weights_incomplete")
    is_refused = all(error.code() in REFUSED for error in errors.values())
    return bad_request(said, "path") if is_refused else not_ready(f"no worker has the new weights: {said}")
