"""The real router in front of fake workers, in virtual time: a test lets time pass and looks at what came of it."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from bench.simulate.virtual_time import MemoryChannel, VirtualLoop, refusal
from gateway.adapters.link import LinkedAdapters
from gateway.errors import ApiError
from gateway.policies.forecast import Forecast
from gateway.policies.homes import Homes
from gateway.policies.local_prefill import choose_local_prefill
from gateway.policies.rollout import Rollout
from gateway.router.admission import Admission
from gateway.router.attempt_record import AttemptRecord
from gateway.router.engine_client import TokenizedRequest, Tokens
from gateway.router.fleet import Fleet
from gateway.router.placer import Placer
from gateway.router.router import Router
from runtime.config_parts import NoPrefill
from tests.support.fake_workers import FakeDecode, FakePrefill, FakeWorker, Signal
from wire.sampling import SamplingParams

PROMPT = (1, 2, 3)
HEARTBEAT_S, STALL_S, TIMEOUT_S = 10.0, 60.0, 100.0


def wanted(name: str = "r", max_tokens: int = 4, prompt: Sequence[int] = PROMPT, **fields: Any) -> TokenizedRequest:
    greedy = SamplingParams(temperature=0.0)
    return TokenizedRequest(name, tuple(prompt), max_tokens, greedy, frozenset(), **fields)


class Client:
    """What one client got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[Tokens] = []
        self.error: ApiError | None = None
        self.notes: list[str] = []
        self.attempts: list[AttemptRecord] = []
        self.reads = asyncio.Event()  # cleared: a slow client
        self.reads.set()
        self.task: asyncio.Task[None]

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.parts[-1].finish_reason if self.parts else None

    def leave(self) -> None:
        self.task.cancel()


class Channel(MemoryChannel):
    """To the fake worker that has the address."""

    def __init__(self, fleet: "VirtualFleet", address: str) -> None:
        self.fleet = fleet
        self.address = address

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        verb = path.rpartition("/")[2]

        async def call(request: Any, timeout: float) -> Any:
            worker = self._find()
            try:
                async with asyncio.timeout(timeout):
                    return await getattr(worker, verb)(request, _Context())
            except TimeoutError:
                raise refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

        return call

    def unary_stream(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        async def stream(request: Any) -> AsyncIterator[Any]:
            worker: Any = self._find()
            async for one in worker.Steps(request, _Context()):
                yield one
            if self.fleet.workers.get(self.address) is not worker:
                raise refusal(grpc.StatusCode.UNAVAILABLE, "connection reset")

        return stream

    def _find(self) -> FakeWorker:
        worker = self.fleet.workers.get(self.address)
        if worker is None:
            raise refusal(grpc.StatusCode.UNAVAILABLE, "connection refused")
        return worker


class _Context:
    """Of a call at a fake worker."""

    async def abort(self, code: grpc.StatusCode, detail: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        raise refusal(code, detail, *metadata)


class VirtualFleet:
    """Workers D1, D2, ..., P1, P2, ... that have answered a poll. Use `virtual_fleet`."""

    def __init__(
        self, decode: int = 1, prefill: int = 0, max_running: int = 4, max_queue: int = 8, patience_s: float = 0.0,
        timeout_s: float = TIMEOUT_S, no_prefill: NoPrefill = "fallback", expects_prefill: bool = True,
        local_prefill_max_tokens: int | None = 0, uses_cache: bool = True, context_tokens: int = 0,
        is_started: bool = True, now: float = 0.0, itl_goal_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.now = now
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.loop = VirtualLoop(lambda: self.now, self._after)
        signal = Signal()
        self.decodes = [
            FakeDecode(f"D{number}", signal, max_running, is_manual=True) for number in range(1, decode + 1)
        ]
        self.prefills = [FakePrefill(f"P{number}", signal, max_running) for number in range(1, prefill + 1)]
        self.workers: dict[str, FakeWorker] = {one.incarnation: one for one in (*self.prefills, *self.decodes)}
        for one in self.prefills:
            one.decodes = {decode.incarnation: decode for decode in self.decodes}
        self.adapters = LinkedAdapters()
        self.fleet = Fleet(
            [one.incarnation for one in self.prefills], [one.incarnation for one in self.decodes],
            HEARTBEAT_S, STALL_S, context_tokens, self._open_channel, self.loop.time, adapters=self.adapters,
        )  # fmt: skip
        self.rollout = Rollout()
        local_prefill = choose_local_prefill(local_prefill_max_tokens)
        self.placer = Placer(local_prefill, uses_cache, no_prefill, expects_prefill, self.rollout, Homes())
        self.registry = CollectorRegistry()
        self.router = Router(
            self.fleet,
            Admission(max_queue),
            timeout_s,
            patience_s,
            self.registry,
            bool(itl_goal_s),
            self.placer,
            self.loop.time,
            expectations=Forecast(),
        )
        if is_started:
            self.start()

    def start(self) -> None:
        """Connect to the workers."""
        self.loop.run(self.fleet.start)
        self.run()

    def _open_channel(self, address: str, server_name: str = "") -> Any:
        return Channel(self, address)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), action))

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass, and everything happen that is due."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            self.loop.run(action)
        self.now = end

    # -- clients -----------------------------------------------------------------------------------------------------

    def ask(self, request: str | TokenizedRequest = "r", *choices: TokenizedRequest) -> Client:
        """A client sends a request, and everything due happens. `choices`: further ones; their tokens are not kept."""
        first = wanted(request) if isinstance(request, str) else request
        client = Client(first.request_id)
        client.task = self.loop.create_task(self._serve(client, first, choices))
        self.run()
        return client

    async def _serve(self, client: Client, first: TokenizedRequest, others: Sequence[TokenizedRequest]) -> None:
        async def listen(one: TokenizedRequest, is_first: bool) -> None:
            attempts = client.attempts if is_first else None
            async with aclosing(self.router.generate(one, admitted, attempts)) as stream:
                async for part in stream:
                    if is_first:
                        client.parts.append(part)
                        await client.reads.wait()

        try:
            with self.router.admit(1 + len(others)) as admitted:
                client.notes = admitted.notes
                await asyncio.gather(*(listen(one, one is first) for one in (first, *others)))
        except ApiError as error:
            client.error = error

    # -- workers -----------------------------------------------------------------------------------------------------

    def kill(self, worker: FakeWorker) -> None:
        """Its connections break, and later ones are refused."""
        del self.workers[worker.incarnation]
        if isinstance(worker, FakeDecode):
            worker.break_streams()
        self.run()

    def replace(self, worker: FakeDecode, incarnation: str) -> FakeDecode:
        """A killed worker comes back at its address, with nothing cached."""
        after = FakeDecode(incarnation, worker.signal, is_manual=True)
        self.workers[worker.incarnation] = after
        self.decodes.append(after)
        return after

    def check(self) -> None:
        """All that requests held was given back."""
        self.router.queue.check()
        assert self.router.admission.num_waiting == self.router.admission.num_inside == 0
        assert not self.fleet.changes._waiting, "tasks still wait"
        assert not any(one.num_mine for one in self.fleet.workers()), "places are still held"
        assert not any(one._sessions for one in self.fleet.decode.values()), "sessions are still open"
        assert not self.placer._coming, "equal prompts are still held back"


@contextmanager
def virtual_fleet(**options: Any) -> Iterator[VirtualFleet]:
    """`options`: of VirtualFleet. All requests must have ended when the block does."""
    fleet = VirtualFleet(**options)
    try:
        yield fleet
        fleet.run()
        fleet.check()
    finally:
        fleet.loop.kill()
