"""Both workers in this process, real except for the model: tokens depend on the KV that the runner finds in the pool.

An answer is right only if every position's KV was computed, handed over or cached, and kept.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import grpc
import numpy as np
import torch

from decode_worker.kv_receiver import KVReceiver
from decode_worker.main import DecodeRole
from decode_worker.metrics import DecodeMetrics
from demo.paths import TARGET_DIR
from engine.attention.base import AttentionBackend
from engine.attention.choose import AttentionChoice
from engine.batch import ForwardRow
from engine.catalogue import load_config
from engine.compose import FullEngine
from engine.cuda.gpu import Gpu
from engine.input_batch import InputBatch
from engine.kv.pool import Pool
from engine.runner import Forwards, Launched, ModelOutput, Runner
from engine.vision.image_rows import ImageRows, ImageRules
from kvtransfer.grpc_bytes import PageServer
from prefill_worker.kv_sender import KVSender
from prefill_worker.main import PrefillRole
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.service import PrefillService
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2_grpc
from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import Transport
from runtime.rpc import bind, new_incarnation, open_channel
from runtime.trust import load_trust
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.fleet import Process
from tests.support.pool_process import build_local, build_pool, describe
from wire.kv_layout import KvPart
from wire.logprobs import TokenLogprobs
from wire.messages import pack_tokens
from wire.page_keys import TOKEN_BYTES
from wire.retention import Retention
from worker.chunks import ChunkSizer
from worker.params import SequenceParams
from worker.peers.kv_peers import KVPeers
from worker.prefix_cache import PrefixCache
from worker.process import build_worker
from worker.role import Worker
from worker.scheduler import Scheduler
from worker.table import num_rows_for
from worker.tiers.files import KVTiers
from worker.tiers.loans import Borrower

PAGE_TOKENS, NUM_PAGES, CHUNK_TOKENS, CONTEXT_TOKENS, VOCAB, MAX_RUNNING = 4, 24, 6, 80, 1000, 8
IMAGE_TOKEN = 900
SETTINGS: dict[str, Any] = {"page_tokens": PAGE_TOKENS, "max_running": MAX_RUNNING}
PLAIN = decode_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0)
RoleT = TypeVar("RoleT", PrefillRole, DecodeRole)


def packed(prompt: Sequence[int]) -> bytes:
    """A prompt in the packed form of messages and requests."""
    return pack_tokens(np.array(prompt, np.int32))


def taken_over(params: SequenceParams, emitted: Sequence[int]) -> SequenceParams:
    """The params that another worker gets after these tokens."""
    prompt = params.prompt + packed(emitted)
    return replace(
        params, prompt=prompt, end=len(prompt) // TOKEN_BYTES - 1, num_emitted=len(emitted),
        max_tokens=params.max_tokens - len(emitted), attempt=params.attempt + 1,
    )  # fmt: skip


def kv_value(token: int, position: int) -> int:
    return token + 31 * position


def expected_answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(kv_value(token, position) for position, token in enumerate(tokens)) % 251)
    return tokens[len(prompt) :]


class Done:
    """A step that was computed when it was launched."""

    def __init__(self, answers: ModelOutput) -> None:
        self._answers = answers

    def collect(self) -> ModelOutput:
        return self._answers


class KvRunner:
    """Writes each position's value into its KV; the next token is the sum of the sequence's values."""

    forwards = Forwards()
    is_head = False

    def __init__(self, pool: Pool, rows: InputBatch) -> None:
        self._pool = pool
        self._rows = rows
        self.failures: deque[Exception] = deque()  # one per step to come
        self.may_run = threading.Event()
        self.may_run.set()
        self.pauses_after_token = False  # a step that chooses a token clears `may_run`

    def launch(self, requests: Sequence[ForwardRow]) -> Launched:
        assert self.may_run.wait(PATIENCE_S)
        if self.failures:
            raise self.failures.popleft()
        answers = ModelOutput([], [])
        for part in requests:
            for token, told in self._run(part):
                answers.tokens.append(token)
                answers.logprobs.append(told)
        if answers.tokens and self.pauses_after_token:
            self.may_run.clear()
        return cast(Launched, Done(answers))

    def _run(self, part: ForwardRow) -> Iterator[tuple[int, TokenLogprobs | None]]:
        if part.num_logits > part.count:
            raise ValueError(f"{part.num_logits} rows of logits of {part.count} positions")
        tokens, pages, kv = self._rows.tokens[part.row], self._rows.page_table[part.row], self._pool.tensor
        end = part.begin + part.count
        for position in range(part.begin, end):
            line = kv[pages[position // PAGE_TOKENS], :, :, :, position % PAGE_TOKENS, :]
            line.fill_(kv_value(int(tokens[position]), position))
        values = [int(kv[pages[at // PAGE_TOKENS], -1, -1, -1, at % PAGE_TOKENS, -1]) for at in range(end)]
        chosen = []
        for index, position in enumerate(range(end - part.num_logits + 1, end + 1)):
            likeliest, line_of_mask = sum(values[:position]) % 251, index - part.num_given
            if line_of_mask < 0:
                token, num_top = int(tokens[position]), part.given_logprobs
                yield token, _tell(token, likeliest, num_top)
                continue
            if part.mask is not None:
                allowed = np.unpackbits(part.mask[line_of_mask].view(np.uint8), bitorder="little")
                likeliest += int(allowed[likeliest:].argmax())
            chosen.append((position, likeliest))
            yield likeliest, None if part.chosen_logprobs is None else _tell(likeliest, likeliest, part.chosen_logprobs)
        for position, token in chosen:
            tokens[position] = token


def _tell(token: int, likeliest: int, num_top: int) -> TokenLogprobs:
    """A token's log-probability is -(its distance from the likeliest), so it reveals the KV that was read."""
    top = tuple(range(likeliest, likeliest + num_top))
    return TokenLogprobs(-abs(token - likeliest), top, tuple(-float(rank) for rank in range(num_top)))


class TellingCache(PrefixCache):
    """Fires a signal whenever pages are freed."""

    def __init__(self, pool: Pool, signal: Signal) -> None:
        super().__init__(pool.num_pages, pool.generations)
        self._tell = partial(asyncio.get_running_loop().call_soon_threadsafe, signal.fire)

    def release(self, pages: Sequence[int], retention: Retention | None = None) -> None:
        super().release(pages, retention)
        with suppress(RuntimeError):  # the event loop is closed
            self._tell()


def build_kv_engine(
    max_running: int = MAX_RUNNING, num_pages: int = NUM_PAGES, context_tokens: int = CONTEXT_TOKENS,
    gpu: Gpu | None = None,
) -> tuple[FullEngine, KvRunner]:  # fmt: skip
    """An engine over `KvRunner`, with the given vocabulary and the demo model's grammars."""
    pool = build_pool(num_pages, gpu)
    (part,) = pool.shape.parts
    assert isinstance(part, KvPart)
    config = replace(
        load_config(TARGET_DIR), vocab_size=VOCAB, num_layers=part.num_layers, num_kv_heads=part.num_heads,
        head_dim=part.head_dim, context_tokens=context_tokens,
    )  # fmt: skip
    device = torch.device("cpu")
    rows = InputBatch(num_rows_for(max_running), context_tokens, PAGE_TOKENS, VOCAB, device)
    rows.images = ImageRows(ImageRules(IMAGE_TOKEN, "causal", counts_rows=True))
    runner = KvRunner(pool, rows)
    nothing = AttentionChoice(cast(AttentionBackend, None), "none", is_fallback=False)
    engine = FullEngine(
        TARGET_DIR, config, "w", "float32", device, nothing, pool, None, rows, cast(Runner, runner), draft_weights="",
        draft_runner=None,
    )  # fmt: skip
    return engine, runner


def build_identity(role: str, address: str, pool: Pool) -> kv_pb2.Peer:
    """What a worker with this pool reports in a handshake."""
    peer = describe(build_local(pool), address)
    peer.role, peer.incarnation = role, new_incarnation()
    return peer


@asynccontextmanager
async def _serving(
    name: str,
    config: PrefillConfig | DecodeConfig,
    build_role: Callable[[Any, Worker], RoleT],
    signal: Signal,
    port: int,
    built: tuple[FullEngine, KvRunner] | None = None,
) -> AsyncIterator[tuple[Worker, RoleT, KvRunner]]:
    """Like worker/process.py, without a process."""
    trust = load_trust(config)
    server = trust.build_server()
    address = f"127.0.0.1:{bind(server, '127.0.0.1', port)}"
    engine, runner = built or build_kv_engine()
    worker = build_worker(name, config, engine, address, trust, new_incarnation())
    worker.scheduler.kv.cache = TellingCache(engine.pool, signal)
    role = build_role(config, worker)
    role.add_to(server)
    PageServer({pool.incarnation: pool.own for pool in worker.pools}).add_to(server)
    role.loop.thread.start()
    await server.start()
    try:
        yield worker, role, runner
    finally:
        runner.may_run.set()
        role.end_streams()
        await server.stop(None)
        await role.close()
        for pool in worker.pools:
            pool.local.close()
        role.loop.thread.stop(PATIENCE_S)
        worker.scheduler.check()


@dataclass
class DecodeWorker:
    peer: kv_pb2.Peer
    pool: Pool
    scheduler: Scheduler
    runner: KvRunner
    receiver: KVReceiver
    metrics: DecodeMetrics
    states: Pool | None

    @property
    def address(self) -> str:
        return self.peer.address

    @property
    def peers(self) -> KVPeers:
        return self.receiver.peers


@asynccontextmanager
async def decode_worker(
    signal: Signal, transport: Transport = "auto", lease_s: float = PATIENCE_S, port: int = 0,
    built: tuple[FullEngine, KvRunner] | None = None, **others: Any,
) -> AsyncIterator[DecodeWorker]:  # fmt: skip
    """Reads pages by the best transport available, or only by the given one."""
    config = DecodeConfig(
        **SETTINGS, local_prefill_chunk_tokens=CHUNK_TOKENS, lease_s=lease_s, transport=transport, speculate="off",
        grammar_cpu_s=1, **others,
    )  # fmt: skip
    async with _serving("decode", config, DecodeRole, signal, port, built) as (worker, role, runner):
        role._receiver.peers._is_required = True
        yield DecodeWorker(
            worker.me, worker.engine.pool, worker.scheduler, runner, role._receiver, role.metrics, worker.engine.states
        )


@dataclass
class PrefillWorker:
    peer: kv_pb2.Peer
    pool: Pool
    scheduler: Scheduler
    runner: KvRunner
    metrics: PrefillMetrics
    sender: KVSender
    service: PrefillService
    stub: prefill_pb2_grpc.PrefillStub
    worker: worker_pb2_grpc.WorkerStub
    states: Pool | None

    @property
    def borrower(self) -> Borrower:
        assert isinstance(self.service.tiers, KVTiers)
        return self.service.tiers.borrower

    def run(self, ticket: kv_pb2.Ticket, prompt: Sequence[int], **others: Any) -> "grpc.aio.UnaryUnaryCall[Any, Any]":
        request = prefill_pb2.RunRequest(request_id="r", prompt=packed(prompt), ticket=ticket, **others)
        call: grpc.aio.UnaryUnaryCall[Any, Any] = self.stub.Run(request, timeout=PATIENCE_S)
        return call


@asynccontextmanager
async def prefill_worker(
    signal: Signal, heartbeat_s: float = PATIENCE_S, port: int = 0, offer_s: float = PATIENCE_S + 1,
    built: tuple[FullEngine, KvRunner] | None = None, chunk_tokens: int = CHUNK_TOKENS, **others: Any,
) -> AsyncIterator[PrefillWorker]:  # fmt: skip
    """`offer_s`: maximum time of an offer; must exceed `heartbeat_s`."""
    config = PrefillConfig(
        **SETTINGS,
        chunk_tokens=max(chunk_tokens, PAGE_TOKENS),
        lease_s=offer_s,
        heartbeat_s=heartbeat_s,
        stall_s=PATIENCE_S,
        **others,
    )
    async with (
        _serving("prefill", config, PrefillRole, signal, port, built) as (worker, role, runner),
        open_channel(worker.me.address) as channel,
    ):
        role.loop.chunks = ChunkSizer(chunk_tokens, chunk_tokens)
        yield PrefillWorker(
            worker.me, worker.engine.pool, worker.scheduler, runner, role.metrics, role._sender, role._service,
            prefill_pb2_grpc.PrefillStub(channel), worker_pb2_grpc.WorkerStub(channel), worker.engine.states,
        )  # fmt: skip


@dataclass
class Gateway:
    """The gateway's end: one Steps stream and what it reported."""

    stub: decode_pb2_grpc.DecodeStub
    worker: worker_pb2_grpc.WorkerStub
    name: str
    signal: Signal
    tokens: dict[int, list[int]] = field(default_factory=dict)  # handle |-> tokens
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)  # handle |-> finish_reason, error
    told: dict[int, decode_pb2.SessionDelta] = field(default_factory=dict)  # handle |-> all its updates, merged
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

    async def ask(
        self, handle: int, prompt: Sequence[int], count: int = 4, attempt: int = 1, local: int = 0, **others: Any
    ) -> decode_pb2.ReserveResponse:
        """Reserve a session."""
        response: decode_pb2.ReserveResponse = await self.stub.Reserve(
            decode_pb2.ReserveRequest(
                request_id=f"r{handle}", attempt=attempt, gateway=self.name, handle=handle, prompt=packed(prompt),
                max_tokens=count, sampling=PLAIN, local_prefill_max_tokens=local, **others,
            ),
            timeout=PATIENCE_S,
        )  # fmt: skip
        return response

    async def reserve(self, handle: int, prompt: Sequence[int], count: int = 4, **others: Any) -> kv_pb2.Ticket:
        return (await self.ask(handle, prompt, count, **others)).ticket

    async def abort(self, *handles: int) -> None:
        await self.stub.Abort(decode_pb2.AbortRequest(gateway=self.name, handles=handles), timeout=PATIENCE_S)

    async def end_of(self, handle: int) -> tuple[str, str]:
        await self.signal.until(lambda: handle in self.ends)
        return self.ends[handle]


@asynccontextmanager
async def gateway(worker: DecodeWorker | Process, signal: Signal, name: str = "g") -> AsyncIterator[Gateway]:
    channel = open_channel(worker.address)
    opened = Gateway(decode_pb2_grpc.DecodeStub(channel), worker_pb2_grpc.WorkerStub(channel), name, signal)
    listening = asyncio.create_task(opened.listen())
    try:
        await signal.until(lambda: opened.is_open)
        yield opened
    finally:
        listening.cancel()
        await asyncio.wait([listening])
        await channel.close()
