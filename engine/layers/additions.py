"""What may be added to a decoder's products: the seam for adapters (LoRA)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from engine.batch import Batch
from engine.layers.linear import Gated, Linear

ProductKey = tuple[int, str]  # layer, name of the product in its table


class Additions:
    """One decoder's. This class: nothing is added."""

    def __init__(self) -> None:
        self.num_slots = 0  # additions in steps at once

    def wrap(self, own: Linear, key: ProductKey, depth: int, part_sizes: Sequence[int]) -> Linear:
        """A product [N, depth] with what may be added to it. part_sizes: columns of each part, N in all."""
        return own

    def wrap_gated(self, own: Gated, key: ProductKey, depth: int, part_sizes: Sequence[int]) -> Gated | Linear:
        """The same for one that joins gate and up."""
        return own

    def during(self, batch: Batch) -> AbstractContextManager[None]:
        """Around a step."""
        return nullcontext()

    def keep_outputs(self) -> None:
        """From here on the step's products get the rows with logits alone."""


NO_ADDITIONS = Additions()
