"""Has the workers of one model pause, and take other weights in their places. Lives on the asyncio thread.

All look at the folder first: if one cannot take it, nothing has changed. Then all pause, take it and go on together, so
that no request is given to old weights once one has the new. A worker that fails keeps what it had, gets no new
requests, and is asked again; so is one that has started again with weights that were replaced.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import structlog

from gateway.errors import ApiError, bad_request, not_ready
from gateway.router.fleet import Fleet
from gateway.router.worker_client import WorkerClient
from runtime.rpc import MAX_PAUSE_S
from runtime.tasks import run_to_end

log = structlog.get_logger()
LOOK_S = 300.0  # for a worker to read a checkpoint once, from a disk that may be slow
READ_S = 600.0  # to read it into its place
CALL_S, RETRY_S = 10.0, 10.0
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was given last."""

    path: str  # on the workers' hosts
    weights: str  # its fingerprint
    revision: str
    wait_s: float  # for what is running to end


@dataclass(frozen=True, slots=True)
class Changed:
    """What a change took."""

    weights: str
    still_s: Mapping[str, float]  # address |-> seconds in which the worker computed nothing for it
    paused_s: float  # in which no worker took new requests


class WeightKeeper:
    """Owns what was given, and the pauses that this gateway ordered."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._lock = asyncio.Lock()
        self._wanted: Wanted | None = None
        self._paused_until = 0.0
        self._retry_at: dict[str, float] = {}  # incarnation |-> when it may be asked again; inf: it is being asked
        self._reasons: dict[str, str] = {}  # address |-> why it has not taken them, as logged
        fleet.changes.follow(self._look)

    def _find_workers(self) -> Sequence[WorkerClient]:
        """Each once, whatever its roles. Raises ApiError without one that decodes."""
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
        calls = (one.set_pause(for_s, ends, CALL_S) for one in workers)
        found = await asyncio.gather(*calls, return_exceptions=True)
        for one, left in zip(workers, found, strict=True):
            if isinstance(left, BaseException):
                log.warning("worker did not pause, or go on", address=one.address, reason=repr(left))
        return {one.address: left for one, left in zip(workers, found, strict=True) if isinstance(left, int)}

    async def change(self, path: str, revision: str, ends: bool, wait_s: float) -> Changed:
        """Returns when all have them. ApiError: none has, or it names those that have and have not."""
        async with self._lock:
            workers = self._find_workers()
            weights = _agree(path, workers, await self._set(workers, Wanted(path, "", "", 0.0), LOOK_S))
            wanted, began = Wanted(path, weights, revision, wait_s), self._clock()
            before = {one.address: one.status.peer.layout.weights for one in workers}
            await self._pause(workers, min(wait_s + READ_S, MAX_PAUSE_S), ends)
            try:
                found = await self._set(workers, wanted, wait_s + READ_S)
                done = {one: still for one, still in found.items() if isinstance(still, float)}
                if done:
                    self._wanted = wanted
                    self._fleet.replaced |= set(before.values())
                    self._fleet.replaced.discard(weights)
            finally:
                await self._pause(workers, max(self._paused_until - self._clock(), 0.0))
            if len(done) < len(workers):
                raise _describe({one: why for one, why in found.items() if one not in done}, list(done))
            if self._paused_until <= self._clock():
                await self._fleet.changes.until(lambda: not any(one.find_trouble() for one in workers), CALL_S)
            log.info("weights changed", path=path, weights=weights, workers=list(done))
            return Changed(weights, done, self._clock() - began)

    async def _set(
        self, workers: Sequence[WorkerClient], wanted: Wanted, timeout_s: float
    ) -> dict[str, float | str | grpc.aio.AioRpcError]:
        """Address |-> the fingerprint where it is wanted to look, the seconds of a change, or what went wrong."""

        async def ask(one: WorkerClient) -> float | str | grpc.aio.AioRpcError:
            try:
                answer = await one.set_weights(wanted.path, wanted.weights, wanted.revision, wanted.wait_s, timeout_s)
            except grpc.aio.AioRpcError as error:
                return error
            return answer.still_s if wanted.weights else answer.weights

        found = await asyncio.gather(*map(ask, workers))
        return {one.address: answer for one, answer in zip(workers, found, strict=True)}

    def _look(self) -> None:
        """Have workers that came back with what was replaced take the new."""
        if self._wanted is None or self._lock.locked():
            return
        for one in self._fleet.workers():
            peer = one.status.peer
            is_late = peer.layout.weights in self._fleet.replaced and one.find_stall() is None
            if is_late and self._clock() >= self._retry_at.get(peer.incarnation, 0.0):
                self._retry_at[peer.incarnation] = float("inf")
                run_to_end(self._renew(one, self._wanted))

    async def _renew(self, one: WorkerClient, wanted: Wanted) -> None:
        incarnation = one.status.peer.incarnation
        found = (await self._set([one], wanted, wanted.wait_s + READ_S))[one.address]
        reason = found.details() or found.code().name if isinstance(found, grpc.aio.AioRpcError) else ""
        if reason and reason != self._reasons.get(one.address):
            log.error("worker has not taken the new weights", address=one.address, reason=reason)
        elif not reason:
            log.info("worker has the new weights", address=one.address, weights=wanted.weights)
        self._reasons[one.address] = reason
        self._retry_at[incarnation] = self._clock() + RETRY_S


def _agree(path: str, workers: Sequence[WorkerClient], found: Mapping[str, object]) -> str:
    """The fingerprint that all have found. Raises ApiError."""
    wrong = {one: why for one, why in found.items() if not isinstance(why, str)}
    if wrong:
        raise _describe(wrong, [])
    first = workers[0].address
    for one, weights in found.items():
        if weights != found[first]:
            raise bad_request(f"{path} has the weights {weights} for {one}, and {found[first]} for {first}", "path")
    return str(found[first])


def _describe(wrong: Mapping[str, object], done: Sequence[str]) -> ApiError:
    """Which workers keep what they had, and why."""
    errors = {one: why for one, why in wrong.items() if isinstance(why, grpc.aio.AioRpcError)}
    said = "; ".join(f"worker {one}: {why.details() or why.code().name}" for one, why in errors.items())
    if not done:
        is_refused = all(why.code() in REFUSED for why in errors.values())
        return bad_request(said, "path") if is_refused else not_ready(f"no worker has the new weights: {said}")
    have = ", ".join(done)
    rest = "those get no new requests, and are asked again"
    return not_ready(f"{have} has the new weights; not so {said}; {rest}", "weights_incomplete")
