"""A token's KV where layers have latent attention (MLA, DeepSeek V2), as data: read from config.json, and the names of
its weights.

Names in checkpoints and keys of config.json are DeepSeek's. Imports no torch.
"""

import math
from dataclasses import dataclass

from engine.attention.shape import AttentionShape
from engine.json_values import Json, collection, flag, integer, number
from engine.layer_config import rope_order
from engine.models.config import ConfigPart
from engine.models.table import LayerTable
from engine.weights.table import Axis, undivided


@dataclass(frozen=True, slots=True)
class Latents(ConfigPart):
    """A token's KV is one key for all heads, whose first K dimensions are its value, too:

        row --qkv_proj--> [ queries | latent, normed: K | rotated: R ]      kept: K + R

    Of a latent, kv_b_proj makes each head's key of N dimensions, beside which the rotated one is put, and its value of
    V: `engine.latent.attention` says when.
    """

    query_rank: int  # Q, of what queries are made of; 0: they come from the row itself
    rank: int  # K
    plain_dim: int  # N
    rotated_dim: int  # R
    value_dim: int  # V
    is_interleaved: bool = True  # rotated pairs are (2i, 2i + 1) in the checkpoint

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    def shape(self, own: AttentionShape) -> AttentionShape:
        width, expanded = self.rank + self.rotated_dim, (self.key_dim, self.value_dim)
        return AttentionShape(own.num_heads, 1, width, own.scale, value_dim=self.rank, expanded=expanded)

    def add_weights(self, layer: LayerTable) -> None:
        name, num_heads, has_bias = "self_attn.", layer.config.num_heads, layer.config.has_qkv_bias
        turned = rope_order(0, self.rotated_dim, is_interleaved=self.is_interleaved)

        def order(before: int) -> tuple[int, ...]:
            return (*range(before), *(before + at for at in turned)) if turned else ()

        latent, kept_rows = undivided(self.rank), undivided(self.rank + self.rotated_dim, order(self.rank))
        queries = Axis(num_heads, self.key_dim, order=order(self.plain_dim))
        first = layer.module(f"{name}q_proj", queries)
        if self.query_rank:
            compressed = undivided(self.query_rank)
            first = layer.module(f"{name}q_a_proj", compressed, has_bias)
            layer.add("q_b_proj", compressed, layer.module(f"{name}q_b_proj", queries))
            layer.add_norm("q_norm", f"{name}q_a_layernorm", compressed)
        layer.add("qkv_proj", layer.hidden, first, layer.module(f"{name}kv_a_proj_with_mqa", kept_rows, has_bias))
        layer.add_norm("kv_norm", f"{name}kv_a_layernorm", latent)
        expanded = Axis(num_heads, self.plain_dim + self.value_dim)
        layer.add("kv_b_proj", latent, layer.module(f"{name}kv_b_proj", expanded))
        attended = Axis(num_heads, self.value_dim)
        layer.add("o_proj", attended, layer.module(f"{name}o_proj", layer.hidden, has_bias))


def read_latents(config: Json) -> Latents:
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    return Latents(
        integer(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0,
        integer(config, "kv_lora_rank"),
        integer(config, "qk_nope_head_dim"),
        integer(config, "qk_rope_head_dim"),
        integer(config, "v_head_dim") if config.get("v_head_dim") is not None else hidden // heads,
        flag(config, "rope_interleave", True),
    )


def read_scale(config: Json) -> float:
    """An expanded head's scale, times YaRN's temperature squared where transformers leaves it out of cos and sin."""
    scale = float((integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim")) ** -0.5)
    rope = collection(config, "rope_scaling", dict) or collection(config, "rope_parameters", dict)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return scale
    factor = number(rope, "factor")
    temperature = 1.0 if factor <= 1 else 0.1 * number(rope, "mscale_all_dim") * math.log(factor) + 1.0
    return scale * temperature * temperature
