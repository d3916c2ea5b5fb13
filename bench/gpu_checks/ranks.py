"""Exchanges between two ranks, each with its own GPU, captured in graphs as in decode steps. On a CPU: gloo, no graphs.

python -m bench.gpu_checks.ranks DEVICE RENDEZVOUS RANK
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu_checks.card import MissedError, require, synchronize, time_calls
from bench.gpu_checks.ipc import MISSED_STATUS, PART_S
from engine.compose import open_ranks
from engine.cuda.graphs import CudaCapture
from engine.rank_group import GroupRanks, join_group

SIZE, WIDTH, NUM_ROWS = 2, 4096, (1, 8, 64)
NUM_SUMS = {"cuda": 64, "cpu": 4}  # in a graph: two for each of 32 layers


def time_sums(device: torch.device) -> str:
    """Sums of two ranks and exchanges of logits in graphs: right, and sums by one kernel faster than by NCCL"""
    if device.type == "cuda" and torch.cuda.device_count() < SIZE:
        return "skipped: one GPU"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.gpu_checks.ranks", device.type, str(Path(folder) / "meet")]
        others = [subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL) for rank in range(1, SIZE)]
        try:
            ended = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=PART_S, check=False)
        finally:
            for process in others:
                process.kill()
                process.wait()
    assert ended.returncode in (0, MISSED_STATUS), f"exit {ended.returncode}: {ended.stderr[-1500:]}"
    detail = ended.stdout.splitlines()[-1]
    return require(not ended.returncode, detail, device)


def compare(device: torch.device, ranks: GroupRanks) -> str:
    """Check and time the sums, then check exchanges. All ranks do so in the same order."""
    found, is_faster, count = [], True, NUM_SUMS[device.type]
    for num_rows in NUM_ROWS:
        parts = [
            torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)
            for rank in range(SIZE)
        ]
        own = parts[ranks.rank]
        expected = torch.stack([part.float() for part in parts]).sum(0)
        times = []
        for reduce in (ranks.all_reduce_, by_group):
            times.append(time_calls(capture(own, reduce, count, device)[1], device) / count)
            buffer, replay = capture(own, reduce, 1, device)
            buffer.copy_(own)
            replay()
            synchronize(device)
            assert torch.allclose(buffer.float(), expected, rtol=1e-2, atol=1e-2), "a captured sum is wrong"
        is_faster = is_faster and times[0] <= times[1]
        found.append(f"{num_rows} rows: {times[0] * 1e6:.0f} us, group's {times[1] * 1e6:.0f}")
    check_exchange(device, ranks)
    return require(is_faster, f"{'; '.join(found)} (bfloat16, {WIDTH} wide)", device)


def by_group(part: Tensor) -> Tensor:
    dist.all_reduce(part)
    return part


def capture(
    own: Tensor, reduce: Callable[[Tensor], Tensor], count: int, device: torch.device
) -> tuple[Tensor, Callable[[], None]]:
    """(the tensor that is summed in place, what sums it `count` times)"""
    buffer = torch.zeros_like(own)

    def run() -> None:
        for _ in range(count):
            reduce(buffer)

    return buffer, CudaCapture()(run) if device.type == "cuda" else run


def check_exchange(device: torch.device, ranks: GroupRanks) -> None:
    """all_to_all gives each rank whole rows of its own, also when it is captured."""
    whole = torch.arange(4 * 6, dtype=torch.float32, device=device).view(4, 6)
    part = whole[:, ranks.rank * 3 : ranks.rank * 3 + 3].contiguous()
    out = torch.zeros_like(whole[ranks.own_rows(4)])

    def run() -> None:
        out.copy_(ranks.all_to_all(part))

    replay = CudaCapture()(run) if device.type == "cuda" else run
    out.zero_()
    replay()
    synchronize(device)
    assert torch.equal(out, whole[ranks.own_rows(4)]), "all_to_all is wrong"


def main(kind: str, rendezvous: str, rank: int) -> int:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    ranks = join_group(rendezvous, rank, SIZE, device, PART_S, open_ranks(device))
    try:
        print(compare(device, ranks))
        return 0
    except MissedError as error:
        print(error)
        return MISSED_STATUS
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
