"""The gateway's cost: real REST and gRPC streams through a real gateway, with a worker that computes nothing.

    python -m bench.gateway [--tree DIR ...] [--streams 64] [--rounds 3] [--api rest|grpc|responses|stored ...]

`stored` is `responses` with a store in SQLite. `--tree`: a checkout whose gateway is measured; several take turns, so
that other load on the machine affects all.
`tokens/core-s` divides the tokens by the gateway's CPU seconds. Latency is a token's time from the worker's message to
the client's socket, at the paces of both columns: a step every 20 ms, and a step as soon as the gateway keeps up.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from tokenizers import Tokenizer

from bench.load.processes import read_cpu_s
from demo.paths import TARGET_DIR
from protos import decode_pb2, inference_pb2, inference_pb2_grpc, kv_pb2
from tests.support.fake_workers import Context, FakeDecode, Signal, serving
from tests.support.fleet import HOST, Process, free_ports

QUIET_STEP_S = 0.02
BUSY_STEP_S = 0.004  # 16,000 tokens/s at 64 streams
SECONDS = 4.0  # per measurement
SETTLE_S, IDLE = 0.5, 0.1  # CPU time in this time, of a core, that an idle gateway stays below
LARGE = 1 << 20  # tokens of a context, pages
WORDS = "The quick brown fox jumps over the lazy dog. " * 3


class NoopDecode(FakeDecode):
    """A decode worker that sends each session a token every `step_s`, and records the times."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__("noop", Signal(), max_running=1024)
        self.peer.num_pages = LARGE
        self.status = {"context_tokens": LARGE, "free_pages": LARGE}
        self.step_s = QUIET_STEP_S
        self._token_ids = token_ids
        self._open: dict[int, tuple[decode_pb2.ReserveRequest, list[float]]] = {}  # by handle; times of its tokens
        self.sent_at: dict[str, list[float]] = {}  # request id |-> when each token was sent

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Context) -> decode_pb2.ReserveResponse:  # noqa: N802
        times = self.sent_at[request.request_id.rpartition(".")[0]] = []
        self._open[request.handle] = (request, times)
        end = len(request.prompt) // 4 - 1
        ticket = kv_pb2.Ticket(incarnation="noop", session=request.handle, attempt=request.attempt, begin=end, end=end)
        return decode_pb2.ReserveResponse(ticket=ticket, needs_prefill=False)

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:  # noqa: N802
        for handle in request.handles:
            self._open.pop(handle, None)
        return decode_pb2.AbortResponse()

    async def Steps(  # noqa: N802
        self, request: decode_pb2.StepsRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StepEvents]:
        yield decode_pb2.StepEvents(incarnation="noop")
        due = time.monotonic()
        while True:
            due = max(due + self.step_s, time.monotonic() - self.step_s)
            await asyncio.sleep(due - time.monotonic())
            if self._open:
                yield decode_pb2.StepEvents(deltas=[self._delta(handle) for handle in list(self._open)])

    def _delta(self, handle: int) -> decode_pb2.SessionDelta:
        request, times = self._open[handle]
        token_id = self._token_ids[len(times) % len(self._token_ids)]
        times.append(time.monotonic())
        is_last = len(times) == request.max_tokens
        if is_last:
            del self._open[handle]
        return decode_pb2.SessionDelta(
            handle=handle, attempt=request.attempt, token_ids=[token_id], finish_reason="length" if is_last else ""
        )


@asynccontextmanager
async def running_gateway(tree: Path, decode_address: str, has_store: bool) -> AsyncIterator[tuple[Process, str]]:
    """`baton gateway` of a checkout, ready, and its address for gRPC; stopped at the end."""
    port, ops_port, grpc_port = free_ports(3)
    flags: tuple[str, ...] = (
        f"--model={TARGET_DIR}", "--served-name=demo", f"--decode={decode_address}", f"--port={port}",
        f"--ops-port={ops_port}", f"--grpc-port={grpc_port}", "--log-level=error",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        flags = (*flags, f"--state-dir={folder}/state") if has_store else flags
        gateway = Process("gateway", "gateway", port, ops_port, flags, Path(folder) / "log", checkout=tree)
        gateway.start()
        try:
            await asyncio.to_thread(gateway.wait_ready)
            await settle(gateway.pid)
            yield gateway, f"{HOST}:{grpc_port}"
        finally:
            gateway.kill()


async def settle(pid: int) -> None:
    """Wait until its processes are idle: some are started ahead, and load libraries for a second."""
    before = -1.0
    while (now := read_cpu_s(pid)) > before + IDLE * SETTLE_S:
        before = now
        await asyncio.sleep(SETTLE_S)


async def stream_rest(address: str, name: str, num_tokens: int) -> list[float]:
    """The arrival times of a streamed completion's tokens."""
    asked = {"model": "demo", "prompt": WORDS, "max_tokens": num_tokens, "stream": True}
    return await _stream(address, name, "completions", asked, b'"text":"')


async def stream_responses(address: str, name: str, num_tokens: int, *, is_stored: bool = False) -> list[float]:
    """The same of a response's."""
    asked = {"model": "demo", "input": WORDS, "max_output_tokens": num_tokens, "stream": True, "store": is_stored}
    times = await _stream(address, name, "responses", asked, b'"delta":"')
    return times + times[-1:] * (num_tokens - len(times))  # some tokens show no text of their own


async def _stream(address: str, name: str, path: str, asked: dict[str, object], mark: bytes) -> list[float]:
    """Arrival times of what has the mark. RuntimeError: there is none."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    body = json.dumps(asked).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {name}\r\nconnection: close\r\n"
    kind = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + kind).encode() + body)
    times, reply = list[float](), b""
    while data := await reader.read(1 << 16):
        times += [time.monotonic()] * data.count(mark)
        reply = reply if times else reply + data
    writer.close()
    if not times:
        raise RuntimeError(f"{name} ended without a token: {reply[:2000]!r}")
    return times


async def stream_grpc(address: str, name: str, num_tokens: int) -> list[float]:
    """The same over gRPC, on a channel of its own."""
    times: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text=WORDS, max_tokens=num_tokens), metadata=(("x-request-id", name),)
        )
        async for message in call:
            times += [time.monotonic()] * len(message.token_ids)
    return times


STREAMS: dict[str, Callable[[str, str, int], Awaitable[list[float]]]] = {
    "rest": stream_rest,
    "grpc": stream_grpc,
    "responses": stream_responses,
    "stored": partial(stream_responses, is_stored=True),
}


@dataclass(frozen=True)
class Measured:
    """One measurement."""

    tokens_per_s: float
    tokens_per_core_s: float
    tpot_ms: float
    p50_ms: float  # latency
    p99_ms: float


async def measure(
    gateway: Process, grpc_address: str, engine: NoopDecode, api: str, streams: int, step_s: float
) -> Measured:
    """Run streams in parallel for about SECONDS."""
    engine.step_s = step_s
    num_tokens = int(SECONDS / step_s)
    stream, address = STREAMS[api], grpc_address if api == "grpc" else gateway.address
    names = [f"{api}-{step_s}-{time.monotonic_ns()}-{index}" for index in range(streams)]
    cpu_s, started = read_cpu_s(gateway.pid), time.monotonic()
    arrived = [times[:num_tokens] for times in await asyncio.gather(*(stream(address, n, num_tokens) for n in names))]
    took, used = time.monotonic() - started, read_cpu_s(gateway.pid) - cpu_s
    if any(len(times) != num_tokens for times in arrived):
        raise RuntimeError(f"streams ended with {sorted({len(times) for times in arrived})} tokens, not {num_tokens}")
    if num_again := sum(len(engine.sent_at[name]) != num_tokens for name in names):
        raise RuntimeError(f"{num_again} streams were begun again: the machine is too busy to measure")
    late = sorted(
        here - sent
        for name, times in zip(names, arrived, strict=True)
        for sent, here in zip(engine.sent_at.pop(name), times, strict=True)
    )
    total = streams * num_tokens
    tpot_ms = statistics.fmean((times[-1] - times[0]) / (num_tokens - 1) for times in arrived) * 1e3
    return Measured(total / took, total / used, tpot_ms, late[len(late) // 2] * 1e3, late[len(late) * 99 // 100] * 1e3)


async def run(trees: list[Path], streams: int, rounds: int, apis: list[str]) -> None:
    token_ids = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json")).encode(WORDS, add_special_tokens=False).ids
    found: dict[tuple[str, str, Path], list[Measured]] = defaultdict(list)
    engine = NoopDecode(token_ids)
    async with serving(engine) as address:
        for _ in range(rounds):
            for tree in trees:
                async with running_gateway(tree, address, "stored" in apis) as (gateway, grpc_address):
                    for api in apis:
                        for pace, step_s in (("quiet", QUIET_STEP_S), ("busy", BUSY_STEP_S)):
                            one = await measure(gateway, grpc_address, engine, api, streams, step_s)
                            found[api, pace, tree].append(one)
    print(f"{'api':10}{'pace':7}{'tokens/s':>10}{'tokens/core-s':>15}{'TPOT ms':>9}{'p50 ms':>8}{'p99 ms':>8}  tree")
    for (api, pace, tree), all_ in sorted(found.items(), key=lambda item: item[0][:2]):
        medians = [statistics.median(getattr(one, name) for one in all_) for name in Measured.__dataclass_fields__]
        rates, times = f"{medians[0]:10.0f}{medians[1]:15.0f}", "{:9.2f}{:8.2f}{:8.2f}".format(*medians[2:])
        print(f"{api:10}{pace:7}{rates}{times}  {tree}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api", action="append", choices=[*STREAMS])
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [Path(__file__).parents[1]]]
    asyncio.run(run(trees, options.streams, options.rounds, options.api or ["rest", "grpc"]))


if __name__ == "__main__":
    main()
