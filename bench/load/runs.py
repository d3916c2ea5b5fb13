"""`baton bench serve`: discovers the server, warms up, runs all levels and returns the figures."""

import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from math import isinf
from typing import Any

from bench.load.arrivals import draw_moments, parse_arrivals
from bench.load.client import Client
from bench.load.loops import Done, Job, run_closed, run_open
from bench.load.metrics import summarise
from bench.load.options import Level, ServeOptions
from bench.load.prompts import PromptWriter
from bench.load.server import Server, discover, open_http
from bench.load.workloads import Dataset, parse_dataset
from runtime.settings import ConfigError

FORMAT = "baton-bench-serve/1"
WARM_SEED = 2**31  # for prompts that no run has
SPARE_CONNECTIONS = 8

Start = Callable[[str, int], Done]  # (a level's name, its number of requests) |-> a callback for each finished request


async def run_levels(options: ServeOptions, start: Start) -> dict[str, Any]:
    """The JSON of a whole call. Raises ConfigError if nothing can be measured."""
    dataset, levels = parse_dataset(options.dataset), options.levels()
    most = max(level.concurrency or options.count_requests(level) for level in levels)
    async with open_http(options.url, options.api_key, most + SPARE_CONNECTIONS) as http:
        server, ids = await discover(http, options.model)
        writer = PromptWriter(() if options.text else ids, server.words_a_token, shared_tokens=options.shared_prefix)
        client = Client(http, server, options.temperature)
        if options.warm_up:
            await warm_up(client, writer, dataset, options.warm_up, start)
        runs = []
        for place, level in enumerate(levels):
            runs.append(await run_level(client, writer, dataset, options, level, place, start))
    return describe(options, server, writer, runs)


async def warm_up(client: Client, writer: PromptWriter, dataset: Dataset, count: int, start: Start) -> None:
    """Requests that do not count; all must succeed. Raises ConfigError."""
    jobs = build_requests(writer, dataset, count, WARM_SEED)
    answers, _ = await run_closed(client.ask, jobs, 1, start("warm-up", count))
    for answer in answers:
        if answer.error:
            raise ConfigError(f"the warm-up failed: {answer.error}")


async def run_level(
    client: Client,
    writer: PromptWriter,
    dataset: Dataset,
    options: ServeOptions,
    level: Level,
    place: int,
    start: Start,
) -> dict[str, Any]:
    """One run: send its load, return its figures."""
    count, seed = options.count_requests(level), options.seed + 1000 * place
    jobs = build_requests(writer, dataset, count, seed)
    done = start(level.name, count)
    began = time.time()
    if level.concurrency:
        answers, seconds = await run_closed(client.ask, jobs, level.concurrency, done)
    else:
        moments = draw_moments(parse_arrivals(options.arrivals), level.rate, count, seed)
        answers, seconds = await run_open(client.ask, jobs, moments, done)
    load: dict[str, Any] = {
        "max_concurrency": level.concurrency or None,
        "request_rate": "inf" if isinf(level.rate) else level.rate or None,
        "num_prompts": count,
        "began": began,
    }
    return load | summarise(answers, seconds, options.targets())


def build_requests(writer: PromptWriter, dataset: Dataset, count: int, seed: int) -> list[Job]:
    drawn = dataset.draw(count, seed)
    return [(writer.write(wanted, index, seed), wanted.num_output) for index, wanted in enumerate(drawn)]


def describe(options: ServeOptions, server: Server, writer: PromptWriter, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The file to save: what was measured, how, and the results."""
    return {
        "format": FORMAT,
        "label": options.label or server.kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": asdict(server),
        "workload": {
            "dataset": options.dataset,
            "prompts": "token ids" if writer.ids else "text",
            "arrivals": options.arrivals if options.rate else "closed loop",
            "warm_up_requests": options.warm_up,
            "shared_prefix_tokens": options.shared_prefix,
            "temperature": options.temperature,
            "seed": options.seed,
            "run": writer.run,
            "goodput_ms": options.targets(),
        },
        "levels": runs,
    }
