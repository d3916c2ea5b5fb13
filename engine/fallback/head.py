"""An MTP layer that runs by transformers' own code, as its model does: all but attention, and what joins its rows."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.fallback.model import FallbackModel, attend
from engine.heads.config import head_of
from engine.heads.decoder import HeadDecoder, HeadInputs
from engine.layers.linear import Linear, PlainLinear, WidenedLinear
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer
from engine.models.table import build_table
from engine.weights.checkpoint import Checkpoint


class FallbackHead(HeadDecoder):
    """See `HeadDecoder`."""

    is_capturable = False

    def __init__(self, config: ModelConfig, model: FallbackModel, lm_head: Linear, norm: Tensor, inputs: HeadInputs):
        """config: of `read_foreign_mtp`. Takes the layer over that `model` has for it."""
        assert model.mtp_layer is not None
        nothing = DecoderLayer(None, _absent, None, None, _absent, None, None, _absent, None)
        super().__init__(
            config, head_of(config), model.embedding, nothing, norm, lm_head, model.ops, model.ranks, inputs, None
        )
        self._layer, self._rotary = model.mtp_layer.eval().requires_grad_(False), model.rotary
        self._attention: AttentionBackend | None = None  # of the running step
        name = model.config.attention_modules[-1].rpartition(".")[-1]
        self._layer.get_submodule(name).baton_attend = self._attend  # type: ignore[assignment]

    def run_planned(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        assert batch.hidden is not None, "a draft head without hidden rows"
        joined, positions = self._join(batch.token_ids, batch.hidden)[None], batch.positions[None]
        self._attention = attention
        try:
            rows = self._layer(
                joined, attention_mask=None, position_ids=positions,
                position_embeddings=self._rotary(joined, positions),
            )  # fmt: skip
        finally:
            self._attention = None
        return rows[0].index_select(0, batch.logits_rows)  # type: ignore[no-any-return]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """See `fallback_hooks.Attend`."""
        assert self._attention is not None
        config = self.config
        return attend(
            self._attention, 0, config.head_dim, config.layers[0].window, self.dtype, query, key, value, options
        )


def _absent(rows: Tensor) -> Tensor:
    raise AssertionError("transformers' code computes the layer")


def build_fallback_head(config: ModelConfig, checkpoint: Checkpoint, model: FallbackModel) -> FallbackHead:
    """checkpoint: of the MTP layer, under the names of `read_head.name_mtp`. ValueError names a missing tensor."""
    table = build_table(config)
    products = {name: next(table.products[name].stored()).name for name in ("fc", "lm_head")}
    vectors = {name: vector.name for name, vector in table.vectors.items()}
    if lacking := {*products.values(), *vectors.values()} - {*checkpoint.entries, products["lm_head"]}:
        raise ValueError(f"missing: {', '.join(sorted(lacking))}")

    def read(name: str) -> Tensor:
        return checkpoint.tensor(name).to(model.device, model.dtype)

    inputs = HeadInputs(
        PlainLinear(read(products["fc"])), read(vectors["hidden_norm"]), read(vectors["embedding_norm"]), None, []
    )
    own = products["lm_head"] in checkpoint.entries
    lm_head = WidenedLinear(read(products["lm_head"])) if own else model.lm_head
    return FallbackHead(config, model, lm_head, read(vectors["final_norm"]), inputs)
