"""A gateway: the real router, fleet and clients of workers on a virtual loop; its channels go through the world."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from bench.simulate.virtual_time import MemoryChannel, VirtualLoop, refusal
from gateway.adapters.link import LinkedAdapters
from gateway.errors import ApiError
from gateway.policies.forecast import Forecast
from gateway.policies.homes import Homes
from gateway.policies.rollout import Rollout
from gateway.router.admission import Admission
from gateway.router.engine_client import TokenizedRequest
from gateway.router.fleet import CHECK_S, Fleet
from gateway.router.placer import Placer
from gateway.router.policies import LocalPrefill
from gateway.router.router import Router
from gateway.router.worker_client import POLL_S
from protos import decode_pb2, prefill_pb2, worker_pb2
from tests.simulator.decode import SimDecode, Stream
from tests.simulator.prefill import SimPrefill
from tests.simulator.values import Client
from tests.simulator.world import Failure, Process, ViolationError, World

HEARTBEAT_S = 3.0  # polls are a third of it apart, at most POLL_S
STALL_S = 60.0
PATIENCE_S = 4.0
TIMEOUT_S = 12.0
MAX_QUEUE = 100
SLACK_S = 0.1  # a message within a process
NOTICED_S = HEARTBEAT_S + POLL_S + SLACK_S  # until a silent worker's sessions and runs are lost
GONE, LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


class SimGateway(Process):
    """One gateway and its clients."""

    timeout_s = TIMEOUT_S  # of requests

    def __init__(
        self, world: World, name: str, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode],
        local_prefill_max_tokens: int, uses_cache: bool, has_goal: bool,
    ) -> None:  # fmt: skip
        self._prefills, self._decodes = ({one.name: one for one in some} for some in (prefills, decodes))
        self._has_goal = has_goal
        self._routing = (LocalPrefill(local_prefill_max_tokens), uses_cache)
        self.loans_rng = random.Random(f"loans {world.seed}")
        self.keys_rng = random.Random(f"keys {world.seed}")
        self.wrong_keys = self.keys_rng.choice([0.0, 0.0, 0.0, 0.5])  # share of reports of keys that are wrong
        self.num_open = 0  # requests announced and not ended; while it is 0, no call goes out
        super().__init__(world, name)

    def boot(self) -> None:
        world = self.world
        self.loop = self.build_loop()
        self.rollout = Rollout()
        self.fleet = Fleet(
            list(self._prefills), list(self._decodes), HEARTBEAT_S, STALL_S, 0, self._open_channel, self.loop.time,
            adapters=LinkedAdapters(),
        )  # fmt: skip
        self.build_routers()
        self.tasks: dict[Client, asyncio.Task[str]] = {}
        self._arriving: list[Client] = []  # connected, not yet read
        self._seen: tuple[int, ...] = ()
        self._num_names = 0
        self._awake_since = world.now
        self.loop.run(self.start)

    def build_loop(self) -> VirtualLoop:
        world, epoch = self.world, self.epoch
        return VirtualLoop(lambda: world.now, lambda delay, action: world.at(delay, self, epoch, action))

    def build_routers(self) -> None:
        self.placer = Placer(*self._routing, revisions=self.rollout, homes=Homes())
        self.router = Router(
            self.fleet, Admission(MAX_QUEUE), self.timeout_s, PATIENCE_S, CollectorRegistry(), self._has_goal,
            self.placer, self.loop.time, expectations=Forecast(),
        )  # fmt: skip
        self.queue = self.router.queue

    def find_router(self, wanted: TokenizedRequest) -> Router:
        return self.router

    def start(self) -> None:
        self.fleet.start()

    def _open_channel(self, address: str, server_name: str = "") -> Any:
        if address in self._decodes:
            return DecodeChannel(self, self._decodes[address])
        return PrefillChannel(self, self._prefills[address])

    def choose_worker(self) -> SimPrefill | SimDecode:
        """Any."""
        return self.keys_rng.choice([*self._prefills.values(), *self._decodes.values()])

    def new_name(self) -> int:
        self._num_names += 1
        return self._num_names

    def resume(self) -> None:
        self._awake_since = self.world.now
        super().resume()

    def check(self) -> None:
        runs = ((one, one._runs) for one in self.fleet.prefill.values())
        sessions = ((one, one._sessions) for one in self.fleet.decode.values())
        for worker, left in (*runs, *sessions):
            if left and self.world.now - max(worker._heard, self._awake_since) > NOTICED_S:
                raise ViolationError(f"{self.name} waits for {worker.address}, which is silent")
        num_waiting = len(self.queue._waiting)
        seen = num_waiting, self.queue.num_placed, *(one.num_mine for one in self.fleet.workers())
        if seen == self._seen:
            return
        self._seen = seen
        self.queue.check()
        views = self.fleet.views()
        for worker in self.fleet.workers():
            just_silent = 0 < self.world.now - worker.view_until < CHECK_S * 100
            if not (worker.duplicate_of or just_silent or worker.view() in views):
                raise ViolationError(f"{self.name} has an old view of {worker.address}")
        for request in (waiter.request for waiter in self.queue._waiting if waiter.request.is_retry):
            if not (request.emitted or request.avoid or request.mistaken):
                raise ViolationError(f"{request.wanted.request_id} was refused for want of room and goes before others")
        if num_waiting + self.queue.num_placed > self.num_requests:
            raise ViolationError(f"{self.name} keeps places of requests that are over")

    @property
    def num_requests(self) -> int:
        """Requests that are not over, at most."""
        return len(self.tasks)

    def check_end(self) -> None:
        """No request is left."""
        if self.tasks or self.router.admission.num_waiting or any(one.num_mine for one in self.fleet.workers()):
            raise ViolationError(f"{self.name} still holds places")
        if any(decode._sessions for decode in self.fleet.decode.values()):
            raise ViolationError(f"{self.name} still has sessions")
        if self.placer._coming:
            raise ViolationError(f"{self.name} still holds requests back")

    def crash(self) -> None:
        clients, self.tasks = [*self.tasks, *self._arriving], {}
        for client in clients:
            self._dismiss(client, "gateway died")
        super().crash()
        self.loop.kill()

    def connect(self, client: Client, wanted: TokenizedRequest) -> None:
        """A client connects; a paused gateway notices later, a dead one never."""
        if self.is_up:
            self._arriving.append(client)
            self.later(0.0, lambda: self._submit(client, wanted))
        else:
            self._dismiss(client, "refused")

    def _submit(self, client: Client, wanted: TokenizedRequest) -> None:
        self._arriving.remove(client)
        task = self.tasks[client] = self.loop.create_task(self._serve(client, wanted))
        task.add_done_callback(lambda task: self._end(client, task))

    async def _serve(self, client: Client, wanted: TokenizedRequest) -> str:
        """How it ended."""
        limit = self.loop.time() + (float("inf") if wanted.deadline_s is None else wanted.deadline_s + SLACK_S)
        began, router = 0.0, self.find_router(wanted)
        try:
            with router.admit(1) as admitted:
                async with aclosing(router.generate(wanted, admitted)) as stream:
                    async for tokens in stream:
                        self.world.note("tokens", client.name, tokens)
                        began = began if client.got else self.loop.time()
                        if self.loop.time() > began > limit:  # unless all of it was there after a pause
                            return "violation: the answer began after its deadline"
                        client.take(tokens)
        except ApiError as error:
            if error.status == 429 and client.got:
                return "violation: an answer that had begun was refused"
            return f"error {error.status} {error}"
        return "answer"

    def _end(self, client: Client, task: asyncio.Task[str]) -> None:
        if self.tasks.pop(client, None) is not None:  # else the gateway died
            self._dismiss(client, "left" if task.cancelled() else task.result())

    def leave(self, client: Client) -> None:
        """The client disconnects."""
        if client in self.tasks:
            self.tasks[client].cancel()

    def _dismiss(self, client: Client, how: str) -> None:
        client.finish(how, self.world.now)
        self.num_open -= 1


class SimChannel(MemoryChannel):
    """From one incarnation of a gateway to a worker."""

    def __init__(self, gateway: SimGateway, worker: Any) -> None:
        self.gateway, self.worker, self.epoch = gateway, worker, gateway.epoch

    async def Status(self, request: worker_pb2.StatusRequest, timeout: float) -> Any:
        status = await self.call(lambda answer: answer(self.worker.status(request)), timeout)
        if self.gateway.keys_rng.random() < self.gateway.wrong_keys:
            status.keys.gained = self.gateway.choose_worker().keys.pack(0).gained  # as if it were another one's
        return status

    def name_source(self, request: decode_pb2.ReserveRequest | prefill_pb2.RunRequest) -> None:
        """In half of the calls another worker than the gateway means, as if what it knows were late or wrong."""
        loans = self.worker.loans
        rng = self.gateway.world.rng if loans.is_forced else self.gateway.loans_rng
        if loans.lenders and (loans.is_forced or rng.random() < 0.5):
            lender = rng.choice(loans.lenders)
            request.source.address, request.source.incarnation = lender.name, lender.incarnation

    async def call(self, serve: Callable[[Callable[[Any], None]], None], timeout_s: float) -> Any:
        """As a stub's call. It never ends once the gateway has no requests, so that the world comes to rest."""
        gateway = self.gateway
        answered: asyncio.Future[Any] = gateway.loop.create_future()

        def take(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        if gateway.num_open and self.epoch == gateway.epoch:
            gateway.world.call(gateway, self.worker, serve, take, timeout_s)
        answer = await answered
        if isinstance(answer, Failure):
            raise refusal(LATE if answer.why == "deadline" else GONE, answer.why)
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        return answer


class PrefillChannel(SimChannel):
    """Its verbs are those of prefill.proto."""

    async def Run(self, request: prefill_pb2.RunRequest, timeout: float) -> Any:
        gateway, worker, name = self.gateway, self.worker, self.gateway.new_name()
        caller = (gateway.name, self.epoch)
        self.name_source(request)
        try:
            return await self.call(lambda answer: worker.run(name, caller, request, timeout, answer), timeout)
        except asyncio.CancelledError:
            if self.epoch == gateway.epoch:
                gateway.world.send(gateway, worker, lambda: worker.cancel(name))
            raise


class DecodeChannel(SimChannel):
    """Its verbs are those of decode.proto."""

    async def Reserve(self, request: decode_pb2.ReserveRequest, timeout: float) -> Any:
        self.name_source(request)
        return await self.call(lambda answer: self.worker.reserve(request, answer), timeout)

    async def Abort(self, request: decode_pb2.AbortRequest, timeout: float) -> Any:
        return await self.call(lambda answer: self.worker.abort(request, answer), timeout)

    async def Steps(self, request: decode_pb2.StepsRequest) -> AsyncIterator[decode_pb2.StepEvents]:
        arrived: asyncio.Queue[decode_pb2.SessionDelta | None] = asyncio.Queue()
        stream = Stream(request.gateway, self.gateway, arrived.put_nowait, lambda: arrived.put_nowait(None))
        try:
            incarnation = await self.call(lambda answer: self.worker.steps(stream, answer), HEARTBEAT_S)
        except grpc.aio.AioRpcError:
            stream.break_off(self.worker)
            raise
        yield decode_pb2.StepEvents(incarnation=incarnation)
        while (delta := await arrived.get()) is not None:
            yield decode_pb2.StepEvents(deltas=[delta])
        raise refusal(GONE, "lost its stream")
