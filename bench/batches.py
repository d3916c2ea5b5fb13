"""Cost of background work to the streams beside it: gaps between their tokens, in turn without and with it.

python -m bench.batches --model smollm2                             # a batch of 200 lines
python -m bench.batches --embeds minilm --pinned    # texts for an embedding model, which has a worker of its own
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Any

import httpx

from tests.support.live import serve

NUM_LINES, NUM_STREAMS = 200, 4
LINE_TOKENS, STREAM_TOKENS = 48, 500
CHATS = "/v1/chat/completions"


Beside = Callable[[httpx.AsyncClient, str, int], AbstractAsyncContextManager[list[int]]]


def quantile(gaps: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return sorted(gaps)[min(int(share * len(gaps)), len(gaps) - 1)] * 1e3


async def stream(client: httpx.AsyncClient, model: str, number: int) -> list[float]:
    """Seconds between the tokens of one answer."""
    prompt = f"Tell the story number {number} of a river, a mill and a miller who"
    body = {"model": model, "prompt": prompt, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


async def begin(client: httpx.AsyncClient, model: str, seed: int) -> str:
    """The id of a new batch."""

    def line(number: int) -> str:
        question = [{"role": "user", "content": f"{seed}, {number}: what is the capital of country number {number}?"}]
        body = {"model": model, "messages": question, "max_tokens": LINE_TOKENS, "ignore_eos": True}
        return json.dumps({"custom_id": f"{number}", "method": "POST", "url": CHATS, "body": body})

    content = "\n".join(map(line, range(NUM_LINES))).encode()
    uploaded = await client.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
    wanted = {"input_file_id": uploaded.json()["id"], "endpoint": CHATS, "completion_window": "24h"}
    batch: str = (await client.post("/v1/batches", json=wanted)).json()["id"]
    return batch


async def read(client: httpx.AsyncClient, batch: str) -> Any:
    return (await client.get(f"/v1/batches/{batch}")).json()


async def cancel(client: httpx.AsyncClient, batch: str) -> int:
    """Ends it. Returns how many lines were answered."""
    await client.post(f"/v1/batches/{batch}/cancel")
    now = await read(client, batch)
    while now["status"] != "cancelled":
        await asyncio.sleep(0.1)
        now = await read(client, batch)
    return int(now["request_counts"]["completed"])


@asynccontextmanager
async def batch_beside(client: httpx.AsyncClient, model: str, seed: int) -> AsyncIterator[list[int]]:
    """While it is entered a batch runs. Yields what will hold how many lines were answered."""
    answered: list[int] = []
    batch = await begin(client, model, seed)
    yield answered
    answered.append(await cancel(client, batch))


@asynccontextmanager
async def texts_beside(client: httpx.AsyncClient, model: str, seed: int) -> AsyncIterator[list[int]]:
    """While it is entered four callers send 32 texts a request, and no text twice. Yields what will hold how many."""
    answered: list[int] = []

    async def call(caller: int) -> None:
        for number in count():
            texts = [f"{seed}, {caller}, {number}: " + f"text {text} of a river and a mill " * 14 for text in range(32)]
            (await client.post("/v1/embeddings", json={"model": model, "input": texts})).raise_for_status()
            answered.append(len(texts))

    callers = [asyncio.create_task(call(caller)) for caller in range(4)]
    yield answered
    for caller in callers:
        caller.cancel()
    ended = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def measure(url: str, num_rounds: int, beside: Beside) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        models = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
        model, other = models[0], models[-1]
        await stream(client, model, 0)
        ratios: dict[str, list[float]] = {"p50": [], "p99": []}
        for number in range(num_rounds):
            found: dict[bool, list[float]] = {}
            num_answered = 0
            for is_busy in (False, True) if number % 2 else (True, False):
                async with beside(client, other, number) if is_busy else nullcontext([]) as counted:
                    streams = await asyncio.gather(*(stream(client, model, index) for index in range(NUM_STREAMS)))
                found[is_busy] = [gap for gaps in streams for gap in gaps]
                if is_busy:
                    num_answered = sum(counted)
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                ratios[name].append(quantile(found[True], share) / quantile(found[False], share))
            both = [
                f"{name} {quantile(found[False], q):.2f} {quantile(found[True], q):.2f}"
                for name, q in (("p50", 0.5), ("p99", 0.99))
            ]
            print(f"{', '.join(both)} ms; {num_answered} beside", flush=True)
        print(
            {
                name: [round(value, 3) for value in (min(some), statistics.median(some), max(some))]
                for name, some in ratios.items()
            }
        )


def pin(pids: Sequence[int]) -> None:
    """Each process, with its threads, to one core, in turn: with more processes than cores none stays free."""
    for core, pid in zip(cycle(sorted(os.sched_getaffinity(0))), pids, strict=False):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--embeds", help="an embedding model: texts for it, and no batch")
    parser.add_argument("--pinned", action="store_true", help="each worker to one core")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--model={given.embeds}"] if given.embeds else [f"--batch-dir={folder}"]
        flags += ["--threads=1"] if given.pinned else []
        with serve(given.model, *flags, hands_over=False) as live:
            if given.pinned:
                pin([pid for name, pid in live.pids.items() if name != "gateway"])
            asyncio.run(measure(live.url, given.rounds, texts_beside if given.embeds else batch_beside))


if __name__ == "__main__":
    main()
