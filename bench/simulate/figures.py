"""The results of a simulation, and the benchmark figures made from them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LEAST_GAP_S, GAP_WIDTH, NUM_GAPS = 1e-6, 0.01, 2100  # bins 1 % apart, from 1 us to 1,300 s


class Gaps:
    """Gaps between an answer's tokens (ITL): counts by size, each accurate to 1 %."""

    def __init__(self) -> None:
        self.counts = np.zeros(NUM_GAPS, np.int64)

    def add(self, seconds: float) -> None:
        self.counts[int(math.log(max(seconds / LEAST_GAP_S, 1)) / GAP_WIDTH)] += 1

    def add_steps(self, seconds: NDArray[np.float64], num_rows: int) -> None:
        """Count these steps; each gave every row a token."""
        if len(seconds):
            at = np.log(np.maximum(seconds / LEAST_GAP_S, 1)) / GAP_WIDTH
            np.add.at(self.counts, at.astype(np.int64), num_rows)

    def quantile(self, share: float) -> float:
        """Seconds; 0 without gaps."""
        total = self.counts.sum()
        at = int(np.searchsorted(self.counts.cumsum(), share * total))
        return LEAST_GAP_S * math.exp((at + 0.5) * GAP_WIDTH) if total else 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, from its arrival to its end."""

    number: tuple[int, int]  # conversation, turn
    arrived: float
    first_at: float  # when the client got the first token
    last_at: float
    num_prompt: int
    num_tokens: int
    num_cached: int  # prompt tokens that were not recomputed
    error: str = ""
    is_mixed: bool = False  # of two revisions

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived

    @property
    def tpot_s(self) -> float:
        return (self.last_at - self.first_at) / max(self.num_tokens - 1, 1)


@dataclass(slots=True)
class Outcome:
    answers: list[Answer] = field(default_factory=list)  # in order of their ends
    gaps: Gaps = field(default_factory=Gaps)
    busy_s: dict[str, list[float]] = field(default_factory=dict)  # role |-> busy time of each worker
    num_preemptions: int = 0
    num_choices: int = 0  # calls of the router, including those that return "wait"
    choosing_s: float = 0.0  # their CPU time
    ran_s: float = 0.0  # real time of the simulation
    num_deaths: int = 0
    num_mispaired: int = 0  # hand-offs between workers of two revisions
    upgraded: float = 0.0  # share of workers of the revision that is rolled out

    def note_mispaired(self) -> None:
        self.num_mispaired += 1


def summarise(outcome: Outcome, ttft_s: float, tpot_s: float) -> dict[str, float]:
    """Figures by name. Goodput: requests whose TTFT and TPOT meet the goals, over the seconds in which all arrived.

    Other rates and shares are over the whole time, including the end, when fewer and fewer answers run.
    """
    whole = [answer for answer in outcome.answers if not answer.error]
    if not whole:
        return {"requests": 0.0, "failed": float(len(outcome.answers))}
    began, arrived = min(one.arrived for one in whole), max(one.arrived for one in whole)
    span = max(one.last_at for one in whole) - began
    is_good = [one.ttft_s <= ttft_s and one.tpot_s <= tpot_s for one in whole]
    ttft, tpot = (np.array([getattr(one, name) * 1e3 for one in whole]) for name in ("ttft_s", "tpot_s"))
    return {
        "requests": float(len(whole)),
        "failed": float(len(outcome.answers) - len(whole)),
        **{f"ttft_p{q}_ms": float(np.percentile(ttft, q)) for q in (50, 90, 99)},
        **{f"tpot_p{q}_ms": float(np.percentile(tpot, q)) for q in (50, 90, 99)},
        **{f"itl_p{q}_ms": outcome.gaps.quantile(q / 100) * 1e3 for q in (50, 99)},
        "goodput_requests_per_s": sum(is_good) / ((arrived - began) or span),
        "good_share": sum(is_good) / len(is_good),
        "tokens_per_s": sum(one.num_tokens for one in whole) / span,
        "cache_hit_rate": sum(one.num_cached for one in whole) / sum(one.num_prompt for one in whole),
        **{f"{role}_busy_share": float(np.mean(busy)) / span for role, busy in outcome.busy_s.items()},
        **{f"{role}_imbalance": find_imbalance(busy) for role, busy in outcome.busy_s.items()},
        "preemptions": float(outcome.num_preemptions),
        "deaths": float(outcome.num_deaths),
        "upgraded_share": outcome.upgraded,
        "mispaired": float(outcome.num_mispaired),
        "mixed_answers": float(sum(answer.is_mixed for answer in outcome.answers)),
        "routing_per_s": outcome.num_choices / outcome.choosing_s if outcome.choosing_s else 0.0,
        "ran_s": outcome.ran_s,
    }


def find_imbalance(busy_s: Sequence[float]) -> float:
    """Busy time of the busiest worker / the mean."""
    return max(busy_s) / float(np.mean(busy_s)) if any(busy_s) else 1.0
