"""`make gpu-check` on the CPU: each check works, and no part can stop the others."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import BEGIN, DOCUMENT, END, PARTS, Part, main, replace_table, run_apart, run_part
from bench.gpu_checks import attention, engine, ipc, sampling, speed
from bench.gpu_checks.card import MissedError, choose_scale, require
from bench.gpu_checks.speed import compare_to_reading
from decode_worker.step_extras import DraftsAndMasks
from engine.attention.choose import AttentionChoice
from engine.attention.shape import AttentionShape
from engine.cuda import flashinfer as backend_module
from engine.sampling.sample import sample_slowly
from tests.support.cross_compile import IS_NIGHTLY
from tests.support.fake_cuda import FakeGpu, count_opened
from tests.support.flashinfer_doubles import Decode, Prefill
from tests.support.pool_process import COMMAND, build_pool

CPU = torch.device("cpu")
SERVICES = ("defaults", "service", "deaths", "two GPUs")  # parts that start whole services
LONG = {
    "machine", "engine", "kernels", "many streams", "churn", "coded weights", "nixl", "kernel times", "drains",
    "latents", "hand-off", "families",
}  # fmt: skip
HERE = [part for part in PARTS if part.name not in SERVICES and (IS_NIGHTLY or part.name not in LONG)]
FAKE_GPU = (*COMMAND, "fake-gpu")


@pytest.mark.parametrize("part", HERE, ids=lambda part: part.name)
def test_every_check_holds_on_the_cpu(part: Part) -> None:
    outcomes = list(run_part(part, CPU))
    assert len(outcomes) == len(part.checks)
    assert not [one for one in outcomes if one.result not in ("ok", "skipped")]
    assert all(one.detail for one in outcomes)


@pytest.mark.nightly
def test_a_part_runs_in_a_process_of_its_own_and_its_rows_come_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, document = tmp_path / "rows", tmp_path / "GPU.md"
    document.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert main(device="cpu", parts=("ipc",), out=out, document=document) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["result"] for row in rows] == ["skipped"] * 2 and {row["part"] for row in rows} == {"ipc"}
    shown = capsys.readouterr().out
    assert shown.count("| ipc |") == 2 and f"torch {torch.__version__}" in shown
    table = document.read_text()
    assert table.startswith(f"above\n{BEGIN}\n{time.strftime('%Y')}") and table.endswith(f" |\n{END}\nbelow\n")
    assert table.count("| ipc |") == 2 and "old" not in table
    with pytest.raises(ValueError, match="put both where the table belongs"):
        replace_table("no markers", "table")
    assert replace_table(DOCUMENT.read_text(), "table").count("\ntable\n") == 1


def test_what_follows_a_failed_or_hanging_check_gets_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Part("none", 60, ("attention:check_nothing", "nowhere:check", "layers:is_interpreted"))
    assert [one.result for one in run_part(failing, CPU)] == ["FAILED"] * 3
    inside = {
        "failing": "raise AssertionError",
        "hanging": "import time; time.sleep(60)",
        "dead": "import os; os._exit(9)",
    }
    started: list[int] = []

    def build_fake(part: Part, device: str, first: int) -> list[str]:
        started.append(first)
        return [sys.executable, "-c", FAKE.format(first=first, checks=list(part.checks), inside=inside)]

    monkeypatch.setattr(gpu_check, "build_command", build_fake)
    rows = list(run_apart(Part("p", 60, ("ok", "failing", "ok", "dead", "ok")), "cpu", time.monotonic() + 600))
    assert [one.result for one in rows] == ["ok", "FAILED", "ok", "FAILED", "ok"]
    assert "ended with 9" in rows[3].detail and started == [0, 2, 4]
    rows = list(run_apart(Part("p", 0.5, ("hanging", "hanging")), "cpu", time.monotonic() + 600))
    assert ["killed after" in one.detail for one in rows] == [True, True] and started == [0, 2, 4, 0, 1]
    late = list(run_apart(Part("p", 2, ("ok", "ok")), "cpu", 0))
    assert [one.result for one in late] == ["not run"] * 2
    assert main(device="cpu", parts=("machine",), budget_s=0) == 1
    assert main(device="cpu", parts=("unknown",)) == 2
    _, bound, _ = gpu_check.app.parse_args(["--parts", "engine", "one stream", "--budget-s", "800"])
    assert bound.arguments == {"parts": ("engine", "one stream"), "budget_s": 800}


FAKE = """
import json
for check in {checks}[{first}:]:
    result = "FAILED" if check == "failing" else "ok"
    if check in ("hanging", "dead"):
        exec({inside}[check])
    print(json.dumps(dict(part="p", check=check, result=result, detail="", seconds=0)), flush=True)
"""


def test_a_goal_that_is_not_reached_on_a_gpu_is_a_row_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(device: torch.device) -> str:
        return require(False, "5 ms (goal 4)", torch.device("cuda"))

    monkeypatch.setattr(attention, "check_attention", miss)
    (row,) = run_part(Part("attention", 1, ("attention:check_attention",)), CPU)
    assert (row.result, row.detail) == ("missed", "5 ms (goal 4)")
    assert require(False, "5 ms", CPU) == "5 ms"


def test_sizes_fit_the_card_and_goals_are_shares_of_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    assert [choose_scale(size * gib).large for size in (0, 12, 22, 40, 80)] == ["tiny", "1B", "3B", "8B", "8B"]
    monkeypatch.setattr(speed, "measure_bandwidth", lambda device: 1e12)  # reading 10 GB takes 10 ms
    gpu = torch.device("cuda")
    assert "goal 11.50" in compare_to_reading("8B:", 11e-3, 1.15, int(10e9), gpu)
    with pytest.raises(MissedError, match="goal 11"):
        compare_to_reading("8B:", 12e-3, 1.15, int(10e9), gpu)
    assert "goal 23.00" in compare_to_reading("8B:", 12e-3, 1.15, int(10e9), gpu, computing_s=20e-3)


def test_captured_steps_are_checked_with_doubles_of_flashinfer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the calls that a card would get; steps that keep their first plan are noticed."""
    monkeypatch.setattr(backend_module, "BatchDecodeWithPagedKVCacheWrapper", Decode)
    monkeypatch.setattr(backend_module, "BatchPrefillWithPagedKVCacheWrapper", Prefill)
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 1 << 10)

    def choose(shape: AttentionShape, windows: list[int | None], device: torch.device, dtype: torch.dtype) -> Any:
        return AttentionChoice(backend_module.FlashInferAttention(shape, windows, dtype, device, 132), "", False)

    monkeypatch.setattr(attention, "choose_attention", choose)
    monkeypatch.setattr(attention, "GROUPS", (2,))
    monkeypatch.setattr(attention, "KV_HEADS", 1)
    assert attention.check_captured(CPU).startswith("4 steps")
    backend = backend_module.FlashInferAttention
    plan = backend.plan
    monkeypatch.setattr(
        backend, "plan", lambda self, pool, batch: None if self._planned else plan(self, pool, batch)
    )  # fmt: skip
    with pytest.raises(AssertionError, match="off by"):
        attention.check_captured(CPU)


def test_wrong_tokens_of_a_step_ahead_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftsAndMasks, "accept", lambda self, step, tokens: range(len(tokens)))  # all drafts
    with pytest.raises(AssertionError, match="differ from eager ones"):
        engine.check_ahead(CPU)


def test_the_check_of_sampling_notices_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_wrong(device: torch.device) -> sampling.Sampler:
        return lambda logits, batch: sample_slowly(logits, batch) ^ 1

    monkeypatch.setattr(sampling, "_find_sampler", find_wrong)
    with pytest.raises(AssertionError, match="11 of 11"):
        sampling.check_sampling(CPU)


def test_the_checks_for_a_card_hold_on_the_fake_one() -> None:
    pool = build_pool(8, FakeGpu())
    before = count_opened()
    assert "8 pages of 512 bytes equal, a recycled one refused" in ipc.read_pages(pool, FAKE_GPU, "cuda_ipc")
    report = ipc.kill_exporters(pool, FAKE_GPU, num_kills=1, repeats=5)
    assert report.startswith("1 owners killed, ") and report.endswith("context works, no call failed")
    assert ipc.time_copies(pool, FAKE_GPU).startswith("4 pages: ")
    assert count_opened() == before


def test_what_a_killed_owner_does_to_its_reader_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = build_pool(2, FakeGpu())

    def load(pages: Sequence[int]) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(pool, "load", load)
    report = ipc.kill_exporters(pool, FAKE_GPU, num_kills=1, repeats=1)
    assert report.startswith("FINDING: the reader's context is lost after kill 0: CUDA error: unspecified launch")


@pytest.mark.faults
@pytest.mark.parametrize("name", SERVICES)
def test_answers_of_services_are_right_also_where_workers_or_ranks_are_killed(name: str) -> None:
    (part,) = (part for part in PARTS if part.name == name)
    assert not [one for one in run_part(part, CPU) if one.result not in ("ok", "skipped")]
