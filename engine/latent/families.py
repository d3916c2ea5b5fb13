"""Families with latent attention (MLA, DeepSeek V2): what a token's KV is, and how each differs from Llama.

To add one, add a row: names in checkpoints and keys of config.json are DeepSeek's. Importing this file adds the rows to
FAMILIES. Imports no torch.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.attention.shape import AttentionShape
from engine.json_values import Json, collection, flag, integer, number, number_unless_zero
from engine.layer_config import rope_order
from engine.models.families import (
    BIASES,
    FAMILIES,
    SIGMOID,
    ExpertKeys,
    Family,
    Fields,
    build_experts,
    of_flag,
    of_number,
)
from engine.weights.table import Axis, Product, Vector, module, undivided


@dataclass(frozen=True, slots=True)
class Latents:
    """A token's KV is one key for all heads, whose first K dimensions are its value, too:

        row --qkv_proj--> [ queries | latent, normed: K | rotated: R ]      kept: K + R

    Of a latent, kv_b_proj makes each head's key of N dimensions, beside which the rotated one is put, and its value of
    V: `engine.latent.attention` says when. A `TokenKv`.
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

    def shape(self, num_heads: int, scale: float) -> AttentionShape:
        width, expanded = self.rank + self.rotated_dim, (self.key_dim, self.value_dim)
        return AttentionShape(num_heads, 1, width, scale, value_dim=self.rank, expanded=expanded)

    def weights(
        self, name: str, num_heads: int, hidden_size: int, *, has_bias: bool
    ) -> tuple[dict[str, Product], dict[str, Vector]]:
        """See `TokenKv`."""
        turned = rope_order(0, self.rotated_dim, is_interleaved=self.is_interleaved)

        def order(before: int) -> tuple[int, ...]:
            return (*range(before), *(before + at for at in turned)) if turned else ()

        hidden, latent = undivided(hidden_size), undivided(self.rank)
        queries = Axis(num_heads, self.key_dim, order=order(self.plain_dim))
        kept = module(f"{name}kv_a_proj_with_mqa", undivided(self.rank + self.rotated_dim, order(self.rank)), has_bias)
        expanded = Axis(num_heads, self.plain_dim + self.value_dim)
        products = {
            "kv_b_proj": Product((module(f"{name}kv_b_proj", expanded),), latent),
            "o_proj": Product((module(f"{name}o_proj", hidden, has_bias),), Axis(num_heads, self.value_dim)),
        }
        vectors = {"kv_norm": Vector(f"{name}kv_a_layernorm.weight", latent)}
        first = module(f"{name}q_proj", queries)
        if self.query_rank:
            compressed = undivided(self.query_rank)
            first = module(f"{name}q_a_proj", compressed, has_bias)
            products["q_b_proj"] = Product((module(f"{name}q_b_proj", queries),), compressed)
            vectors["q_norm"] = Vector(f"{name}q_a_layernorm.weight", compressed)
        return {"qkv_proj": Product((first, kept), hidden), **products}, vectors


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
    """Of an expanded head, times YaRN's temperature squared, where transformers leaves it out of cos and sin."""
    scale = float((integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim")) ** -0.5)
    rope = collection(config, "rope_scaling", dict) or collection(config, "rope_parameters", dict)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return scale
    factor = number(rope, "factor")
    temperature = 1.0 if factor <= 1 else 0.1 * number(rope, "mscale_all_dim") * math.log(factor) + 1.0
    return scale * temperature * temperature


def read_residual(config: Json) -> float:
    """MiniCPM's, of what a layer adds."""
    depth = math.sqrt(integer(config, "num_hidden_layers"))
    return number_unless_zero(config, "scale_depth", depth) / depth


def read_divisor(config: Json) -> float:
    """MiniCPM's, of logits."""
    hidden_size = integer(config, "hidden_size")
    return hidden_size / number_unless_zero(config, "dim_model_base", hidden_size)


def read_groups(config: Json, key: str) -> int:
    """V2 has groups of experts where its topk_method says so."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {method!r:.80} is not supported; supported: greedy, group_limited_greedy")
    return 1 if method == "greedy" else integer(config, key)


def build_shared_experts(routing: Fields, **moe: Any) -> ExpertKeys:
    return build_experts(
        "mlp.gate", "mlp.experts", "per_expert", "n_routed_experts", layers="after_first", routing=routing,
        shared_size=lambda config: integer(config, "moe_intermediate_size") * integer(config, "n_shared_experts"),
        has_wide_router=True, shared="mlp.shared_experts", **moe,
    )  # fmt: skip


RENAMED = {"qk_rope_head_dim": "head_dim"}  # what ropes turn
LATENT: Fields = {**BIASES, "token_kv": read_latents, "num_kv_heads": 1, "attention_scale": read_scale}
V2_EXPERTS = build_shared_experts({
    "scale": partial(number, key="routed_scaling_factor"), "num_groups": partial(read_groups, key="n_group"),
    "top_groups": partial(read_groups, key="topk_group"),
})  # fmt: skip
V3_EXPERTS = build_shared_experts(
    {
        **SIGMOID, "epsilon": 1e-20, "group_peaks": 2, "num_groups": partial(integer, key="n_group"),
        "top_groups": partial(integer, key="topk_group"),
    },
    choice_bias="mlp.gate.e_score_correction_bias",
)  # fmt: skip
V3 = Family(
    "DeepseekV3ForCausalLM",
    {
        "q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    LATENT, RENAMED, experts=V3_EXPERTS,
)  # fmt: skip
FAMILIES |= {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": 1536, "first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
        {**LATENT, "has_mlp_bias": of_flag("mlp_bias")}, RENAMED, experts=V2_EXPERTS,
    ),
    "deepseek_v3": V3,
    "kimi_k2": V3,  # its files call themselves so
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        {
            "q_lora_rank": 768, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
        },
        LATENT, RENAMED, experts=V3_EXPERTS,
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        {"q_lora_rank": 768, "rope_interleave": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {
            **LATENT, "has_mlp_bias": of_flag("mlp_bias"), "embedding_multiplier": of_number("scale_emb", 1.0),
            "rounds_multiplier": True, "residual_multiplier": read_residual,
            "logits_divisor": read_divisor,
        },
        RENAMED,
    ),
}  # fmt: skip
