"""Ranks of one-shot sums over host memory: real handles of a libcudart double, kernels in the interpreter.

python -m tests.support.sum_process RENDEZVOUS_FILE SIZE: forks the ranks and prints a line of each: the bits of all its
results, and what happened when the last rank was gone.
"""

import hashlib
import os
import sys

from tests.support.interpreter import interpret_kernels

interpret_kernels()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

from engine.cuda import gpu_ranks, one_shot  # noqa: E402
from engine.ops.base import Ops  # noqa: E402
from engine.rank_group import GroupRanks, join_group  # noqa: E402
from tests.support.fake_cuda import FakeGpu, fake_cudart  # noqa: E402

CPU = torch.device("cpu")
EPS = 1e-5
WRAP = 2**31 - 4  # epochs pass the end of int32
SHAPES = [(1, 64), (3, 96), (2, 64), (1, 96)] * 2  # rows, width: rows come and go


def part_of(rank: int, turn: int) -> Tensor:
    return torch.randn(SHAPES[turn], generator=torch.Generator().manual_seed(100 * turn + rank)).half()


def check_sums(rank: int, size: int, ranks: GroupRanks) -> str:
    digest = hashlib.sha256()
    for turn, shape in enumerate(SHAPES):
        weight = torch.randn(shape[1], generator=torch.Generator().manual_seed(turn))
        parts = [part_of(peer, turn) for peer in range(size)]
        total = sum((one.float() for one in parts), torch.zeros(shape))
        hidden = torch.ones(shape)
        expected = Ops().add_norm_(torch.ones(shape), total, weight, EPS)
        normed = ranks.add_norm_(hidden, parts[rank].clone(), weight, EPS, Ops().add_norm_)
        assert torch.equal(hidden, total + 1)
        torch.testing.assert_close(normed, expected.half(), rtol=2e-3, atol=2e-3)
        summed = ranks.all_reduce_(parts[rank].clone())
        assert torch.equal(summed, total.half())
        for result in (hidden, normed, summed):
            digest.update(result.numpy().tobytes())
    wide = torch.full((gpu_ranks.MAX_ROWS + 1, 8), float(rank + 1))
    assert float(ranks.all_reduce_(wide)[0, 0]) == sum(range(1, size + 1)), "too many rows for one kernel"
    return digest.hexdigest()


def run_rank(rendezvous: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    plain = join_group(rendezvous, rank, size, CPU, timeout_s=60)
    one_shot.PROBES = one_shot.PROBES[:2]  # the interpreter takes seconds for many rows
    assert dist.group.WORLD is not None
    ranks = one_shot.open_ranks(dist.group.WORLD, CPU, FakeGpu())
    assert ranks is not None
    ranks._shared.epochs.fill_(WRAP)
    ranks._shared.buffer[: gpu_ranks.flag_bytes(size)].view(torch.int32).fill_(WRAP)
    plain.barrier(CPU)
    line = f"result {check_sums(rank, size, ranks)}"
    assert int(ranks._shared.epochs[0]) < 0, "epochs did not wrap around"
    plain.barrier(CPU)
    if rank == size - 1:
        os.write(1, f"{line} gone\n".encode())
        return
    gpu_ranks.PATIENCE = 100
    try:
        ranks.all_reduce_(torch.ones(1, 8))
    except InterpreterError as error:
        os.write(1, f"{line} {error}\n".encode())  # whole lines, whoever else writes


def main(rendezvous: str, size: str) -> None:
    fake_cudart()  # builds it once
    children = []
    for rank in range(int(size)):
        if child := os.fork():
            children.append(child)
        else:
            run_rank(rendezvous, rank, int(size))
            os._exit(0)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main(*sys.argv[1:])
