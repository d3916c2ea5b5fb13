"""Both workers in this process, real but for the model: a runner whose tokens follow from the KV it finds in the pool.

So an answer is right only when every position's KV was computed, handed over and kept.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from bench.decoding import NO_SPECULATION
from decode_worker.grammar.compiler import GrammarCompiler
from decode_worker.grammar.grammars import Grammars
from decode_worker.intake import Intake
from decode_worker.loop import DecodeLoop
from decode_worker.metrics import DecodeMetrics, GrammarMetrics
from decode_worker.service import DecodeService
from decode_worker.session import Delta
from decode_worker.session_table import SessionTable
from decode_worker.streams import GatewayStreams
from demo.paths import TARGET_DIR
from engine.batch import SequenceSlice
from engine.choice import Choice, Chosen, TokenLogprobs
from engine.kvcache.allocator import PageAllocator
from engine.kvcache.pool import Pool
from engine.runner import Runner
from kvtransfer.grpc_bytes import PageServer
from kvtransfer.identity import PoolFacts, build_peer
from prefill_worker.batching import Planned
from prefill_worker.loop import PrefillLoop
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.offers import Offers
from prefill_worker.run_table import RunTable
from prefill_worker.service import PrefillService
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2_grpc
from runtime.config_parts import Transport
from runtime.lifecycle import Shutdown
from runtime.rpc import bind, build_server, host_identity, new_incarnation, open_channel
from tests.fake_workers import PATIENCE_S, Signal
from tests.pool_process import build_pool

PAGE_TOKENS, NUM_PAGES, CHUNK_TOKENS, CONTEXT_TOKENS, VOCAB = 4, 24, 6, 80, 1000
PLAIN = decode_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0)


def kv_value(token: int, position: int) -> int:
    return token + 31 * position


def expected_answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(kv_value(token, position) for position, token in enumerate(tokens)) % 251)
    return tokens[len(prompt) :]


class KvRunner(Runner):
    """Writes each position's value into its KV; the next token is the sum of all values of the sequence."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.failures: deque[Exception] = deque()  # of the next steps
        self.may_run = threading.Event()
        self.may_run.set()
        self.pauses_after_token = False  # the step that chooses one clears `may_run`

    def run(self, slices: Sequence[SequenceSlice], choices: Sequence[Choice]) -> list[Chosen]:
        assert self.may_run.wait(PATIENCE_S)
        if self.failures:
            raise self.failures.popleft()
        kv, answers, asked = self._pool.tensor, [], iter(choices)
        for part in slices:
            end = part.begin + len(part.token_ids)
            for position, token in zip(range(part.begin, end), part.token_ids, strict=True):
                row = kv[part.pages[position // PAGE_TOKENS], :, :, :, position % PAGE_TOKENS, :]
                row.fill_(kv_value(token, position))
            for seen in range(end - part.num_logits + 1, end + 1):
                rows = (kv[part.pages[at // PAGE_TOKENS], -1, -1, -1, at % PAGE_TOKENS, -1] for at in range(seen))
                answers.append(answer_choice(next(asked), seen, sum(int(row) for row in rows) % 251))
        assert next(asked, None) is None
        if answers and self.pauses_after_token:
            self.may_run.clear()
        return answers


def answer_choice(choice: Choice, position: int, likeliest: int) -> Chosen:
    """Gives a token the log-probability -(its own distance from the likeliest), so that it tells the KV seen."""
    assert choice.position == position
    while likeliest in choice.forbidden:
        likeliest += 1
    token = choice.tokens[position] if choice.is_given else likeliest
    if choice.num_logprobs is None:
        return Chosen(token, None)
    top = tuple(range(likeliest, likeliest + choice.num_logprobs))
    return Chosen(token, TokenLogprobs(-abs(token - likeliest), top, tuple(-float(rank) for rank in range(len(top)))))


class TellingAllocator(PageAllocator):
    """Fires a signal whenever pages come back."""

    def __init__(self, pool: Pool, signal: Signal) -> None:
        super().__init__(pool.num_pages, pool.generations)
        self._tell = partial(asyncio.get_running_loop().call_soon_threadsafe, signal.fire)

    def free(self, pages: Iterable[int]) -> None:
        super().free(pages)
        with suppress(RuntimeError):  # the event loop is closed
            self._tell()


def build_identity(role: str, address: str, pool: Pool) -> kv_pb2.Peer:
    facts = PoolFacts("w", "float32", 2, 1, PAGE_TOKENS, 8, pool.num_pages, pool.fd, pool.pages_offset)
    return build_peer(role, address, new_incarnation(), os.getpid(), host_identity(), facts)


@dataclass
class DecodeWorker:
    peer: kv_pb2.Peer
    pool: Pool
    table: SessionTable
    runner: KvRunner
    intake: Intake
    service: DecodeService
    metrics: DecodeMetrics


@asynccontextmanager
async def decode_worker(
    signal: Signal, transport: Transport = "auto", lease_s: float = PATIENCE_S, port: int = 0
) -> AsyncIterator[DecodeWorker]:
    """Wired as in decode_worker/main.py."""
    server = build_server()
    address = f"127.0.0.1:{bind(server, '127.0.0.1', port)}"
    pool = build_pool(NUM_PAGES)
    peer, runner = build_identity("decode", address, pool), KvRunner(pool)
    table = SessionTable(TellingAllocator(pool, signal), PAGE_TOKENS, 8, lease_s)
    metrics, streams = DecodeMetrics(table), GatewayStreams(peer.incarnation)
    asyncio_loop = asyncio.get_running_loop()

    def publish(step: int, deltas: list[Delta]) -> None:
        asyncio_loop.call_soon_threadsafe(streams.publish, step, deltas)

    loop = DecodeLoop(table, runner, pool, NO_SPECULATION, CHUNK_TOKENS, publish, metrics)
    intake = Intake(
        peer, pool, table, loop.thread, metrics, transport, is_transport_required=True, read_timeout_s=lease_s
    )
    shutdown = Shutdown(0, lambda: 0)
    grammars = Grammars(GrammarCompiler(TARGET_DIR, VOCAB, cpu_s=1), 1 << 20, GrammarMetrics(metrics))
    service = DecodeService(
        peer, table, loop.thread, intake, streams, metrics, CONTEXT_TOKENS, VOCAB, shutdown, NO_SPECULATION,
        grammars,
    )  # fmt: skip
    decode_pb2_grpc.add_DecodeServicer_to_server(service, server)
    loop.thread.start()
    await server.start()
    try:
        yield DecodeWorker(peer, pool, table, runner, intake, service, metrics)
    finally:
        runner.may_run.set()
        streams.close()
        await server.stop(None)
        await intake.close()
        await grammars.close()
        loop.thread.stop(PATIENCE_S)
        table.check()


@dataclass
class PrefillWorker:
    peer: kv_pb2.Peer
    pool: Pool
    table: RunTable
    runner: KvRunner
    metrics: PrefillMetrics
    offers: Offers
    stub: prefill_pb2_grpc.PrefillStub


@asynccontextmanager
async def prefill_worker(
    signal: Signal, heartbeat_s: float = PATIENCE_S, port: int = 0, offer_s: float = PATIENCE_S
) -> AsyncIterator[PrefillWorker]:
    """Wired as in prefill_worker/main.py."""
    server = build_server()
    address = f"127.0.0.1:{bind(server, '127.0.0.1', port)}"
    pool = build_pool(NUM_PAGES)
    peer, runner = build_identity("prefill", address, pool), KvRunner(pool)
    table = RunTable(TellingAllocator(pool, signal), PAGE_TOKENS, 8)
    metrics = PrefillMetrics(table)
    offers = Offers(peer, pool, metrics, offer_s)
    asyncio_loop = asyncio.get_running_loop()

    def publish(planned: list[Planned], started: float, error: Exception | None) -> None:
        asyncio_loop.call_soon_threadsafe(service.on_step, planned, started, error)

    loop = PrefillLoop(table, runner, CHUNK_TOKENS, publish, metrics, pool_mib=1)
    shutdown = Shutdown(0, lambda: 0)
    service = PrefillService(
        peer, table, loop.thread, offers, metrics, CONTEXT_TOKENS, VOCAB, heartbeat_s, PATIENCE_S, shutdown
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
    PageServer(pool, peer.incarnation).add_to(server)
    loop.thread.start()
    await server.start()
    channel = open_channel(address)
    try:
        yield PrefillWorker(peer, pool, table, runner, metrics, offers, prefill_pb2_grpc.PrefillStub(channel))
    finally:
        runner.may_run.set()
        await channel.close()
        await server.stop(None)
        await offers.close()
        loop.thread.stop(PATIENCE_S)
        table.check()


@dataclass
class Gateway:
    """The test's own end: one Steps stream and what it told."""

    stub: decode_pb2_grpc.DecodeStub
    name: str
    signal: Signal
    tokens: dict[int, list[int]] = field(default_factory=dict)  # handle |-> tokens
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)  # handle |-> finish_reason, error
    told: dict[int, decode_pb2.SessionDelta] = field(default_factory=dict)  # handle |-> all its news, joined
    is_open: bool = False

    async def listen(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for events in self.stub.Steps(decode_pb2.StepsRequest(gateway=self.name)):
                self.is_open = True
                for delta in events.deltas:
                    self.tokens.setdefault(delta.handle, []).extend(delta.token_ids)
                    self.told.setdefault(delta.handle, decode_pb2.SessionDelta()).MergeFrom(delta)
                    if delta.finish_reason:
                        self.ends[delta.handle] = (delta.finish_reason, delta.error)
                self.signal.fire()
        self.is_open = False
        self.signal.fire()

    async def reserve(
        self, handle: int, prompt: Sequence[int], count: int = 4, attempt: int = 1, local: int = 0, **others: Any
    ) -> kv_pb2.Ticket:
        response: decode_pb2.ReserveResponse = await self.stub.Reserve(
            decode_pb2.ReserveRequest(
                request_id=f"r{handle}", attempt=attempt, gateway=self.name, handle=handle, prompt_ids=prompt,
                max_tokens=count, sampling=PLAIN, local_prefill_max_tokens=local, **others,
            ),
            timeout=PATIENCE_S,
        )  # fmt: skip
        return response.ticket

    async def abort(self, *handles: int) -> None:
        await self.stub.Abort(decode_pb2.AbortRequest(gateway=self.name, handles=handles), timeout=PATIENCE_S)

    async def end_of(self, handle: int) -> tuple[str, str]:
        await self.signal.until(lambda: handle in self.ends)
        return self.ends[handle]


@asynccontextmanager
async def gateway(worker: DecodeWorker, signal: Signal, name: str = "g") -> AsyncIterator[Gateway]:
    channel = open_channel(worker.peer.address)
    opened = Gateway(decode_pb2_grpc.DecodeStub(channel), name, signal)
    listening = asyncio.create_task(opened.listen())
    try:
        await signal.until(lambda: opened.is_open)
        yield opened
    finally:
        listening.cancel()
        await asyncio.wait([listening])
        await channel.close()
