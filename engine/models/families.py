"""The model families that Baton computes itself: how each differs from Llama. To add one of Llama's kind, add a row.

A row is read by read_config.py. What a row cannot say runs through transformers' own code (fallback.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from engine.json_values import Json, flag, integer, number, number_unless_zero
from engine.models.config import MlpNames, MoeNorms, Norms

# all: every layer, from sliding_window. by_layer: use_sliding_window, max_window_layers, layer_types. switched:
# use_sliding_window turns all layers on. by_type: layer_types, else every n-th layer is full.
Windows = Literal["none", "all", "by_layer", "switched", "by_type"]
Mixer = Literal["attention", "delta_net", "gated_conv"]
MoeLayers = Literal["all", "sparse_step", "after_first"]
Fields = Mapping[str, Any]
"""Field of a config |-> its value in all models of the family, or what reads it from config.json: Json |-> value"""


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The mixtures of experts of a family."""

    moe: Fields  # of config.Moe, without its routing
    routing: Fields  # of layers.config.Routing
    layers: MoeLayers = "all"
    enabled: str | None = None  # key; false: the model has none


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # config.json's values that files may leave out
    fields: Fields = field(default_factory=dict)  # of config.ModelConfig
    renamed: Mapping[str, str] = field(default_factory=dict)  # own keys |-> Llama's
    mixer: Mixer = "attention"  # of layers whose type is not full_attention, see read_layers.py
    windows: Windows = "none"
    full_every: int = 0  # with windows by type: each n-th layer is full
    activation_key: str = "hidden_act"
    has_partial_rope: bool = False
    ropes_by_type: bool = False
    longrope_names: tuple[str, ...] = ()  # older ones
    rope_layers: bool = False  # no_rope_layers, no_rope_layer_interval
    has_varied_layers: bool = False  # see read_layers.py; the last layer is full
    experts: ExpertKeys | None = None


def of_flag(key: str) -> Callable[[Json], bool]:
    return partial(flag, key=key)


def of_number(key: str, default: float = 0.0) -> Callable[[Json], float]:
    """Null and 0 are the default."""
    return partial(number_unless_zero, key=key, default=default)


def count_experts(config: Json, key: str) -> int:
    """Files and transformers differ in its key."""
    others = [one for one in (key, "num_experts", "num_local_experts", "n_routed_experts") if one in config]
    return integer(config, others[0] if others else key)


def build_experts(
    router: str,
    module: str,
    layout: str,
    count: str,
    routing: Fields,
    inner: str = "moe_intermediate_size",
    top_k: str = "num_experts_per_tok",
    layers: MoeLayers = "all",
    enabled: str | None = None,
    **moe: Any,
) -> ExpertKeys:
    """count, inner, top_k, enabled: keys."""
    given = {"router": router, "experts": module, "layout": layout, "inner_size": partial(integer, key=inner)}
    chosen = {"num_experts": partial(count_experts, key=count), "top_k": partial(integer, key=top_k)}
    return ExpertKeys(given | moe, {**chosen, **routing}, layers, enabled)


def read_inner_size(config: Json) -> int:
    """LFM2's intermediate_size may not be that of its MLPs."""
    size = integer(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim"):
        return size
    size, multiple = int(2 * size / 3), integer(config, "block_multiple_of")
    return -(-int(number(config, "block_ffn_dim_multiplier") * size) // multiple) * multiple


def read_token_inputs(config: Json) -> int:
    size, words = integer(config, "hidden_size_per_layer_input", least=0), integer(config, "vocab_size")
    if size and (own := integer(config, "vocab_size_per_layer_input", 262_144)) != words:
        raise ValueError(f"vocab_size_per_layer_input {own} is not supported; supported: vocab_size, {words}")
    return size


SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM4 = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
LFM2_NORMS = Norms(
    "operator_norm", before_mlp="ffn_norm", query="self_attn.q_layernorm", key="self_attn.k_layernorm",
    final="embedding_norm",
)  # fmt: skip
W1_W3_W2 = MlpNames("feed_forward", "w1", "w3", "w2")

QKV_BIAS: Fields = {"has_qkv_bias": of_flag("attention_bias")}
BIASES: Fields = {**QKV_BIAS, "has_output_bias": of_flag("attention_bias")}
ALL_BIASES: Fields = {**BIASES, "has_mlp_bias": of_flag("mlp_bias")}
SIGMOID: Fields = {
    "scoring": "sigmoid", "renormalise": of_flag("norm_topk_prob"),
    "scale": partial(number, key="routed_scaling_factor"),
}  # fmt: skip
SOFTCAP: Fields = {"logits_softcap": of_number("final_logit_softcapping")}
GEMMA: Fields = {
    **BIASES, **SOFTCAP, "norms": SANDWICH, "norm_offset": 1.0, "activation": "gelu_tanh",
    "attention_scale": lambda config: 1 / math.sqrt(number(config, "query_pre_attn_scalar")),
    "embedding_multiplier": lambda config: math.sqrt(integer(config, "hidden_size")), "rounds_multiplier": True,
}  # fmt: skip
GEMMA_LAYERS: dict[str, Any] = {"windows": "by_type", "activation_key": "hidden_activation"}
GLM: Fields = {**QKV_BIAS, "rope_is_interleaved": True, "packs_gate_up": True}
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
GLM_DEFAULTS = {"head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26,
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
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", fields=ALL_BIASES),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 4096}, windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"sliding_window": 4096}, {"has_qkv_bias": True}, windows="by_layer"),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"sliding_window": 4096, "head_dim": 128}, {**BIASES, "qk_norm": "head"}, windows="by_layer"
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"sliding_window": 4096, "num_key_value_heads": 4, "num_experts_per_tok": 8},
        {**BIASES, "qk_norm": "head"}, windows="switched", experts=build_experts(
            "mlp.gate", "mlp.experts", "per_expert", "num_experts", layers="sparse_step",
            routing={"precision": "rounded", "renormalise": of_flag("norm_topk_prob")},
        ),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        {"mlp": W1_W3_W2}, windows="all", experts=build_experts(
            "block_sparse_moe.gate", "block_sparse_moe.experts", "per_expert", "num_local_experts",
            inner="intermediate_size", routing={"renormalise": True},
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", {"attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1.5e5},
        {**BIASES, "activation": "clamped", "has_sinks": True}, windows="by_type", full_every=2, experts=build_experts(
            "mlp.router", "mlp.experts", "alternating", "num_local_experts", inner="intermediate_size",
            routing={"scores_all": False, "precision": "rounded"}, has_biases=True,
        ),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window": 4096, "tie_word_embeddings": True,
        },
        {**GEMMA, "attention_softcap": of_number("attn_logit_softcapping")}, **GEMMA_LAYERS, full_every=2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA3_DEFAULTS, {**GEMMA, "qk_norm": "head"}, **GEMMA_LAYERS, full_every=6,
        ropes_by_type=True,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", GEMMA4_DEFAULTS,
        {
            **GEMMA, "norm_offset": 0.0, "attention_scale": 1.0, "qk_norm": "head", "has_v_norm": True,
            "has_layer_scale": True, "token_input_size": read_token_inputs,
        },
        **GEMMA_LAYERS, full_every=6, ropes_by_type=True, has_varied_layers=True, experts=build_experts(
            "router.proj", "experts", "stacked", "num_experts", top_k="top_k_experts", enabled="enable_moe_block",
            routing={"renormalise": True}, shared="mlp", expert_scale="router.per_expert_scale", norms=MoeNorms(
                "router.scale", "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            ),
        ),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        {"packs_qkv": True, "packs_gate_up": True}, windows="all", has_partial_rope=True,
        longrope_names=("su", "yarn"),
    ),
    "granite": Family(
        "GraniteForCausalLM", {"attention_multiplier": 1.0},
        {
            **ALL_BIASES, "attention_scale": partial(number, key="attention_multiplier"),
            "embedding_multiplier": of_number("embedding_multiplier", 1.0),
            "residual_multiplier": of_number("residual_multiplier", 1.0),
            "logits_divisor": of_number("logits_scaling", 1.0),
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"rope_theta": 2e6, "num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        ALL_BIASES, windows="by_type", rope_layers=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, {**BIASES, "norms": AFTER, "qk_norm": "width"}),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
        {**BIASES, "norms": AFTER, "qk_norm": "width"}, windows="by_type", full_every=4, ropes_by_type=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", QWEN3_5_DEFAULTS, QWEN3_5, mixer="delta_net", has_partial_rope=True,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        QWEN3_5_DEFAULTS | {
            "num_key_value_heads": 2, "hidden_size": 2048, "num_hidden_layers": 40, "intermediate_size": 512,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
        },
        QWEN3_5, mixer="delta_net", has_partial_rope=True, experts=build_experts(
            "mlp.gate", "mlp.experts", "per_expert", "num_experts",
            routing={"precision": "rounded", "renormalise": True}, shared="mlp.shared_expert",
            shared_size=partial(integer, key="shared_expert_intermediate_size"), shared_gate="mlp.shared_expert_gate",
        ),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        LFM2_DEFAULTS | {
            "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        },
        {**LFM2, "intermediate_size": read_inner_size}, LFM2_RENAMED, mixer="gated_conv",
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        LFM2_DEFAULTS | {
            "num_dense_layers": 2, "moe_intermediate_size": 1792, "num_experts_per_tok": 4, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "use_expert_bias": True,
        },
        LFM2, LFM2_RENAMED, mixer="gated_conv", experts=build_experts(
            "feed_forward.gate", "feed_forward.experts", "per_expert", "num_experts", layers="after_first",
            routing={**SIGMOID, "epsilon": 1e-6, "precision": "logits"},
            choice_bias=lambda config: "feed_forward.expert_bias" if flag(config, "use_expert_bias") else None,
        ),
    ),
    "glm": Family("GlmForCausalLM", GLM_DEFAULTS, GLM, has_partial_rope=True),
    "glm4": Family("Glm4ForCausalLM", GLM_DEFAULTS, {**GLM, "norms": GLM4}, has_partial_rope=True),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        },
        {**QKV_BIAS, "qk_norm": lambda config: "head" if flag(config, "use_qk_norm") else "none"},
        has_partial_rope=True, experts=build_experts(
            "mlp.gate", "mlp.experts", "per_expert", "n_routed_experts", layers="after_first",
            routing={
                **SIGMOID, "epsilon": 1e-20, "group_peaks": 2, "num_groups": partial(integer, key="n_group"),
                "top_groups": partial(integer, key="topk_group"),
            },
            choice_bias="mlp.gate.e_score_correction_bias", has_wide_router=True, shared="mlp.shared_experts",
            shared_size=lambda config: integer(config, "moe_intermediate_size") * integer(config, "n_shared_experts"),
        ),
    ),
}  # fmt: skip
