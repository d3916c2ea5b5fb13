"""Texts a second: a service, and whatever else answers /v1/embeddings, beside sentence-transformers, taking turns.

    python -m bench.embeddings --model minilm --peer-path FOLDER_WITH_SENTENCE_TRANSFORMERS
    python -m bench.embeddings --model CHECKPOINT --url llama.cpp=http://127.0.0.1:8080

All wait while one computes. Every round sends texts that no server has seen.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import httpx
from transformers import AutoTokenizer

from tests.support.live import serve
from tests.support.pooled import cosine
from worker.startup.models import locate_model

WORDS = ("river", "mill", "sentence", "table", "number", "green", "window", "morning", "paper", "engine", "letter")
TEXTS_A_REQUEST, NUM_REQUESTS_AT_ONCE = 32, 4
System = Callable[[Sequence[str]], Awaitable[list[float]]]  # texts |-> the first one's vector
PEER = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu", model_kwargs={"dtype": sys.argv[2]})
for line in sys.stdin:
    vectors = model.encode(json.loads(line), batch_size=32, show_progress_bar=False)
    print(json.dumps([len(vectors), vectors[0].tolist()]), flush=True)
"""


def write_texts(tokenizer: Any, num_texts: int, num_tokens: int, seed: int) -> list[str]:
    """Words in no order, each text of about so many tokens."""
    noise = random.Random(seed)
    sample = " ".join(noise.choices(WORDS, k=num_tokens))
    num_words = round(num_tokens**2 / len(tokenizer(sample)["input_ids"]))
    return [" ".join(noise.choices(WORDS, k=num_words)) for _ in range(num_texts)]


class Peer:
    """sentence-transformers in a process of its own, with all cores."""

    def __init__(self, model: str, path: str, dtype: str) -> None:
        paths = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER, model, dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip

    async def embed(self, texts: Sequence[str]) -> list[float]:
        """The vector of the first."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        num_vectors, first = json.loads(await asyncio.to_thread(self._process.stdout.readline))
        assert num_vectors == len(texts)
        return list(first)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def embed_by_http(url: str, texts: Sequence[str]) -> list[float]:
    """The vector of the first."""
    async with httpx.AsyncClient(base_url=url, timeout=1200, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        limit = asyncio.Semaphore(NUM_REQUESTS_AT_ONCE)

        async def ask(some: Sequence[str]) -> list[list[float]]:
            async with limit:
                response = await client.post("/v1/embeddings", json={"model": model, "input": some})
            response.raise_for_status()
            return [one["embedding"] for one in response.json()["data"]]

        parts = [texts[at : at + TEXTS_A_REQUEST] for at in range(0, len(texts), TEXTS_A_REQUEST)]
        vectors = [vector for part in await asyncio.gather(*map(ask, parts)) for vector in part]
    assert len(vectors) == len(texts)
    return vectors[0]


async def measure(systems: dict[str, System], rounds: Sequence[Sequence[str]]) -> None:
    """Prints texts a second of each system in each round, and Baton's against each other's."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for number, texts in enumerate(rounds):
        firsts = {}
        for name in sorted(systems, reverse=number % 2 == 1):
            started = time.perf_counter()
            firsts[name] = await systems[name](texts)
            rates[name].append(len(texts) / (time.perf_counter() - started))
        nearest = {name: round(cosine(first, firsts["baton"]), 6) for name, first in firsts.items()}
        print({name: round(some[-1], 2) for name, some in rates.items()}, "cosine", nearest, flush=True)
    for name in [one for one in systems if one != "baton"]:
        ratios = [ours / theirs for ours, theirs in zip(rates["baton"][1:], rates[name][1:], strict=True)]
        print(f"baton / {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4, help="the first one warms up")
    parser.add_argument("--dtype", default="auto", help="of Baton")
    parser.add_argument("--peer-dtype", default="float32", help="of sentence-transformers; its own default")
    parser.add_argument("--url", action="append", default=[], help="NAME=URL of another server")
    parser.add_argument("--peer-path", help="where sentence-transformers is installed; none: not asked")
    parser.add_argument("flags", nargs="*", help="-- and flags of `baton serve`")
    given = parser.parse_args()
    folder = locate_model(given.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rounds = [write_texts(tokenizer, given.texts, given.tokens, seed) for seed in range(given.rounds)]
    peer = Peer(folder, given.peer_path, given.peer_dtype) if given.peer_path is not None else None
    try:
        with serve(given.model, f"--dtype={given.dtype}", *given.flags, hands_over=False) as live:
            urls = {"baton": live.url, **dict(one.split("=", 1) for one in given.url)}
            systems: dict[str, System] = {name: partial(embed_by_http, url) for name, url in urls.items()}
            if peer is not None:
                systems["sentence-transformers"] = peer.embed
            asyncio.run(measure(systems, rounds))
    finally:
        if peer is not None:
            peer.close()


if __name__ == "__main__":
    main()
