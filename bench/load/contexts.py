"""Costs of a context's length: a new conversation and its next turn, how long other requests wait, and memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.load.answers import Answer
from bench.load.client import Client
from bench.load.metrics import tpot_s, ttft_s
from bench.load.options import Target, parse_numbers
from bench.load.processes import find_tree, read_pss_bytes
from bench.load.prompts import Message, PromptWriter, new_run
from bench.load.server import discover, open_http
from bench.load.workloads import Wanted
from runtime.settings import ConfigError

MESSAGE_TOKENS = 512  # of each message, about
NEXT_TOKENS = 64  # of the messages that the next turn adds, about
PROBE_S = 0.002  # between two of the short requests beside the measured one
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ContextOptions(Target):
    """One call of `baton bench contexts`."""

    lengths: str = "8000,32000,128000"
    """Tokens of the conversations, about."""
    output_tokens: int = 64
    """Tokens of each answer."""
    rounds: int = 3
    """Conversations of each length; figures are medians, waits the longest."""
    pid: int = 0
    """Process id of the server on this machine, such as that of `baton serve`, for the memory of all its processes."""

    def __post_init__(self) -> None:
        parse_numbers("lengths", self.lengths)
        self.require(1, "output_tokens", "rounds")


async def run_contexts(options: ContextOptions) -> list[dict[str, Any]]:
    """Measure each length; a dict of figures each. Raises ConfigError."""
    async with open_http(options.url, options.api_key, 2) as http:
        server, _ids = await discover(http, options.model)
        client, figures = Client(http, server), list[dict[str, Any]]()
        writer = PromptWriter(words_a_token=server.words_a_token)
        first = await _ask(client, _write(writer, 2000, 0), options.output_tokens)  # also what only first requests need
        writer = PromptWriter(words_a_token=server.words_a_token * 2000 / first.prompt_tokens)
        for length in (int(number) for number in parse_numbers("lengths", options.lengths)):
            rounds = [await _measure(http, client, writer, length, options) for _ in range(options.rounds)]
            found = {name: median([one[name] for one in rounds]) for name in rounds[0]}
            found["longest_wait_ms"] = max(one["longest_wait_ms"] for one in rounds)
            figures.append({**found, **read_memory(options.pid)} if options.pid else found)
    return figures


async def _measure(
    http: httpx.AsyncClient, client: Client, writer: PromptWriter, length: int, options: ContextOptions
) -> dict[str, float]:
    messages, waits = _write(writer, length, new_run()), list[float]()
    async with _probing(http, waits):
        new = await _ask(client, messages, options.output_tokens)
        said = _write(writer, NEXT_TOKENS, new_run())[0]["content"]
        later = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        turn = await _ask(client, later, options.output_tokens)
    return {
        "prompt_tokens": new.prompt_tokens,
        "ttft_ms": ttft_s(new) * 1e3,
        "tpot_ms": (tpot_s(new) or 0.0) * 1e3,
        "next_ttft_ms": ttft_s(turn) * 1e3,
        "longest_wait_ms": max(waits) * 1e3,
    }


def _write(writer: PromptWriter, length: int, seed: int) -> list[Message]:
    """A conversation of about `length` tokens that ends with the user."""
    count = max(length // MESSAGE_TOKENS, 1) | 1
    texts = [writer.write(Wanted(length // count, 1), index, seed) for index in range(count)]
    return [{"role": ("user", "assistant")[index % 2], "content": str(text)} for index, text in enumerate(texts)]


async def _ask(client: Client, messages: Sequence[Message], num_tokens: int) -> Answer:
    answer = await client.ask(messages, num_tokens)
    if answer.error:
        raise ConfigError(f"a conversation failed: {answer.error}")
    return answer


@asynccontextmanager
async def _probing(http: httpx.AsyncClient, waits: list[float]) -> AsyncIterator[None]:
    """Meanwhile one short request follows the other; `waits`: the seconds that each took. Raises ConfigError."""
    is_over = asyncio.Event()

    async def probe() -> None:
        while not is_over.is_set():
            sent = time.perf_counter()
            await http.get("/health")
            waits.append(time.perf_counter() - sent)
            await asyncio.sleep(PROBE_S)

    probing = asyncio.create_task(probe())
    try:
        yield
    finally:
        is_over.set()
        try:
            await probing
        except httpx.HTTPError as error:
            raise ConfigError(f"a short request failed: {type(error).__name__}: {error}") from error


def read_memory(pid: int) -> dict[str, float]:
    """MiB of the gateway, or of a server that is one process, and of its other processes. Shared memory is divided."""
    found = {"gateway_mib": 0.0, "workers_mib": 0.0}
    for one in find_tree(pid):
        try:
            command = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        is_gateway = b"gateway" in command
        found["gateway_mib" if is_gateway else "workers_mib"] += read_pss_bytes(one, with_children=False) / MIB
    return found
