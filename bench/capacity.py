"""How many workers of which size meet goals for TTFT and TPOT at a given rate, by roofline and queueing. Pure.

answers   A worker has  n = rate * output * step(n)  answers on average, and at most n + z sqrt(n / workers) nine tenths
          of the time (Poisson, spread by routing). That number is bounded by TPOT >= step(n) and by the pool.
prompts   M/D/c: TTFT must cover the wait that a tenth exceeds (Erlang C), the prompt's own chunks, the transfer of
          the last one, and the steps before the answer's first token.
both      Where GPUs are too few for two roles, decode workers compute prompts beside answers. These take 0.7 of a step
          of answers then (worker/chunks.py: STRETCH), so 0.41 of the time, and answers are slower by what prompts take.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from bench.roofline import build_costs, handoff_token_s, kv_tokens_that_fit
from bench.simulate.costs import Costs, Work
from engine.cuda.sizes import most_logits
from runtime.config import DecodeConfig, PrefillConfig
from runtime.gpus import Card
from worker.chunks import STRETCH
from worker.startup.limits import ModelShape, complete, limits_of

SIZES = (1, 2, 4, 8)  # ranks per worker
Z = 1.28  # a tenth of a normal distribution is more than this many deviations above its mean
TAIL = 0.1
BESIDE = (STRETCH - 1) / STRETCH  # of the time, at most, that prompts take beside answers
MOST_COMBINED = 4096  # workers
SMALL = 0.001  # share of the time that prompts take; below, more workers do not make a difference
CALLS_S = 0.003  # messages between gateway and workers before the first token
MET_STEPS = 1.5  # decode steps before the first token: half of a running one, and the answer's own


class UnreachableError(Exception):
    """The goals cannot be met. `limit` names the cause: memory, tpot, ttft or gpus."""

    def __init__(self, limit: str, detail: str) -> None:
        super().__init__(detail)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Goals:
    """The load and the goals. Goals hold for nine of ten requests."""

    rate: float  # requests per second
    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not all(math.isfinite(value) and value > 0 for value in astuple(self)):
            raise ValueError(f"rate, tokens and goals have to be above 0: {self}")


@dataclass(frozen=True, slots=True)
class Role:
    """The workers of one role."""

    count: int
    tp: int
    costs: Costs
    kv_tokens: int  # in each worker's pool
    max_running: int
    chunk_tokens: int  # of prompts; 0 for decode beside prefill workers
    expected_s: float  # TTFT of prefill, TPOT of decode
    limit: str  # the first limit that a worker reaches
    reasons: tuple[str, ...]

    @property
    def num_gpus(self) -> int:
        return self.count * self.tp


@dataclass(frozen=True, slots=True)
class Proposal:
    """The workers to start."""

    prefill: Role | None  # None: decode workers compute prompts too
    decode: Role


def _can_divide(model: ModelShape, tp: int) -> bool:
    """Whether a worker of `tp` ranks can compute it."""
    is_shared = model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0
    return is_shared and all(size % tp == 0 for size in model.divisible)


def propose(model: ModelShape, gpu: Card, goals: Goals, num_gpus: int) -> Proposal:
    """The fewest GPUs for each role; among equals the fewest ranks. Where these are too many, workers that do both.

    Raises UnreachableError.
    """
    sizes = [size for size in SIZES if size <= num_gpus and _can_divide(model, size)]
    decode = _choose_size(sizes, lambda tp: plan_decode(model, gpu, goals, tp))
    prefill = _choose_size(sizes, lambda tp: plan_prefill(model, gpu, goals, tp, decode))
    wanted = prefill.num_gpus + decode.num_gpus
    if wanted <= num_gpus:
        return Proposal(prefill, decode)
    try:
        both = _choose_size(sizes, lambda tp: plan_combined(model, gpu, goals, tp))
        why_not = f"{both.num_gpus} of workers that do both"
        if both.num_gpus <= num_gpus:
            return Proposal(None, both)
    except UnreachableError as error:
        why_not = str(error)
    role, name = max((prefill, "prompts"), (decode, "answers"), key=lambda pair: pair[0].num_gpus)
    raise UnreachableError(
        "gpus",
        f"{wanted} GPUs are needed and {num_gpus} given: {prefill.num_gpus} for prompts, {decode.num_gpus} for "
        f"answers, or {why_not}; most go to {name}, where a worker's limit is {role.limit}",
    )


def _choose_size(sizes: list[int], plan: Callable[[int], Role]) -> Role:
    """The plan with the fewest GPUs. Raises the last error if there is none."""
    found, error = list[Role](), UnreachableError("gpus", "no GPU is given")
    for size in sizes:
        try:
            found.append(plan(size))
        except UnreachableError as unreachable:
            error = unreachable
    if not found:
        raise error
    return min(found, key=lambda role: role.num_gpus)


def plan_decode(model: ModelShape, gpu: Card, goals: Goals, tp: int) -> Role:
    """The fewest decode workers of `tp` ranks. Raises UnreachableError."""
    config = complete(DecodeConfig(tp=tp), model, gpu, int(gpu.memory_bytes))
    costs = build_costs(model, gpu, tp)
    kv_tokens = kv_tokens_that_fit(model, gpu, tp, limits_of(config, model.vocab_size, most_logits(gpu.memory_bytes)))
    whole, mean = goals.input_tokens + goals.output_tokens, goals.input_tokens + goals.output_tokens // 2
    alone, read = step_of(costs, 1, mean), costs.weights
    if kv_tokens < whole:
        raise UnreachableError("memory", f"weights and one request of {whole} tokens do not fit with {tp} ranks")
    if alone > goals.tpot_s:
        raise UnreachableError(
            "tpot",
            f"one answer's step takes {alone * 1e3:.1f} ms with {tp} ranks, {read * 1e3:.1f} of it to read weights",
        )
    by_pool = kv_tokens // whole
    by_tpot = max(rows for rows in range(1, config.max_running + 1) if step_of(costs, rows, mean) <= goals.tpot_s)
    most = min(by_pool, by_tpot)
    rate = most / step_of(costs, most, mean) / goals.output_tokens  # requests per second
    count = max(1, math.ceil(goals.rate / rate))
    while (peak := find_peak(costs, goals, mean, count, most)) >= most + 1:
        count += 1
    reasons = (
        f"a step reads weights for {read * 1e3:.2f} ms, and each answer's KV for {costs.kv_token * mean * 1e6:.0f} us",
        f"TPOT allows {by_tpot} answers at once, the pool of {kv_tokens} tokens {by_pool}",
        f"a worker serves {rate:.3g} requests/s at {most} answers; of {count} each has {peak:.0f} or fewer",
    )
    limit = "the pool" if by_pool < by_tpot else "TPOT" if by_tpot < config.max_running else "the batch"
    return Role(count, tp, costs, kv_tokens, most, 0, step_of(costs, min(peak, most), mean), limit, reasons)


def step_of(costs: Costs, rows: float, context: int) -> float:
    """Duration of a step with `rows` answers."""
    return costs.seconds(Work(math.ceil(rows), int(rows * context), 0, 0))


def find_peak(costs: Costs, goals: Goals, context: int, count: int, most: int) -> float:
    """Concurrent answers on one of `count` workers, nine tenths of the time; infinite if `most` cannot keep up."""
    arrivals = goals.rate / count * goals.output_tokens  # tokens per second
    rows = next((rows for rows in range(1, most + 1) if rows >= arrivals * step_of(costs, rows, context)), None)
    return math.inf if rows is None else rows + Z * math.sqrt(rows / count)


def plan_prefill(model: ModelShape, gpu: Card, goals: Goals, tp: int, decode: Role) -> Role:
    """The fewest prefill workers of `tp` ranks for these decode workers. Raises UnreachableError."""
    config, prompt = complete(PrefillConfig(tp=tp), model, gpu, int(gpu.memory_bytes)), goals.input_tokens
    costs, chunk = build_costs(model, gpu, tp), config.chunk_tokens
    kv_tokens = kv_tokens_that_fit(model, gpu, tp, limits_of(config, model.vocab_size, most_logits(gpu.memory_bytes)))
    if kv_tokens < prompt:
        raise UnreachableError("memory", f"weights and one prompt of {prompt} tokens do not fit with {tp} ranks")
    own, last = time_prompt(costs, prompt, chunk)
    rest = last * handoff_token_s(model, gpu, decode.tp) + MET_STEPS * decode.expected_s + CALLS_S
    if own + rest > goals.ttft_s:
        raise UnreachableError(
            "ttft",
            f"a prompt of {prompt} tokens alone takes {own * 1e3:.0f} ms with {tp} ranks, and {rest * 1e3:.0f} ms more "
            "until the first token",
        )
    count = math.floor(goals.rate * own) + 1
    while (wait := find_wait(goals.rate, own, count)) + own + rest > goals.ttft_s:
        count += 1
    reasons = (
        f"a chunk of {chunk} tokens takes {costs.token * chunk * 1e3:.0f} ms, weights {costs.weights * 1e3:.1f} ms",
        f"a prompt takes {own * 1e3:.0f} ms: the workers are busy {goals.rate * own / count:.0%} of the time",
        f"nine tenths wait {wait * 1e3:.0f} ms or less; hand-off and first token take {rest * 1e3:.0f} ms",
    )
    at_once = min(config.max_running, kv_tokens // prompt)
    return Role(count, tp, costs, kv_tokens, at_once, chunk, wait + own + rest, "computing", reasons)


def plan_combined(model: ModelShape, gpu: Card, goals: Goals, tp: int) -> Role:
    """The fewest workers of `tp` ranks that compute prompts and answers. Raises UnreachableError."""
    alone = plan_decode(model, gpu, goals, tp)
    costs, config = alone.costs, complete(DecodeConfig(tp=tp), model, gpu, int(gpu.memory_bytes))
    own, _ = time_prompt(costs, goals.input_tokens, config.local_prefill_chunk_tokens)
    for count in range(alone.count, MOST_COMBINED):
        busy = goals.rate * own / count  # the share of time that prompts take
        if busy >= BESIDE:
            continue
        slower = 1 / (1 - busy)  # so many times as long is a step of answers, on average
        slowed, mean = replace(goals, rate=goals.rate * slower), goals.input_tokens + goals.output_tokens // 2
        peak = find_peak(costs, slowed, mean, count, alone.max_running)
        if peak >= alone.max_running + 1:
            continue
        tpot_s = step_of(costs, peak, mean) * slower
        wait = find_wait(goals.rate, own / BESIDE, count)
        ttft_s = wait + own / BESIDE + MET_STEPS * tpot_s + CALLS_S
        if tpot_s > goals.tpot_s or ttft_s > goals.ttft_s:
            if busy < SMALL:
                break  # more workers gain nothing
            continue
        reasons = (
            f"prompts take {busy:.0%} of the time, and a prompt up to {own / BESIDE * 1e3:.0f} ms beside answers",
            f"nine tenths have a TTFT of {ttft_s * 1e3:.4g} ms or less",
            f"the pool of {alone.kv_tokens} tokens and TPOT allow {alone.max_running} answers at once, a worker has "
            f"{peak:.0f} or fewer",
        )
        chunk = config.local_prefill_chunk_tokens
        return Role(count, tp, costs, alone.kv_tokens, alone.max_running, chunk, tpot_s, alone.limit, reasons)
    raise UnreachableError("gpus", "no number of workers that do both, as prompts would take too long beside answers")


def time_prompt(costs: Costs, num_tokens: int, chunk: int) -> tuple[float, int]:
    """(seconds of a prompt alone, tokens of its last chunk)"""
    counts = [min(chunk, num_tokens - begin) for begin in range(0, num_tokens, chunk)]
    pairs = [count * number * chunk + count * (count + 1) // 2 for number, count in enumerate(counts)]
    return sum(costs.seconds(Work(0, 0, *parts)) for parts in zip(counts, pairs, strict=True)), counts[-1]


def find_wait(rate: float, service_s: float, count: int) -> float:
    """The wait in seconds that a tenth of requests exceed, for `count` servers with a fixed service time (M/D/c)."""
    load = rate * service_s
    if load >= count:
        return math.inf
    blocked = 1.0
    for servers in range(1, count + 1):  # Erlang B
        blocked = load * blocked / (servers + load * blocked)
    waits = blocked / (1 - load / count * (1 - blocked))  # Erlang C: the share that waits
    mean_of_those = service_s / (count - load) / 2  # half of what exponential service times would give
    return mean_of_those * math.log(max(waits / TAIL, 1.0))
