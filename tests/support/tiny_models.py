"""Tiny random models of transformers' causal language models, one of each type."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB, CONTEXT, WINDOW = 128, 128, 6
COMMON: dict[str, Any] = {  # what many configs call these; a config takes those that it knows
    "vocab_size": VOCAB, "hidden_size": 64, "n_embd": 64, "intermediate_size": 96, "ffn_hidden_size": 96,
    "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": CONTEXT, "n_positions": CONTEXT, "sliding_window": WINDOW,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "num_kv_shared_layers": 0, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
}  # fmt: skip
MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
FOUR: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
DELTA: dict[str, Any] = HYBRID | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
MAMBA: dict[str, Any] = {"n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": MLA, "deepseek_v2": MLA, "deepseek_v3": MLA, "glm4_moe_lite": MLA, "minicpm3": MLA, "youtu": MLA,
    "gemma3n_text": FOUR, "gemma4_text": FOUR, "gemma4_unified_text": FOUR,
    "granitemoehybrid": HYBRID | MAMBA2,
    "bamba": MAMBA2 | {"attn_layer_indices": [1]}, "falcon_h1": MAMBA2 | {"mamba_d_ssm": 128},
    "kimi_linear": HYBRID | {"num_key_value_heads": 4},
    "nemotron_h": MAMBA | {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "moe", "linear_attention"],
    },
    "olmo_hybrid": DELTA, "qwen3_next": DELTA, "qwen3_5_text": DELTA, "qwen3_5_moe_text": DELTA,
    "dots1": MIXED, "laguna": MIXED, "mellum": MIXED, "smollm3": MIXED | {"use_sliding_window": True},
}  # fmt: skip


def tiny_config(model_type: str, **special: Any) -> Any:
    """A config of this type. special: beyond COMMON and SPECIAL."""
    return _shrink(CONFIG_MAPPING[model_type], {**SPECIAL.get(model_type, {}), **special})


def _shrink(kind: Any, special: Mapping[str, Any]) -> Any:
    default = kind()
    known = {*default.to_dict(), *default.attribute_map}
    given = {key: value for key, value in COMMON.items() if key in known}
    for part in kind.sub_configs:  # text, vision, audio
        if (config := getattr(default, part)) is not None:
            own = {**SPECIAL.get(config.model_type, {}), **special.get(part, {})}
            given[part] = _shrink(type(config), own).to_dict()
    kinds = getattr(default, "layer_types", None)
    is_derived = isinstance(getattr(kind, default.attribute_map.get("layer_types", ""), None), property)
    if kinds and "layer_types" in known and not is_derived:  # one layer of each kind
        given["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[: COMMON["num_hidden_layers"]]
    return kind(**{**given, **{key: value for key, value in special.items() if key not in kind.sub_configs}})


def tiny_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights, so large that greedy tokens are no near ties. Norms and biases are random too."""
    torch.manual_seed(0)
    library: Any = AutoModelForCausalLM
    model = library.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(
                torch.randn_like(weight) * 0.15 if weight.ndim > 1 else weight + torch.randn_like(weight) * 0.1
            )
    return model
