"""Sums over ranks by one kernel: ranks are processes that open each other's memory, kernels run in the interpreter."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine import one_shot
from engine.kernels import gpu_ranks
from engine.kv.cuda_memory import CudaError
from engine.one_shot import choose_limit
from engine.ranks import join_group
from tests.support.fake_cuda import FakeGpu

CPU = torch.device("cpu")
RUN_S = 120


def test_ranks_get_the_same_right_bits_round_after_round_until_one_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.sum_process", str(tmp_path / "meet"), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("small sums over ranks by one kernel") == 4
    results = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("result ")]
    assert len({digest for digest, _ in results}) == 1
    assert sorted("a rank did not come" in fate for _, fate in results) == [False, True, True, True]


def test_the_limit_is_where_reading_all_parts_costs_what_is_saved() -> None:
    assert choose_limit(2) == gpu_ranks.MAX_ROWS * gpu_ranks.MAX_ROW_BYTES  # as many bytes as NCCL: the buffer's size
    assert choose_limit(4) == 2_000_000
    assert choose_limit(8) == 571_428


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (torch.empty(128, 8192, dtype=torch.bfloat16), True),
        (torch.empty(128, 2), True),
        (torch.empty(129, 64), False),  # more rows than places
        (torch.empty(1, 8200), False),  # wider than a place
        (torch.empty(0, 64), False),
        (torch.empty(4, 64).T, False),
        (torch.empty(4), False),
        (torch.empty(4, 64, dtype=torch.int64), False),
    ],
)
def test_parts_that_fit(part: torch.Tensor, expected: bool) -> None:
    assert gpu_ranks.fits(part) is expected


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    join_group(str(tmp_path / "meet"), 0, 1, CPU, timeout_s=10)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_ranks_that_cannot_or_err_keep_to_nccl(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    def fail(_address: int) -> bytes:
        raise CudaError("cudaIpcGetMemHandle: operation not supported")

    monkeypatch.setattr(one_shot, "PROBES", one_shot.PROBES[:1])
    assert one_shot.open_ranks(group, CPU, gpu) is None  # one rank: not a size that the kernel has
    monkeypatch.setattr(one_shot, "SIZES", (1,))
    assert one_shot.open_ranks(group, CPU, gpu) is not None
    with monkeypatch.context() as failing:
        failing.setattr(gpu.cudart, "export", fail)
        assert one_shot.open_ranks(group, CPU, gpu) is None
    monkeypatch.setattr(gpu_ranks, "all_reduce_", lambda part, _shared: part * 2)
    assert one_shot.open_ranks(group, CPU, gpu) is None
