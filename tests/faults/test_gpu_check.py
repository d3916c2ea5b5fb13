"""The parts of `make gpu-check` that start services, and kill their workers and ranks, on the CPU."""

import pytest
import torch

from bench.gpu_check import PARTS, run_part


@pytest.mark.parametrize("name", ["defaults", "service", "deaths", "two GPUs"])
def test_answers_are_right_also_where_workers_or_ranks_are_killed(name: str) -> None:
    (part,) = (part for part in PARTS if part.name == name)
    assert not [one for one in run_part(part, torch.device("cpu")) if one.result not in ("ok", "skipped")]
