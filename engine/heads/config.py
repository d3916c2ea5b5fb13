"""A draft head as data, and its weights' names. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from engine.models.config import ConfigPart, ModelConfig
from engine.models.table import Table, build_table
from engine.weights.table import Axis, Product, Vector, module, undivided

OF_EITHER = ("embedding", "lm_head")  # what a draft head may take from its model


@dataclass(frozen=True, slots=True)
class DraftHead(ConfigPart):
    """What makes a decoder of one layer a draft head. Its row at position i is of the model's hidden rows there and of
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


def head_of(config: ModelConfig) -> DraftHead:
    """Of a draft head's config."""
    assert isinstance(config.draft_head, DraftHead)
    return config.draft_head


def build_head_table(config: ModelConfig) -> Table:
    """A decoder's, and what a draft head has beside its layer."""
    head, plain = head_of(config), build_table(config)
    products, vectors, (layer,) = dict(plain.products), dict(plain.vectors), plain.layers
    hidden = undivided(config.hidden_size)
    joined, taps = undivided(2 * config.hidden_size), undivided(len(head.taps) * head.tap_size)
    vectors["hidden_norm"] = Vector(f"{config.prefix}hidden_norm.weight", hidden)
    products["lm_head"] = Product((module(config.head, Axis(head.vocab_size)),), hidden)
    if head.kind == "mtp":
        vectors["embedding_norm"] = Vector(f"{config.prefix}embedding_norm.weight", hidden)
        products["fc"] = Product((module(f"{config.prefix}fc", hidden),), joined)
        return Table(products, vectors, layers=(layer,))
    products["fc"] = Product((module(f"{config.prefix}fc", hidden),), taps)
    if head.norm_before_fc:
        vectors["input_norm"] = Vector(f"{config.prefix}input_norm.weight", taps)
    if head.fc_norm:
        for index in range(len(head.taps)):
            vectors[f"fc_norm.{index}"] = Vector(f"{config.prefix}fc_norm.{index}.weight", undivided(head.tap_size))
    qkv = replace(layer.products["qkv_proj"], inputs=joined)
    layer = replace(layer, products={**layer.products, "qkv_proj": qkv})
    return Table(products, vectors, layers=(layer,))
