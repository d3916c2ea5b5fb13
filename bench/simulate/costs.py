"""The duration of a step by its work: `Costs`, from a roofline or fitted to measurements. Pure, except `load`.

    seconds = step + row * rows + kv_token * kv_tokens + pair * pairs + max(weights, token * (rows + prompt_tokens))

Matrix products either wait for the weights or compute. Attention is added: it reads KV for answers, and computes for
prompts. A fit has no `weights`: it is linear.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.sequences import ScheduledSequence

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step."""

    rows: int  # of answers, one token each
    kv_tokens: int  # read by these rows, their own included
    prompt_tokens: int
    pairs: int  # (prompt token, token that it attends to)


@dataclass(frozen=True, slots=True)
class Measured:
    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per part of a step."""

    step: float
    row: float
    kv_token: float
    token: float
    pair: float
    weights: float = 0.0

    def seconds(self, work: Work) -> float:
        return self._without_kv(work) + self.kv_token * work.kv_tokens

    def ends(self, start: float, work: Work, count: int) -> Floats:
        """[count] end times of equal answer steps, each with one more KV token per row than the last."""
        kv_tokens = work.kv_tokens + work.rows * np.arange(count)
        seconds = self._without_kv(work) + self.kv_token * kv_tokens
        return np.cumsum(np.concatenate(([start], seconds)))[1:]

    def _without_kv(self, work: Work) -> float:
        products = max(self.weights, self.token * (work.rows + work.prompt_tokens))
        return self.step + self.row * work.rows + self.pair * work.pairs + products


def work_of(planned: Sequence[ScheduledSequence]) -> Work:
    """The work of a step planned by `schedule`. A single position counts as a row, even at the end of a prompt."""
    rows = [step.begin + 1 for step in planned if step.count == 1]
    parts = [step for step in planned if step.count > 1]
    pairs = sum(step.count * step.begin + step.count * (step.count + 1) // 2 for step in parts)
    return Work(len(rows), sum(rows), sum(step.count for step in parts), pairs)


def fit(steps: Sequence[Measured]) -> Costs:
    """Least squares of relative errors, no part below zero. ValueError if the steps cannot separate the parts."""
    inputs = [(1, m.work.rows, m.work.kv_tokens, m.work.rows + m.work.prompt_tokens, m.work.pairs) for m in steps]
    seconds = np.array([measured.seconds for measured in steps])
    matrix = np.array(inputs, np.float64).reshape(-1, 5) / seconds[:, None]
    if np.linalg.matrix_rank(matrix / np.maximum(matrix.max(axis=0, initial=0), 1e-300)) < 5:
        raise ValueError(f"{len(steps)} steps cannot separate rows, KV, prompt tokens and pairs: measure others too")
    found = _solve(matrix)
    return Costs(step=found[0], row=found[1], kv_token=found[2], token=found[3], pair=found[4])


def _solve(matrix: Floats) -> list[float]:
    """x >= 0 with matrix @ x nearest to 1: negative parts are dropped, the lowest first."""
    scale = matrix.max(axis=0)
    kept = list(range(len(scale)))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.ones(len(matrix)), rcond=None)
        if (found >= 0).all():
            result = dict(zip(kept, found / scale[kept], strict=True))
            return [float(result.get(at, 0.0)) for at in range(len(scale))]
        del kept[int(np.argmin(found))]


def mean_error(costs: Costs, steps: Sequence[Measured]) -> float:
    """Mean relative error of `costs` on these steps."""
    return float(np.mean([abs(costs.seconds(one.work) / one.seconds - 1) for one in steps]))


def save(path: Path, about: dict[str, Any], steps: Sequence[Measured]) -> None:
    """As JSON. `about`: what was measured, and where."""
    rows = [asdict(one.work) | {"seconds": one.seconds} for one in steps]
    path.write_text(json.dumps({"about": about, "steps": rows}, indent=1))


def load(path: Path) -> list[Measured]:
    """Read what `save` wrote. ValueError says what is wrong with it."""
    names = [item.name for item in fields(Work)]
    try:
        rows = json.loads(path.read_text())["steps"]
        steps = [Measured(Work(*(int(row[name]) for name in names)), float(row["seconds"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no measured steps ({type(error).__name__}: {error})") from error
    if not all(one.seconds > 0 for one in steps):
        raise ValueError(f"{path} has a step that took no time")
    return steps
