"""`make gpu-check` on the CPU: each check works, and no part can stop the others."""

import json
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import PARTS, Part, main, run_apart, run_part
from bench.gpu_checks import attention
from bench.gpu_checks.speed import require

CPU = torch.device("cpu")
HERE = [part for part in PARTS if part.name != "deaths"]  # tested in tests/faults


@pytest.mark.parametrize("part", HERE, ids=lambda part: part.name)
def test_every_check_holds_on_the_cpu(part: Part) -> None:
    outcomes = list(run_part(part, CPU))
    assert len(outcomes) == len(part.checks)
    assert not [one for one in outcomes if one.result != "ok"]
    assert all(one.detail for one in outcomes)


def test_a_part_runs_in_a_process_of_its_own_and_its_rows_come_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows"
    assert main(device="cpu", parts=("ipc",), out=out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["result"] for row in rows] == ["ok"] * 3 and {row["part"] for row in rows} == {"ipc"}
    shown = capsys.readouterr().out
    assert shown.count("| ipc |") == 3 and f"torch {torch.__version__}" in shown


def test_a_failed_a_slow_and_a_hanging_check_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Part("none", 60, ("attention:check_nothing", "nowhere:check", "layers:is_interpreted"))
    assert [one.result for one in run_part(failing, CPU)] == ["FAILED"] * 3
    hanging = Part("engine", 1, ("engine:check_greedy",))
    (row,) = run_apart(hanging, "cpu", 1)
    assert row.result == "FAILED" and "killed after 1 s" in row.detail and "engine:check_greedy" in row.detail
    monkeypatch.setattr(gpu_check, "PARTS", (hanging,))
    assert main(device="cpu", budget_s=0) == 1


def test_a_goal_that_is_not_reached_on_a_gpu_is_a_row_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(device: torch.device) -> str:
        return require(False, "5 ms (goal 4)", torch.device("cuda"))

    monkeypatch.setattr(attention, "check_attention", miss)
    (row,) = run_part(Part("attention", 1, ("attention:check_attention",)), CPU)
    assert (row.result, row.detail) == ("missed", "5 ms (goal 4)")
    assert require(False, "5 ms", CPU) == "5 ms"
