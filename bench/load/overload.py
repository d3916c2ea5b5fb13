"""Bench of a service that gets more requests than it can answer, of several users and priorities.

First its capacity, by a closed loop; then an open loop at a multiple of it. `judge` is pure. An answer is good if
its first token came within the deadline and 99 of 100 of its gaps within the goal and TOLERANCE.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.load.answers import Answer
from bench.load.arrivals import draw_moments, parse_arrivals
from bench.load.client import Client
from bench.load.loops import Done, Job, run_closed, run_open
from bench.load.metrics import gaps_s, ttft_s
from bench.load.options import Target
from bench.load.prompts import Prompt, PromptWriter
from bench.load.runs import build_requests
from bench.load.server import discover, open_http
from bench.load.workloads import parse_dataset
from runtime.settings import ConfigError

TOLERANCE = 0.2
USERS = {"a": 5, "b": 4, "c": 3}  # user |-> requests of each dozen: at twice the capacity all want more than a third
PRIORITIES = {0: 2, 5: 5, 9: 3}  # priority |-> requests of ten
CAPACITY_SEED = 2**30  # for prompts that the overload does not have


@dataclass(frozen=True, kw_only=True)
class OverloadOptions(Target):
    """One call of `baton bench overload`."""

    dataset: str = "lengths:128,64"
    """Requests, as in `baton bench serve`."""
    itl_goal_ms: float = 100.0
    """Goal by which answers are judged: the server's --itl-goal-ms, if it has one."""
    deadline_ms: int = 5000
    """Deadline of each request's first token."""
    rate: float = 0.0
    """Requests per second that count as the capacity; 0: measured first."""
    concurrency: int = 8
    """Concurrent requests while the capacity is measured."""
    factor: float = 2.0
    """Requests per second that are sent, as a multiple of the capacity."""
    seconds: float = 60.0
    """How long requests are sent."""
    plain: bool = False
    """Send neither priorities, deadlines nor users; answers are judged as if they had been sent."""
    seed: int = 0
    """Seed of contents, send times, users and priorities."""

    def __post_init__(self) -> None:
        for name in ("itl_goal_ms", "deadline_ms", "concurrency", "factor", "seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} cannot be used: above 0")


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose request it is."""

    user: str
    priority: int


async def run_overload(options: OverloadOptions, done: Done) -> dict[str, Any]:
    """Measure once. `done`: called for each answer of the overload. Raises ConfigError if nothing can be measured."""
    dataset = parse_dataset(options.dataset)
    async with open_http(options.url, options.api_key, 4096) as http:
        server, ids = await discover(http, options.model)
        client, writer = Client(http, server), PromptWriter(ids, server.words_a_token)
        capacity = options.rate
        if not capacity:
            jobs = build_requests(writer, dataset, 4 * options.concurrency, options.seed + CAPACITY_SEED)
            answers, seconds = await run_closed(client.ask, jobs, options.concurrency, lambda _answer: None)
            if errors := [answer.error for answer in answers if answer.error]:
                raise ConfigError(f"the capacity cannot be measured: {errors[0]}")
            capacity = len(answers) / seconds
        count = max(int(options.factor * capacity * options.seconds), 1)
        jobs, asked = build_requests(writer, dataset, count, options.seed), draw_asked(count, options.seed)
        moments = draw_moments(parse_arrivals("poisson"), options.factor * capacity, count, options.seed)
        by_prompt = {id(prompt): one for (prompt, _), one in zip(jobs, asked, strict=True)}

        async def ask(prompt: Prompt, num_tokens: int) -> Answer:
            one = by_prompt[id(prompt)]
            fields = {"user": one.user, "priority": one.priority, "deadline_ms": options.deadline_ms}
            return await client.ask(prompt, num_tokens, {} if options.plain else fields)

        answers, seconds = await run_open(ask, jobs, moments, done)
    return {"capacity": capacity, "rate": options.factor * capacity, **judge(answers, asked, jobs, seconds, options)}


def draw_asked(count: int, seed: int) -> list[Asked]:
    """By the weights of USERS and PRIORITIES."""
    dice = np.random.default_rng((seed, 1))
    users, priorities = (
        [name for name, weight in weights.items() for _ in range(weight)] for weights in (USERS, PRIORITIES)
    )
    drawn = dice.integers(0, (len(users), len(priorities)), (count, 2)).tolist()
    return [Asked(str(users[user]), int(priorities[priority])) for user, priority in drawn]


def is_good(answer: Answer, goal_s: float, deadline_s: float) -> bool:
    gaps = gaps_s(answer)
    is_steady = not gaps or float(np.percentile(gaps, 99)) <= (1 + TOLERANCE) * goal_s
    return not answer.error and ttft_s(answer) <= deadline_s and is_steady


def judge(
    answers: Sequence[Answer], asked: Sequence[Asked], jobs: Sequence[Job], seconds: float, options: OverloadOptions
) -> dict[str, Any]:
    """Figures of the overload, which took `seconds` until its last answer."""
    goal_s, deadline_s = options.itl_goal_ms / 1e3, options.deadline_ms / 1e3
    whole = [answer for answer in answers if not answer.error]
    gaps = [gap for answer in whole for gap in gaps_s(answer)] or [0.0]
    good = sum(answer.output_tokens for answer in whole if is_good(answer, goal_s, deadline_s))
    tokens = {
        user: sum(answer.output_tokens for answer, one in zip(answers, asked, strict=True) if one.user == user)
        for user in USERS
    }
    total = max(sum(tokens.values()), 1)
    rows = []
    for priority in PRIORITIES:
        some = [answer for answer, one in zip(answers, asked, strict=True) if one.priority == priority]
        waits = [ttft_s(answer) for answer in some if not answer.error] or [0.0]
        rows.append(
            {
                "priority": priority,
                "sent": len(some),
                "answered": sum(not answer.error for answer in some),
                "refused": sum("HTTP 429" in answer.error for answer in some),
                "median_ttft_ms": float(np.median(waits)) * 1e3,
                "max_ttft_ms": max(waits) * 1e3,
            }
        )
    return {
        "seconds": seconds,
        "sent": len(jobs),
        "answered": len(whole),
        "failed": sum(bool(answer.error) and "HTTP 429" not in answer.error for answer in answers),
        "errors": sorted({answer.error[:200] for answer in answers if answer.error and "HTTP 429" not in answer.error}),
        "p50_itl_ms": float(np.percentile(gaps, 50)) * 1e3,
        "p99_itl_ms": float(np.percentile(gaps, 99)) * 1e3,
        "p99_itl_of_goal": float(np.percentile(gaps, 99)) / goal_s,
        "goodput": good / seconds,
        "output_throughput": sum(tokens.values()) / seconds,
        "shares": {user: count / total for user, count in tokens.items()},
        "priorities": rows,
    }


def describe(figures: Mapping[str, Any]) -> str:
    """A line above the table."""
    shares = ", ".join(f"{user} {share:.1%}" for user, share in figures["shares"].items())
    return (
        f"{figures['rate']:.2f} requests/s, capacity {figures['capacity']:.2f}; {figures['answered']} of "
        f"{figures['sent']} answered, {figures['failed']} failed; ITL p50 {figures['p50_itl_ms']:.1f} ms, p99 "
        f"{figures['p99_itl_ms']:.1f} ms ({figures['p99_itl_of_goal']:.2f} of the goal); goodput "
        f"{figures['goodput']:.1f} tokens/s of {figures['output_throughput']:.1f}; shares: {shares}"
    )
