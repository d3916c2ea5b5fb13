"""The effect of long prompts on running streams: gaps between chunks in quiet times and while prompts are computed.

`compare` is pure: streams' chunk times and the window in, figures out. The quiet time begins when all streams run, and
ends when the long prompts are sent; the busy time ends with the last of their first tokens.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from bench.load.answers import Answer, Recorder
from bench.load.client import Client
from bench.load.metrics import ttft_s
from bench.load.options import Target
from bench.load.prompts import Message, Prompt, PromptWriter, new_run
from bench.load.server import discover, open_http
from bench.load.workloads import Wanted
from runtime.settings import ConfigError

STREAM_PROMPT = 64  # tokens
POLL_S = 0.005
START_S = 300.0  # until all streams run


@dataclass(frozen=True, kw_only=True)
class InterferenceOptions(Target):
    """One call of `baton bench interference`."""

    streams: int = 4
    """Concurrent streams."""
    stream_tokens: int = 3072
    """Most tokens per stream; streams end when the long prompts are done."""
    quiet_chunks: int = 24
    """Chunks of each stream before the long prompts are sent."""
    prompts: int = 2
    """Long prompts, sent at once."""
    prompt_tokens: int = 1500
    """Tokens of each long prompt."""
    text: bool = False
    """Send prompts as text even if the server accepts token ids."""
    images: int = 0
    """Images in each long prompt; after each measurement the same with text prompts of as many tokens."""
    image_size: int = 448
    """Width and height of these images, in pixels."""
    rounds: int = 3
    """Measurements with --images, of which the medians are reported."""

    def __post_init__(self) -> None:
        self.require(1, "streams", "prompts", "prompt_tokens", "stream_tokens", "quiet_chunks", "image_size", "rounds")
        if self.stream_tokens <= self.quiet_chunks:
            raise ConfigError(f"stream_tokens={self.stream_tokens} cannot be used: more than --quiet-chunks")


def compare(streams: Sequence[Sequence[float]], begin: float, end: float) -> dict[str, float]:
    """Figures of the gaps before `begin` and of those that overlap [begin, end]. `streams`: times of chunks."""
    running = max(moments[0] for moments in streams)  # the last stream's first chunk
    pairs = [pair for moments in streams for pair in pairwise(moments)]
    quiet = [later - earlier for earlier, later in pairs if earlier >= running and later <= begin]
    busy = [later - earlier for earlier, later in pairs if later > begin and earlier < end]
    if not quiet or not busy:
        raise ConfigError("the streams gave too few chunks: set --stream-tokens or --quiet-chunks higher")
    median = max(float(np.median(quiet)), 1e-9)  # chunks that are read together have no gap
    return {
        "num_quiet_gaps": len(quiet),
        "num_busy_gaps": len(busy),
        "quiet_median_itl_ms": median * 1e3,
        "quiet_p99_itl_ms": float(np.percentile(quiet, 99)) * 1e3,
        "busy_median_itl_ms": float(np.median(busy)) * 1e3,
        "busy_p99_itl_ms": float(np.percentile(busy, 99)) * 1e3,
        "busy_max_itl_ms": max(busy) * 1e3,
        "median_ratio": float(np.median(busy)) / median,
        "p99_ratio": float(np.percentile(busy, 99)) / median,
        "max_ratio": max(busy) / median,
    }


async def run_interference(options: InterferenceOptions) -> dict[str, Any]:
    """Discover the server and measure once; with images see `_measure_images`."""
    async with open_http(options.url, options.api_key, options.streams + options.prompts + 2) as http:
        server, ids = await discover(http, options.model)
        writer = PromptWriter(() if options.text else ids, server.words_a_token)
        if options.images:
            return await _measure_images(Client(http, server), writer, options)
        return await measure(Client(http, server), writer, options)


async def _measure_images(client: Client, writer: PromptWriter, options: InterferenceOptions) -> dict[str, Any]:
    """Medians of rounds beside prompts with images; `text`: the same beside texts of as many tokens, in turn; and the
    ratios of the former's p99 and longest gaps to the latter's, for each round."""
    images, texts = list[dict[str, Any]](), list[dict[str, Any]]()
    for index in range(options.rounds):
        images.append(await measure(client, replace(writer, run=new_run()), options))
        as_long = replace(options, images=0, prompt_tokens=round(float(np.mean(images[index]["long_input_lens"]))))
        texts.append(await measure(client, replace(writer, run=new_run()), as_long))
    ratios = {
        f"{name}_by_text": [
            one[f"busy_{name}_itl_ms"] / other[f"busy_{name}_itl_ms"] for one, other in zip(images, texts, strict=True)
        ]
        for name in ("p99", "max")
    }
    return {**_find_medians(images), "text": _find_medians(texts), **ratios}


def _find_medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; lists of all rounds joined, flags true if they were in any round."""
    found = dict[str, Any]()
    for name, value in rounds[0].items():
        all_values = [one[name] for one in rounds]
        if isinstance(value, bool):
            found[name] = any(all_values)
        elif isinstance(value, list):
            found[name] = [*chain.from_iterable(all_values)]
        else:
            found[name] = float(np.median(all_values))
    return found


async def measure(client: Client, writer: PromptWriter, options: InterferenceOptions) -> dict[str, Any]:
    """Start the streams, wait for a quiet time, send the long prompts. Raises ConfigError."""
    wanted, long = Wanted(STREAM_PROMPT, options.stream_tokens), Wanted(options.prompt_tokens, 1)
    prompts: list[Prompt | list[Message]] = [
        writer.write_images(options.images, options.image_size, index) if options.images
        else writer.write(long, index, 1)
        for index in range(options.prompts)
    ]  # fmt: skip
    recorders = [Recorder(time.perf_counter()) for _ in range(options.streams)]
    tasks = [
        asyncio.create_task(client.stream(writer.write(wanted, index, 0), wanted.num_output, recorder))
        for index, recorder in enumerate(recorders)
    ]
    try:
        await _wait_until_quiet(recorders, options.quiet_chunks)
        begin = time.perf_counter()
        answers: list[Answer] = await asyncio.gather(*(client.ask(prompt, 1) for prompt in prompts))
        has_ended = any(recorder.is_done for recorder in recorders)
        end = max((answer.chunks[0] for answer in answers if answer.chunks), default=begin)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for answer in answers:
        if answer.error:
            raise ConfigError(f"a long prompt failed: {answer.error}")
    figures = compare([recorder.chunks for recorder in recorders], begin, end)
    times = [ttft_s(answer) * 1e3 for answer in answers]
    return {
        **figures,
        "long_ttft_ms": times,
        "mean_long_ttft_ms": float(np.mean(times)),
        "long_input_lens": [answer.prompt_tokens for answer in answers],
        "busy_seconds": end - begin,
        "has_stream_ended_early": has_ended,
    }


async def _wait_until_quiet(recorders: Sequence[Recorder], num_chunks: int) -> None:
    deadline = time.perf_counter() + START_S
    while min(len(recorder.chunks) for recorder in recorders) <= num_chunks:
        for recorder in recorders:
            if recorder.error or recorder.is_done:
                raise ConfigError(f"a stream ended early: {recorder.error or 'its answer is too short'}")
        if time.perf_counter() > deadline:
            raise ConfigError(f"the streams gave fewer than {num_chunks} chunks each in {START_S:g} s")
        await asyncio.sleep(POLL_S)
