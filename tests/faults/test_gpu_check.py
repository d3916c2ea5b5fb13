"""The part of `make gpu-check` that kills workers, on the CPU."""

import torch

from bench.gpu_check import PARTS, run_part


def test_answers_are_right_although_both_workers_are_killed() -> None:
    (part,) = (part for part in PARTS if part.name == "deaths")
    assert [one.result for one in run_part(part, torch.device("cpu"))] == ["ok"]
