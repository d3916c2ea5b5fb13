"""Medusa heads (arXiv:2401.10774) as data: their configuration and the names of their tensors, in the layout of Medusa
and TGI and in that of vLLM. Imports no torch.

    layout       config.json                             residual block              head's product
    Medusa, TGI  medusa_num_heads, medusa_num_layers     {head}.{layer}.linear       {head}.{num_layers}, or the model's
    vLLM         num_heads, num_hidden_layers, or these  blocks.{head}.layers.{layer}       lm_heads.{head}
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from engine.fallback.config import FallbackConfig
from engine.json_values import Json, flag, integer, number
from engine.models.config import ConfigPart, ModelConfig
from engine.models.table import Table
from engine.weights.table import Axis, Product, module, undivided
from wire.files import read_json_object
from wire.sampling import MAX_DRAFT_TOKENS

WEIGHTS, PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
MOST_LAYERS = 16  # blocks of a head; published ones have 1 or 2
TOKEN_MAP = "token_map"
NAMES = {  # of tensors |-> here
    r"(\d+)\.(\d+)\.linear\.(weight|bias)": r"blocks.\1.\2.\3",
    r"(\d+)\.\d+\.weight": r"lm_heads.\1.weight",
    r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)": r"blocks.\1.\2.\3",
    r"lm_heads\.(\d+)\.weight": r"lm_heads.\1.weight",
    r"lm_head\.weight": "lm_heads.0.weight",
}


@dataclass(frozen=True, slots=True)
class MedusaHeads(ConfigPart):
    """Head k guesses the token k + 2 places after a hidden row's: residual blocks, then a product of its own."""

    num_heads: int
    num_layers: int  # blocks of a head
    vocab_size: int  # of its product
    has_one_product: bool  # the first head's, for all
    has_products: bool = True  # False: the model's lm_head is that of all
    has_biases: bool = False

    @property
    def divisible(self) -> dict[str, int]:
        return {"truncated_vocab_size": self.vocab_size}

    @property
    def num_products(self) -> int:
        return 0 if not self.has_products else 1 if self.has_one_product else self.num_heads

    def complete(self, model: ModelConfig, table: Table) -> Table:
        hidden, products = undivided(model.hidden_size), dict[str, Product]()
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                name = f"blocks.{head}.{layer}"
                products[name] = Product((module(name, hidden, self.has_biases),), hidden)
        for head in range(self.num_products):
            name = f"lm_heads.{head}"
            products[name] = Product((module(name, Axis(self.vocab_size)),), hidden)
        return Table(products, {})

    def as_stored(self, names: Collection[str]) -> "MedusaHeads":
        """names: see `name_medusa`."""
        return replace(
            self,
            has_products=any(name.startswith("lm_heads.") for name in names),
            has_biases=any(name.endswith(".bias") for name in names),
        )


def is_medusa(folder: Path) -> bool:
    """Whether its config.json is of Medusa heads, perhaps beside the model that was trained with them."""
    config = read_json_object(path) if (path := folder / "config.json").is_file() else {}
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def find_weights(folder: Path) -> Path:
    """The file of the heads, or the folder whose weights are theirs: see `list_shards`."""
    return folder / WEIGHTS if (folder / WEIGHTS).exists() else folder


def read_medusa(folder: Path, model: ModelConfig | FallbackConfig) -> ModelConfig:
    """Heads for a model, as a decoder without layers. ValueError names what is not supported."""
    config = read_json_object(folder / "config.json")
    own = config if config.get("model_type") == "medusa" else {}
    if not (folder / WEIGHTS).exists() and not (own and any(folder.glob("*.safetensors"))):
        why = f", and {PICKLE} is a pickle, which is not read" if (folder / PICKLE).exists() else ""
        raise ValueError(f"{WEIGHTS} is not there{why}: save it as safetensors where it was trained")
    num_heads = _read_count(config, ("medusa_num_heads", "num_heads"), MAX_DRAFT_TOKENS)
    num_layers = _read_count(config, ("medusa_num_layers", "num_hidden_layers"), MOST_LAYERS)
    for key, there in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        if (here := integer(own, key, there)) != there:
            raise ValueError(f"{key} is {here}, the model's {there}")
    words = model.vocab_size if own.get("truncated_vocab_size") is None else integer(own, "truncated_vocab_size")
    if words > model.vocab_size:
        raise ValueError(f"truncated_vocab_size is {words}, more than the model's vocab_size {model.vocab_size}")
    return ModelConfig(
        family="medusa",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        context_tokens=model.context_tokens,
        logits_divisor=1 / number(own, "logit_scale", 1.0),
        prefix="",
        draft_head=MedusaHeads(num_heads, num_layers, words, flag(own, "original_lm_head")),
        layers=(), ropes=(), num_layers=0, num_heads=0, num_kv_heads=1, head_dim=1, intermediate_size=0, is_tied=False,
        rms_eps=1.0, attention_scale=1.0,
    )  # fmt: skip


def _read_count(config: Json, keys: tuple[str, str], most: int) -> int:
    key = next((key for key in keys if key in config), keys[0])
    if (count := integer(config, key)) > most:
        raise ValueError(f"{key} is {count}, expected at most {most}")
    return count


def name_medusa(config: ModelConfig, entries: Collection[str]) -> dict[str, str]:
    """Names of the heads' table |-> in their checkpoint. Of heads that all have the first one's product, it alone."""
    heads, found = heads_of(config), dict[str, str]()
    for theirs in entries:
        own = theirs.removeprefix("medusa_heads.")
        here = next((re.sub(old, new, own) for old, new in NAMES.items() if re.fullmatch(old, own)), own)
        is_unused = heads.has_one_product and here.startswith("lm_heads.") and here != "lm_heads.0.weight"
        if theirs != TOKEN_MAP and not is_unused:
            found[here] = theirs
    return found


def heads_of(config: ModelConfig) -> MedusaHeads:
    """The heads' part of a config of Medusa heads."""
    assert isinstance(config.draft_head, MedusaHeads)
    return config.draft_head
