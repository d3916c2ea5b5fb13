"""All families that Baton computes itself: those of Llama's kind, and those with parts of satellites.

Imports no torch: commands read configurations at once. engine/compose.py names what computes such models.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from engine.experts.config import MoeNorms
from engine.experts.read import ReadExperts, build_experts
from engine.hybrids.config import add_delta_net, add_gated_conv
from engine.json_values import Json, flag, integer, number, number_unless_zero
from engine.latent.config import read_latents, read_scale
from engine.models import read_config
from engine.models.config import MlpNames, Norms
from engine.models.families import BIASES, GEMMA, GEMMA_LAYERS, QKV_BIAS, Family, Fields, of_flag, of_number
from engine.models.families import FAMILIES as PLAIN
from engine.models.read_config import Catalogue
from engine.varied.read import add_varied_layers, read_token_inputs
from engine.vision.wholes import WHOLES, open_whole
from wire.pooling import read_pooling


def read_inner_size(config: Json) -> int:
    """LFM2's intermediate_size may not be that of its MLPs."""
    size = integer(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim"):
        return size
    size, multiple = int(2 * size / 3), integer(config, "block_multiple_of")
    return -(-int(number(config, "block_ffn_dim_multiplier") * size) // multiple) * multiple


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


def build_shared_experts(routing: Fields, **moe: Any) -> ReadExperts:
    """Beside experts that take all rows, in the layers after the first."""
    return build_experts(
        "mlp.gate", "mlp.experts", "per_expert", "n_routed_experts", layers="after_first", routing=routing,
        shared_size=lambda config: integer(config, "moe_intermediate_size") * integer(config, "n_shared_experts"),
        has_wide_router=True, shared="mlp.shared_experts", **moe,
    )  # fmt: skip


LFM2_NORMS = Norms(
    "operator_norm", before_mlp="ffn_norm", query="self_attn.q_layernorm", key="self_attn.k_layernorm",
    final="embedding_norm",
)  # fmt: skip
W1_W3_W2 = MlpNames("feed_forward", "w1", "w3", "w2")
SIGMOID: Fields = {
    "scoring": "sigmoid", "renormalise": of_flag("norm_topk_prob"),
    "scale": partial(number, key="routed_scaling_factor"),
}  # fmt: skip
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
LATENT: Fields = {**BIASES, "token_kv": read_latents, "num_kv_heads": 1, "attention_scale": read_scale}
LATENT_RENAMED = {"qk_rope_head_dim": "head_dim"}  # what ropes turn
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    {
        "q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    LATENT, LATENT_RENAMED, extend=(V3_EXPERTS,),
)  # fmt: skip
QWEN3_5: Fields = {**BIASES, "norm_offset": 1.0, "qk_norm": "head", "has_output_gate": True}
QWEN3_5_DEFAULTS = {
    "vocab_size": 248_320, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 32, "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
LFM2_DEFAULTS = {
    "num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 128_000,
    "tie_word_embeddings": True, "conv_L_cache": 3,
}  # fmt: skip
LFM2: Fields = {"norms": LFM2_NORMS, "mlp": W1_W3_W2, "output_module": "out_proj", "qk_norm": "head"}
LFM2_RENAMED = {
    "norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size",
    "num_dense_layers": "first_k_dense_replace",
}  # fmt: skip
GEMMA4_DEFAULTS = {
    "vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
FAMILIES: Mapping[str, Family] = PLAIN | {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"sliding_window": 4096, "num_key_value_heads": 4, "num_experts_per_tok": 8},
        {**BIASES, "qk_norm": "head"}, windows="switched", extend=(build_experts(
            "mlp.gate", "mlp.experts", "per_expert", "num_experts", layers="sparse_step",
            routing={"precision": "rounded", "renormalise": of_flag("norm_topk_prob")},
        ),),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        {"mlp": W1_W3_W2}, windows="all", extend=(build_experts(
            "block_sparse_moe.gate", "block_sparse_moe.experts", "per_expert", "num_local_experts",
            inner="intermediate_size", routing={"renormalise": True},
        ),),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", {"attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1.5e5},
        {**BIASES, "activation": "clamped", "has_sinks": True}, windows="by_type", full_every=2, extend=(build_experts(
            "mlp.router", "mlp.experts", "alternating", "num_local_experts", inner="intermediate_size",
            routing={"scores_all": False, "precision": "rounded"}, has_biases=True,
        ),),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", GEMMA4_DEFAULTS,
        {
            **GEMMA, "norm_offset": 0.0, "attention_scale": 1.0, "qk_norm": "head", "has_v_norm": True,
            "has_layer_scale": True, "token_inputs": read_token_inputs,
        },
        **GEMMA_LAYERS, full_every=6, ropes_by_type=True, is_last_full=True, extend=(add_varied_layers, build_experts(
            "router.proj", "experts", "stacked", "num_experts", top_k="top_k_experts", enabled="enable_moe_block",
            routing={"renormalise": True}, shared="mlp", expert_scale="router.per_expert_scale", norms=MoeNorms(
                "router.scale", "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            ),
        ),),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", QWEN3_5_DEFAULTS, QWEN3_5, has_partial_rope=True, extend=(add_delta_net,),
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        QWEN3_5_DEFAULTS | {
            "num_key_value_heads": 2, "hidden_size": 2048, "num_hidden_layers": 40, "intermediate_size": 512,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
        },
        QWEN3_5, has_partial_rope=True, extend=(add_delta_net, build_experts(
            "mlp.gate", "mlp.experts", "per_expert", "num_experts",
            routing={"precision": "rounded", "renormalise": True}, shared="mlp.shared_expert",
            shared_size=partial(integer, key="shared_expert_intermediate_size"), shared_gate="mlp.shared_expert_gate",
        ),),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        LFM2_DEFAULTS | {
            "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        },
        {**LFM2, "intermediate_size": read_inner_size}, LFM2_RENAMED, extend=(add_gated_conv,),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        LFM2_DEFAULTS | {
            "num_dense_layers": 2, "moe_intermediate_size": 1792, "num_experts_per_tok": 4, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "use_expert_bias": True,
        },
        LFM2, LFM2_RENAMED, extend=(add_gated_conv, build_experts(
            "feed_forward.gate", "feed_forward.experts", "per_expert", "num_experts", layers="after_first",
            routing={**SIGMOID, "epsilon": 1e-6, "precision": "logits"},
            choice_bias=lambda config: "feed_forward.expert_bias" if flag(config, "use_expert_bias") else None,
        ),),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        },
        {**QKV_BIAS, "qk_norm": lambda config: "head" if flag(config, "use_qk_norm") else "none"},
        has_partial_rope=True, extend=(V3_EXPERTS,),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": 1536, "first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
        {**LATENT, "has_mlp_bias": of_flag("mlp_bias")}, LATENT_RENAMED, extend=(V2_EXPERTS,),
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,  # its files call themselves so
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        {
            "q_lora_rank": 768, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
        },
        LATENT, LATENT_RENAMED, extend=(V3_EXPERTS,),
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        {"q_lora_rank": 768, "rope_interleave": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {
            **LATENT, "has_mlp_bias": of_flag("mlp_bias"), "embedding_multiplier": of_number("scale_emb", 1.0),
            "rounds_multiplier": True, "residual_multiplier": read_residual, "logits_divisor": read_divisor,
        },
        LATENT_RENAMED,
    ),
}  # fmt: skip
CATALOGUE = Catalogue(FAMILIES, tuple(WHOLES), open_whole)
build_config = partial(read_config.build_config, catalogue=CATALOGUE)
load_config = partial(read_config.load_config, catalogue=CATALOGUE)


def has_native_code(folder: Path) -> bool:
    """Whether Baton's own code computes it: not where transformers pools whole texts. Raises like `load_config`."""
    pooling = read_pooling(folder)
    return not (pooling and pooling.is_whole) and read_config.has_native_code(folder, CATALOGUE)
