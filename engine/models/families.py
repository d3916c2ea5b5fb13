"""The families of models of Llama's kind: how each differs from Llama. To add one, add a row.

A row is read by read_config.py. Families with experts, recurrent layers and the like are rows of engine/catalogue.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from engine.json_values import Json, flag, integer, number, number_unless_zero
from engine.models.config import ModelConfig, Norms

# all: every layer, from sliding_window. by_layer: use_sliding_window, max_window_layers, layer_types. switched:
# use_sliding_window turns all layers on. by_type: layer_types, else every n-th layer is full.
Windows = Literal["none", "all", "by_layer", "switched", "by_type"]
Fields = Mapping[str, Any]
"""Field of a config |-> its value in all models of the family, or what reads it from config.json: Json |-> value"""
Extend = Callable[[Json, ModelConfig], ModelConfig]
"""(config.json, the model as the core reads it) |-> with what a satellite has of it"""


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # config.json's values that files may leave out
    fields: Fields = field(default_factory=dict)  # of config.ModelConfig
    renamed: Mapping[str, str] = field(default_factory=dict)  # own keys |-> Llama's
    windows: Windows = "none"
    full_every: int = 0  # with windows by type: each n-th layer is full
    activation_key: str = "hidden_act"
    has_partial_rope: bool = False
    ropes_by_type: bool = False
    longrope_names: tuple[str, ...] = ()  # older ones
    rope_layers: bool = False  # no_rope_layers, no_rope_layer_interval
    is_last_full: bool = False  # the last layer has no window, whatever layer_types says
    extend: tuple[Extend, ...] = ()  # in this order: what satellites read, see engine/catalogue.py


def resolve(fields: Fields, config: Json) -> dict[str, Any]:
    """The values for one config.json."""
    return {name: value(config) if callable(value) else value for name, value in fields.items()}


def of_flag(key: str) -> Callable[[Json], bool]:
    return partial(flag, key=key)


def of_number(key: str, default: float = 0.0) -> Callable[[Json], float]:
    """Null and 0 are the default."""
    return partial(number_unless_zero, key=key, default=default)


SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM4 = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

QKV_BIAS: Fields = {"has_qkv_bias": of_flag("attention_bias")}
BIASES: Fields = {**QKV_BIAS, "has_output_bias": of_flag("attention_bias")}
ALL_BIASES: Fields = {**BIASES, "has_mlp_bias": of_flag("mlp_bias")}
SOFTCAP: Fields = {"logits_softcap": of_number("final_logit_softcapping")}
GEMMA: Fields = {
    **BIASES, **SOFTCAP, "norms": SANDWICH, "norm_offset": 1.0, "activation": "gelu_tanh",
    "attention_scale": lambda config: 1 / math.sqrt(number(config, "query_pre_attn_scalar")),
    "embedding_multiplier": lambda config: math.sqrt(integer(config, "hidden_size")), "rounds_multiplier": True,
}  # fmt: skip
GEMMA_LAYERS: dict[str, Any] = {"windows": "by_type", "activation_key": "hidden_activation"}
GLM: Fields = {**QKV_BIAS, "rope_is_interleaved": True, "packs_gate_up": True}
GLM_DEFAULTS = {"head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", fields=ALL_BIASES),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 4096}, windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"sliding_window": 4096}, {"has_qkv_bias": True}, windows="by_layer"),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"sliding_window": 4096, "head_dim": 128}, {**BIASES, "qk_norm": "head"}, windows="by_layer"
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
    "glm": Family("GlmForCausalLM", GLM_DEFAULTS, GLM, has_partial_rope=True),
    "glm4": Family("Glm4ForCausalLM", GLM_DEFAULTS, {**GLM, "norms": GLM4}, has_partial_rope=True),
}  # fmt: skip
