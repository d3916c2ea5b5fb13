"""A draft head as data, and its weights' names. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from engine.models.config import ConfigPart, ModelConfig
from engine.models.table import Table
from engine.weights.table import Axis, Product, Vector, module, undivided

OF_EITHER = ("embedding", "lm_head")  # what a draft head may take from its model


@dataclass(frozen=True, slots=True)
class DraftHead(ConfigPart):
    """Makes a decoder of one layer a draft head. Its row at position i is of the model's hidden rows there and of
    the token after it, and predicts the token after that."""

    kind: Literal["eagle3", "mtp"]  # the layer's attention takes both side by side; or their product is the layer's row
    taps: tuple[int, ...]  # the model's layers whose input it takes; the number of its layers: the last rows, normed
    tap_size: int  # of one such row
    vocab_size: int  # of its own lm_head
    norm_before_fc: bool = False  # one norm of all taps together
    fc_norm: bool = False  # a norm of each tap
    norm_before_residual: bool = False
    norm_output: bool = False  # drafts go on from normed rows

    @property
    def divisible(self) -> dict[str, int]:
        return {"draft_vocab_size": self.vocab_size}

    def complete(self, model: ModelConfig, table: Table) -> Table:
        products, vectors, (layer,) = dict(table.products), dict(table.vectors), table.layers
        hidden = undivided(model.hidden_size)
        joined, taps = undivided(2 * model.hidden_size), undivided(len(self.taps) * self.tap_size)
        vectors["hidden_norm"] = Vector(f"{model.prefix}hidden_norm.weight", hidden)
        products["lm_head"] = Product((module(model.head, Axis(self.vocab_size)),), hidden)
        if self.kind == "mtp":
            vectors["embedding_norm"] = Vector(f"{model.prefix}embedding_norm.weight", hidden)
            products["fc"] = Product((module(f"{model.prefix}fc", hidden),), joined)
            return Table(products, vectors, layers=(layer,))
        products["fc"] = Product((module(f"{model.prefix}fc", hidden),), taps)
        if self.norm_before_fc:
            vectors["input_norm"] = Vector(f"{model.prefix}input_norm.weight", taps)
        if self.fc_norm:
            for index in range(len(self.taps)):
                vectors[f"fc_norm.{index}"] = Vector(f"{model.prefix}fc_norm.{index}.weight", undivided(self.tap_size))
        qkv = replace(layer.products["qkv_proj"], inputs=joined)
        layer = replace(layer, products={**layer.products, "qkv_proj": qkv})
        return Table(products, vectors, layers=(layer,))


def head_of(config: ModelConfig) -> DraftHead:
    """The head's part of a draft head's config."""
    assert isinstance(config.draft_head, DraftHead)
    return config.draft_head
