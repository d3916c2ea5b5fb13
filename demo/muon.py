"""Muon: momentum of matrices, made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)."""

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.775, 2.0315
NUM_STEPS = 5
RMS = 0.2  # of an update, as AdamW's (arXiv:2502.16982)


def orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T of matrix = U S V^T, by Newton and Schulz: singular values from 0.7 to 1.2. Products in `dtype`."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """As torch's, which multiplies in bfloat16 alone: on AVX2 that took four fifths of a step."""

    def __init__(self, matrices: Iterable[Tensor], dtype: torch.dtype, momentum: float, weight_decay: float) -> None:
        """`dtype`: of products. The rate is to be set in `param_groups`."""
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                known = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                known.lerp_(matrix.grad, 1 - group["momentum"])
                change = orthogonalize(matrix.grad.lerp(known, group["momentum"]), self._dtype)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(change, alpha=-group["lr"] * RMS * max(matrix.shape) ** 0.5)
