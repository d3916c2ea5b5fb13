"""A rank's part of a model: its heads, its share of the MLPs and of the vocabulary.

The QKV products and the first MLP products are divided by outputs, the products after them by inputs, so that ranks
exchange one sum after attention and one after the MLP. With more ranks than KV heads, ranks share KV heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from engine.models.config import ModelConfig
from engine.weights.checkpoint import Checkpoint
from engine.weights.files import TensorEntry
from wire.kv_layout import can_divide, heads_of

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def of(self, total: int) -> range:
        """This shard's part of `total`, which `size` divides."""
        count = total // self.size
        return range(self.rank * count, (self.rank + 1) * count)


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor."""

    axis: int
    part: range


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as one rank computes it; its vocabulary stays whole. ValueError names what cannot be divided."""
    size = shard.size
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % size:
            raise ValueError(f"{size} ranks do not divide {name} {getattr(config, name)}: set --tp to a divisor of it")
    if not can_divide(config.num_kv_heads, size):
        raise ValueError(
            f"{size} ranks and {config.num_kv_heads} KV heads: set --tp to a divisor or a multiple of them"
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=len(kv_heads_of(config, shard)),
        intermediate_size=config.intermediate_size // size,
    )


def kv_heads_of(config: ModelConfig, shard: Shard) -> range:
    """The KV heads that the shard's query heads attend to."""
    return heads_of(config.num_kv_heads, shard.rank, shard.size)


def find_cut(config: ModelConfig, shard: Shard, name: str) -> Cut | None:
    """The shard's part of the tensor `name`; None: all of it."""
    queries, keys = shard.of(config.num_heads), kv_heads_of(config, shard)
    inner, words = shard.of(config.intermediate_size), shard.of(config.vocab_size)
    if name in (EMBEDDING, LM_HEAD):
        return Cut(0, words)
    cuts = {
        "q_proj": Cut(0, scale(queries, config.head_dim)),
        "k_proj": Cut(0, scale(keys, config.head_dim)),
        "v_proj": Cut(0, scale(keys, config.head_dim)),
        "gate_proj": Cut(0, inner),
        "up_proj": Cut(0, inner),
        "o_proj": Cut(1, scale(queries, config.head_dim)),
        "down_proj": Cut(1, inner),
    }
    *_, module, kind = name.split(".")
    cut = cuts.get(module)
    return None if cut is None or (cut.axis == 1 and kind == "bias") else cut


def scale(part: range, width: int) -> range:
    """A range of heads |-> their range of rows."""
    return range(part.start * width, part.stop * width)


class ShardedCheckpoint(Checkpoint):
    """The shard's parts of a checkpoint's tensors. Reads nothing else.

    A bias added after the sum over ranks would count once per rank: rank 0 has it, the others have zeros.
    """

    def __init__(self, whole: Checkpoint, config: ModelConfig, shard: Shard) -> None:
        """config: of the whole model."""
        self._whole = whole
        self._config = config
        self._shard = shard
        self.entries = {name: self._cut_entry(name, entry) for name, entry in whole.entries.items()}

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint.tensor`. A copy if the part is not contiguous."""
        return self._cut(name, self._whole.tensor)

    def borrow(self, name: str) -> Tensor:
        return self._cut(name, self._whole.borrow)

    def _cut(self, name: str, take: Callable[[str], Tensor]) -> Tensor:
        tensor, cut = take(name), find_cut(self._config, self._shard, name)
        if cut is not None:
            return tensor.narrow(cut.axis, cut.part.start, len(cut.part)).contiguous()
        is_summed = name.endswith(("o_proj.bias", "down_proj.bias"))
        return tensor.new_zeros(tensor.shape) if is_summed and self._shard.rank else tensor

    def _cut_entry(self, name: str, entry: TensorEntry) -> TensorEntry:
        cut = find_cut(self._config, self._shard, name)
        if cut is None:
            return entry
        shape = list(entry.shape)
        num_bytes = entry.num_bytes // shape[cut.axis] * len(cut.part)
        shape[cut.axis] = len(cut.part)
        return replace(entry, shape=tuple(shape), num_bytes=num_bytes)
