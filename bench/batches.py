"""What a batch costs streams beside it: gaps between their tokens, in turn without and with 200 lines, on one service.

python -m bench.batches --model smollm2
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from tests.support.live import serve

NUM_LINES, NUM_STREAMS = 200, 4
LINE_TOKENS, STREAM_TOKENS = 48, 500
CHATS = "/v1/chat/completions"


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


async def measure(url: str, num_rounds: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await stream(client, model, 0)
        ratios: dict[str, list[float]] = {"p50": [], "p99": []}
        for number in range(num_rounds):
            found: dict[bool, list[float]] = {}
            num_answered = 0
            for has_batch in (False, True) if number % 2 else (True, False):
                batch = await begin(client, model, number) if has_batch else ""
                streams = await asyncio.gather(*(stream(client, model, index) for index in range(NUM_STREAMS)))
                found[has_batch] = [gap for gaps in streams for gap in gaps]
                if batch:
                    num_answered = await cancel(client, batch)
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                ratios[name].append(quantile(found[True], share) / quantile(found[False], share))
            both = [
                f"{name} {quantile(found[False], q):.2f} {quantile(found[True], q):.2f}"
                for name, q in (("p50", 0.5), ("p99", 0.99))
            ]
            print(f"{', '.join(both)} ms; {num_answered} lines beside", flush=True)
        print(
            {
                name: [round(value, 3) for value in (min(some), statistics.median(some), max(some))]
                for name, some in ratios.items()
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve(given.model, f"--batch-dir={folder}", hands_over=False) as live:
        asyncio.run(measure(live.url, given.rounds))


if __name__ == "__main__":
    main()
