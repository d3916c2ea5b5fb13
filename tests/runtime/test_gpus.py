"""The GPUs that a service sees, how its workers share them, and how much memory each worker takes."""

import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cli.plan import choose_prefill_workers, plan_workers
from engine.compose import _gpu_memory
from engine.cuda.advice import explain_full_gpu
from runtime import gpus
from runtime.config import DecodeConfig, ServeConfig
from runtime.config_parts import Device
from runtime.gpus import VISIBLE, Driver, ask_driver, list_visible
from runtime.settings import ConfigError
from worker.startup.limits import GpuRoom
from worker.startup.pool_size import resolve_pools

GIB = 1 << 30
COUNTS = st.tuples(st.integers(0, 6), st.integers(1, 6), st.integers(0, 6))  # prefill workers, decode workers, GPUs
RANKS = st.tuples(st.integers(1, 7), st.integers(1, 7))  # per prefill worker, per decode worker

NVML_SOURCE = """
#include <string.h>
int nvmlInit_v2(void) { return FAILS; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "580.65.06", length); return 0; }
"""


def build_nvml(folder: Path, fails: bool) -> str:
    """A library with NVML's calls, in place of the driver's."""
    source, library = folder / "nvml.c", folder / f"libnvml-{fails}.so"
    source.write_text(NVML_SOURCE)
    command = ["cc", "-shared", "-fPIC", f"-DFAILS={int(fails)}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


def build_proc(folder: Path, num_gpus: int) -> Path:
    for index in range(num_gpus):
        (folder / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    return folder / "gpus"


def test_the_driver_is_asked_by_nvml_and_else_by_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "PROC", build_proc(tmp_path, 3))
    monkeypatch.setattr(gpus, "NVML", build_nvml(tmp_path, fails=False))
    assert ask_driver() == Driver(2, "580.65.06")
    monkeypatch.setattr(gpus, "NVML", build_nvml(tmp_path, fails=True))
    assert ask_driver() == Driver(3, "")
    monkeypatch.setattr(gpus, "NVML", "libbaton-has-no-such.so.1")
    assert ask_driver() == Driver(3, "")
    monkeypatch.setattr(gpus, "PROC", tmp_path / "none")
    assert ask_driver() == Driver(0, "")


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        (" 1 ", ("1",)),
        ("GPU-ab12,MIG-cd34", ("GPU-ab12", "MIG-cd34")),
        ("1,7,0", ("1",)),  # as in CUDA, the list ends there
        ("0,-1,1", ("0",)),
        ("1,1", ("1",)),
        ("", ()),
        ("-1", ()),
        ("none", ()),
    ],
)
def test_cuda_visible_devices_narrows_as_it_does_for_cuda(visible: str | None, found: tuple[str, ...]) -> None:
    assert list_visible(visible, 3) == found
    assert list_visible(visible, 0) == ()


def configure(counts: tuple[int, int, int], tp: tuple[int, int], device: Device = "auto") -> ServeConfig:
    (num_prefill, num_decode, _num_gpus), (prefill_tp, decode_tp) = counts, tp
    return ServeConfig(
        prefill_workers=num_prefill, decode_workers=num_decode, prefill_tp=prefill_tp, decode_tp=decode_tp,
        device=device,
    )  # fmt: skip


def find_excess(counts: tuple[int, int, int], tp: tuple[int, int]) -> str | None:
    """The first setting that needs more GPUs per worker than there are."""
    num_prefill, _num_decode, num_gpus = counts
    if num_gpus and num_prefill and tp[0] > num_gpus:
        return "--prefill-tp"
    return "--decode-tp" if num_gpus and tp[1] > num_gpus else None


@given(COUNTS, RANKS)
def test_ranks_are_spread_and_workers_see_all_gpus_their_own_first(
    counts: tuple[int, int, int], tp: tuple[int, int]
) -> None:
    num_prefill, num_decode, num_gpus = counts
    names = tuple(f"GPU-{index}" for index in range(num_gpus))
    config, excess = configure(counts, tp), find_excess(counts, tp)
    if excess:
        with pytest.raises(ConfigError, match=f": {excess} needs {num_gpus} or less: each rank has a GPU of its own"):
            plan_workers(config, names)
        return
    plans = plan_workers(config, names)
    assert len({plan.name for plan in plans}) == len(plans) == num_prefill + num_decode
    for plan in plans:
        size = tp[plan.role == "decode"]
        assert plan.settings.tp == size
        if num_gpus:
            assert len(set(plan.gpus)) == len(plan.gpus) == size, "a GPU for each rank"
        else:
            assert plan.gpus == (0,)
        if num_gpus > 1:
            seen = plan.environment[VISIBLE].split(",")
            assert seen[: len(plan.gpus)] == [names[gpu] for gpu in plan.gpus], "rank n takes the n-th"
            assert sorted(seen) == sorted(names)
        else:
            assert VISIBLE not in plan.environment
    ranks = Counter(gpu for plan in plans for gpu in plan.gpus)
    assert max(ranks.values()) <= -(-ranks.total() // max(1, num_gpus))
    if ranks.total() <= num_gpus:
        assert set(ranks.values()) == {1}


@pytest.mark.parametrize(
    ("num_gpus", "settings", "num_prefill"),
    [
        (0, {}, 1),  # a CPU
        (1, {}, 0),  # one worker does both
        (2, {}, 1),
        (8, {}, 1),
        (2, {"decode_workers": 2}, 0),
        (3, {"decode_workers": 2}, 1),
        (2, {"decode_tp": 2}, 0),
        (1, {"device": "cpu"}, 1),
        (0, {"device": "cuda"}, 0),  # the driver could not be asked: there is one at least
        (1, {"prefill_workers": 1}, 1),
        (8, {"prefill_workers": 0}, 0),
        (2, {"prefill_tp": 2}, 1),
        (2, {"prefill_pp": 2}, 1),
        (2, {"decode_pp": 2}, 0),
        (1, {"no_prefill": "wait"}, 1),
    ],
)
def test_a_prefill_worker_is_started_where_a_gpu_is_left_for_it(
    num_gpus: int, settings: dict[str, Any], num_prefill: int
) -> None:
    config = ServeConfig(**settings)
    found, reason = choose_prefill_workers(config, num_gpus)
    assert (found, bool(reason)) == (num_prefill, True)
    plans = plan_workers(config, tuple(map(str, range(num_gpus))))
    assert [plan.role for plan in plans] == ["prefill"] * num_prefill + ["decode"] * config.decode_workers


def test_a_share_that_is_set_is_each_workers_and_may_not_exceed_the_gpu() -> None:
    config = ServeConfig(device="cuda", gpu_memory_share=0.5, prefill_workers=1)
    assert [plan.settings.gpu_memory_share for plan in plan_workers(config, ())] == [0.5, 0.5]
    config = ServeConfig(device="cuda", gpu_memory_share=0.6, prefill_workers=1)
    assert [plan.settings.gpu_memory_share for plan in plan_workers(config, ("0", "1"))] == [0.6, 0.6]
    with pytest.raises(ConfigError, match=r"2 workers share a GPU, .* 0\.5 for each: set --prefill-workers 0$"):
        plan_workers(config, ("0",))
    with pytest.raises(ConfigError, match=r"2 workers share a GPU, .*: set --decode-workers 2$"):
        plan_workers(replace(config, prefill_workers=0, decode_workers=3), ("0", "1"))


@pytest.mark.parametrize(
    ("share", "context_tokens", "weights_gib", "advice"),
    [
        (0.45, 131_072, 15, "--max-context-tokens 118784 or less"),  # 0.45 x 70 - 15 - 2 = 14.5 GiB: 7424 pages
        (0.2, 131_072, 15, "--gpu-memory-share 0.48 or more"),  # (15 + 2 + 16) / 70
        (0.9, 131_072, 67, "--gpu-memory-share 0.99 or more"),  # with the whole GPU, for 1,024 tokens
        (0.9, 131_072, 70, "--model to a smaller one"),
    ],
)
def test_a_context_that_does_not_fit_is_told_in_numbers_with_what_to_set(
    share: float, context_tokens: int, weights_gib: int, advice: str
) -> None:
    config, room = DecodeConfig(gpu_memory_share=share, max_running=64), GpuRoom(70 * GIB, weights_gib * GIB, 2 * GIB)
    with pytest.raises(ConfigError) as caught:
        resolve_pools(config, context_tokens, 2 << 20, 1, room, 0)
    said = str(caught.value)
    assert f": set {advice}" in said
    numbers = ("131072 tokens take 16384 MiB", f"{share:g} x 71680 MiB", f"{weights_gib << 10} MiB", "2048 MiB")
    assert all(number in said for number in numbers)


def test_no_room_for_weights_is_told_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3 * GIB, 24 * GIB))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * GIB)
    said = "their files have 16384 MiB, and 3072 of the GPU's 24576 MiB were free at the start: set --prefill-workers 0"
    with pytest.raises(ValueError, match=said), explain_full_gpu(torch.device("cuda"), tmp_path):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB.")


def test_the_engine_counts_what_torch_holds_when_loading_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [9 * GIB]  # loading has left this much behind
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.__setitem__(0, 5 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: held[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 * GIB, 24 * GIB))
    assert _gpu_memory(torch.device("cuda")) == (24 * GIB, 5 * GIB, 0)
    assert _gpu_memory(torch.device("cpu")) is None
