"""Steps of a model without answers: each row that would become a token becomes a vector."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.batch import Prepared
from engine.models.decoder import Decoder
from engine.prepared import build_batch
from engine.runner import Finish, Forwards, Launched, ModelOutput, Runner
from engine.sampling.sample import NOT_A_NUMBER
from engine.staging import download

Vectors = dict[int, NDArray[np.float32]]  # row of the engine |-> [D], or [L] logits of classes, until it is taken


@dataclass(frozen=True, slots=True)
class Product:
    """A layer behind the model's last, with its activation."""

    weight: Tensor  # [N, M] float32
    bias: Tensor | None  # [N]
    activation: torch.nn.Module

    def __call__(self, rows: Tensor) -> Tensor:
        activated: Tensor = self.activation(functional.linear(rows, self.weight, self.bias))
        return activated


@dataclass(frozen=True, slots=True)
class Pooler:
    """From rows of the model to vectors."""

    products: Sequence[Product] = ()
    normalizes: bool = False
    answers: Sequence[int] = ()  # tokens: see `Pooling.answers`

    def __call__(self, model: Decoder, rows: Tensor) -> Tensor:
        """[S, H] |-> [S, D] float32"""
        if self.answers:
            logits = model.logits(rows)[:, list(self.answers)]  # [S, 1 or 2]
            return logits[:, :1] - logits[:, 1:] if len(self.answers) > 1 else logits
        rows = rows.float()
        for product in self.products:
            rows = product(rows)
        return functional.normalize(rows, dim=-1) if self.normalizes else rows


class PooledLaunched(Launched):
    """Also keeps the vectors, by row, when it is collected."""

    def __init__(self, vectors: Tensor, rows: Sequence[int], found: Vectors) -> None:
        """vectors: [S, D] of the sequences at `rows`."""
        self._vectors, self._rows, self._found = download(vectors), rows, found
        is_whole = torch.isfinite(vectors).all(-1)
        super().__init__(torch.where(is_whole, 0, NOT_A_NUMBER), [])

    def collect(self) -> ModelOutput:
        output = super().collect()
        self._found.update(zip(self._rows, self._vectors.numpy(), strict=True))
        return output


class PooledForwards(Forwards):
    """A runner with these computes no tokens: they are 0, or NOT_A_NUMBER where a vector is."""

    def __init__(self, pooler: Pooler, is_whole: bool) -> None:
        """is_whole: each text is to be one step."""
        self._pooler = pooler
        self._found: Vectors = {}
        self.is_whole = is_whole

    def take(self, row: int) -> NDArray[np.float32] | None:
        """The row's vector from the last collected step, once; None if there is none."""
        return self._found.pop(row, None)

    def begin(self, runner: Runner, step: Prepared) -> Finish:
        hidden = self.compute(runner, build_batch(step.layout, runner.rows))

        @torch.inference_mode()
        def finish(completed: Prepared) -> Launched:
            vectors = self._pooler(runner.model, hidden)
            return PooledLaunched(vectors, completed.outputs.rows.tolist(), self._found)

        return finish
