"""The measurements of a server in one round: one function per row, which sends requests and returns figures."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from bench.load.answers import Answer
from bench.load.client import Client
from bench.load.interference import InterferenceOptions, measure
from bench.load.loops import Job, run_closed
from bench.load.metrics import summarise, tpot_s, ttft_s
from bench.load.prompts import PromptWriter
from bench.load.workloads import Fixed, Wanted

ROW_S = 900.0  # a longer row counts as failed
REPEATED_TOKENS, REPEATS, REPEATS_OUTPUT = 24, 8, 128


class RowError(Exception):
    """A request of the row failed; the message says how."""


@dataclass(frozen=True, slots=True)
class Target:
    client: Client
    writer: PromptWriter


Row = Callable[[Target, int], Awaitable[dict[str, float]]]  # the round's number seeds the prompts


async def measure_tpot(target: Target, seed: int) -> dict[str, float]:
    """One stream, 128 -> 64, twice."""
    answers = await ask_all(target, 128, 64, 2, 1, seed)
    return {
        "tpot_ms": median(tpot_s(answer) or 0.0 for answer in answers) * 1e3,
        "ttft_ms": median(map(ttft_s, answers)) * 1e3,
    }


async def measure_ttft(num_input: int, count: int, target: Target, seed: int) -> dict[str, float]:
    """One prompt of `num_input` tokens, `count` times."""
    return {"ttft_ms": median(map(ttft_s, await ask_all(target, num_input, 1, count, 1, seed))) * 1e3}


async def measure_throughput(num_input: int, concurrency: int, target: Target, seed: int) -> dict[str, float]:
    """`concurrency` streams at once, `num_input` -> 64."""
    jobs = build_requests(target, num_input, 64, concurrency, seed)
    answers, seconds = await run_closed(target.client.ask, jobs, concurrency, _ignore)
    summary = summarise(check(answers), seconds, {})
    return {"tokens_per_s": summary["output_throughput"], "median_tpot_ms": summary["median_tpot_ms"]}


async def measure_interference(target: Target, _seed: int) -> dict[str, float]:
    """Four streams, then two prompts of 1,500 tokens."""
    figures = await measure(target.client, fresh(target.writer), InterferenceOptions())
    names = ("quiet_median_itl_ms", "busy_p99_itl_ms", "busy_max_itl_ms", "p99_ratio", "max_ratio", "mean_long_ttft_ms")
    return {name: figures[name] for name in names}


async def measure_prefix(target: Target, seed: int) -> dict[str, float]:
    """A prompt of 1,500 tokens, then the same again."""
    (prompt, _), *_ = build_requests(target, 1500, 1, 1, seed)
    cold = check([await target.client.ask(prompt, 1)])
    warm = check([await target.client.ask(prompt, 1)])
    return {"cold_ttft_ms": ttft_s(cold[0]) * 1e3, "warm_ttft_ms": ttft_s(warm[0]) * 1e3}


async def measure_repeats(target: Target, _seed: int) -> dict[str, float]:
    """One stream after a prompt that repeats 24 tokens 8 times; the same text in every round and for every server."""
    block = PromptWriter(target.writer.ids, run=1).write(Wanted(REPEATED_TOKENS, 1), 0, 0)
    prompt = block * REPEATS if isinstance(block, list) else " ".join([block] * REPEATS)
    (answer,) = check([await target.client.ask(prompt, REPEATS_OUTPUT)])
    return {"tpot_ms": (tpot_s(answer) or 0.0) * 1e3}


ROWS: Mapping[str, Row] = {
    "tpot": measure_tpot,
    "ttft512": partial(measure_ttft, 512, 3),
    "ttft8k": partial(measure_ttft, 8000, 1),
    **{f"throughput-{count}": partial(measure_throughput, 128, count) for count in (1, 4, 8, 16, 32)},
    **{f"throughput-{count}-512": partial(measure_throughput, 512, count) for count in (8, 16)},
    "interference": measure_interference,
    "prefix": measure_prefix,
    "repeats": measure_repeats,
}


async def measure_row(name: str, target: Target, seed: int) -> dict[str, float]:
    """The figures of one round. Raises RowError, also if it takes too long."""
    try:
        async with asyncio.timeout(ROW_S):
            return await ROWS[name](target, seed)
    except TimeoutError:
        raise RowError(f"it took more than {ROW_S:g} s") from None


async def ask_all(
    target: Target, num_input: int, num_output: int, count: int, concurrency: int, seed: int
) -> list[Answer]:
    """Raises RowError if any fails."""
    jobs = build_requests(target, num_input, num_output, count, seed)
    answers, _ = await run_closed(target.client.ask, jobs, concurrency, _ignore)
    return check(answers)


def build_requests(target: Target, num_input: int, num_output: int, count: int, seed: int) -> list[Job]:
    writer = fresh(target.writer)
    wanted = Fixed(num_input, num_output).draw(count, seed)
    return [(writer.write(one, index, seed), one.num_output) for index, one in enumerate(wanted)]


def fresh(writer: PromptWriter) -> PromptWriter:
    """A writer with new prompts."""
    return PromptWriter(writer.ids, writer.words_a_token)


def check(answers: list[Answer]) -> list[Answer]:
    """Raises RowError for the first failed answer."""
    for answer in answers:
        if answer.error:
            raise RowError(answer.error)
    return answers


def _ignore(_answer: Answer) -> None:
    """No progress is shown."""
