"""Benchmarks of kernels, of the host's part and of whole steps run to their end; what they measure is not looked at."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table

from bench import host, kernels
from bench.kernels import build_attention, build_hand_off, build_sampling
from bench.simulate import measure
from bench.simulate.command import measure as measure_to_file
from bench.simulate.costs import load


@pytest.mark.parametrize("build", [build_attention, build_sampling, build_hand_off])
def test_tables_of_kernels(build: Callable[[int], Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ATTENTION", kernels.ATTENTION[::2][:2])  # decode, and a prompt
    assert build(1).row_count


@pytest.mark.parametrize("drafter", ["off", "ngram"])
async def test_the_hosts_part_of_a_step(drafter: str) -> None:
    case = host.Case(2, 40)
    assert host.time_runner(case, num_steps=3) > 0
    figures = await host.time_loop(case, num_steps=3, drafter=drafter)
    assert figures.step > 0 and figures.messages > 0


def test_steps_of_the_engine_fit_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STREAMS", (1, 3))
    monkeypatch.setattr(measure, "PROMPTS", (16, 300))
    measure_to_file(tmp_path / "steps.json", "demo", "cpu", "float32", 1)
    assert {1, 3} <= {step.work.rows for step in load(tmp_path / "steps.json")}
