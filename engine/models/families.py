"""The model families that Baton computes itself: how each differs from Llama. To add one of Llama's kind, add a row.

A row is read by read_config.py. What a row cannot say runs through transformers' own code (fallback.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.layers.moe_config import Activation
from engine.models.config import ExpertLayout, MlpNames, MoeNorms, Norms, QkNorm

# all: every layer, from sliding_window. by_layer: use_sliding_window, max_window_layers, layer_types. switched:
# use_sliding_window turns all layers on. by_type: layer_types, else every n-th layer is full.
Windows = Literal["none", "all", "by_layer", "switched", "by_type"]
Mixer = Literal["attention", "delta_net", "gated_conv"]

LLAMA, LLAMA_MLP = Norms(), MlpNames()
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM4 = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
LFM2_NORMS = Norms(
    "operator_norm", before_mlp="ffn_norm", query="self_attn.q_layernorm", key="self_attn.k_layernorm",
    final="embedding_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Experts:
    """See config.Moe. Values are those of all models of the family, or a config key."""

    router: str
    module: str
    layout: ExpertLayout
    count: str  # key
    inner: str = "moe_intermediate_size"  # key
    top_k: str = "num_experts_per_tok"  # key
    enabled: str | None = None  # key; false: the model has none
    layers: Literal["all", "sparse_step", "after_first"] = "all"
    routing: Mapping[str, Any] = field(default_factory=dict)  # fields of Routing
    renormalise: bool | str = True
    scale: str | None = None
    has_biases: bool = False
    choice_bias: str | None = None
    choice_bias_key: str | None = None  # must be true for `choice_bias`
    has_wide_router: bool = False
    shared: str | None = None
    shared_size: str | None = None  # key; None: n_shared_experts times `inner`, or with norms the layer's own
    shared_gate: str | None = None
    expert_scale: str | None = None
    norms: MoeNorms | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama. A bias or norm is given, or the config key that decides."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # config values that files may leave out
    renamed: Mapping[str, str] = field(default_factory=dict)  # own keys |-> Llama's
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: Norms = LLAMA
    mlp: MlpNames = LLAMA_MLP
    output_module: str = "o_proj"
    norm_offset: float = 0.0
    qk_norm: QkNorm = "none"
    qk_norm_key: str | None = None  # must be true for `qk_norm`
    has_v_norm: bool = False
    has_output_gate: bool = False
    mixer: Mixer = "attention"  # of layers whose type is not full_attention, see read_layers.py
    windows: Windows = "none"
    full_every: int = 0  # with windows by type: each n-th layer is full
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    has_partial_rope: bool = False
    rope_is_interleaved: bool = False
    ropes_by_type: bool = False
    longrope_names: tuple[str, ...] = ()  # older ones
    rope_layers: bool = False  # no_rope_layers, no_rope_layer_interval
    attention_scale: str | float | None = None  # or its key; query_pre_attn_scalar: its ** -0.5
    attention_softcap: str | None = None  # keys, also below
    logits_softcap: str | None = None
    caps_whole: bool = False  # the model with other parts caps its logits, too
    embedding_multiplier: str | None = None  # "sqrt": of the hidden size
    residual_multiplier: str | None = None
    logits_divisor: str | None = None
    has_sinks: bool = False
    has_layer_scale: bool = False
    has_token_inputs: bool = False  # hidden_size_per_layer_input
    has_varied_layers: bool = False  # see read_layers.py; the last layer is full
    adjusts_mlp: bool = False  # block_auto_adjust_ff_dim: intermediate_size is not that of the MLPs
    packs_qkv: bool = False
    packs_gate_up: bool = False
    experts: Experts | None = None
    whole: tuple[str, str] | None = None  # (model_type, architecture) of a model whose text_config this is


ALL_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
GEMMA: dict[str, Any] = ALL_BIASES | {
    "norms": SANDWICH, "norm_offset": 1.0, "activation": "gelu_tanh", "activation_key": "hidden_activation",
    "windows": "by_type", "attention_scale": "query_pre_attn_scalar", "embedding_multiplier": "sqrt",
}  # fmt: skip
GLM: dict[str, Any] = {
    "qkv_bias": "attention_bias", "has_partial_rope": True, "rope_is_interleaved": True, "packs_gate_up": True,
}  # fmt: skip
W1_W3_W2 = MlpNames("feed_forward", "w1", "w3", "w2")
QWEN3_5_DEFAULTS = {
    "vocab_size": 248_320, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 32, "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
QWEN3_5: dict[str, Any] = ALL_BIASES | {
    "norm_offset": 1.0, "qk_norm": "head", "has_partial_rope": True, "has_output_gate": True, "mixer": "delta_net",
}  # fmt: skip
LFM2_DEFAULTS = {
    "num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 128_000,
    "tie_word_embeddings": True, "conv_L_cache": 3,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "norms": LFM2_NORMS, "mlp": W1_W3_W2, "output_module": "out_proj", "qk_norm": "head", "mixer": "gated_conv",
    "renamed": {
        "norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size",
        "num_dense_layers": "first_k_dense_replace",
    },
}  # fmt: skip
GLM_DEFAULTS = {"head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
QWEN_EXPERTS = Experts(
    "mlp.gate", "mlp.experts", "per_expert", "num_experts", layers="sparse_step",
    routing={"precision": "rounded"}, renormalise="norm_topk_prob",
)  # fmt: skip
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26,
}  # fmt: skip
GEMMA4_DEFAULTS = {
    "vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
GEMMA4_EXPERTS = Experts(
    "router.proj", "experts", "stacked", "num_experts", top_k="top_k_experts", enabled="enable_moe_block",
    shared="mlp", expert_scale="router.per_expert_scale", norms=MoeNorms(
        "router.scale", "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
    ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", **ALL_BIASES, mlp_bias="mlp_bias"),
    "mistral": Family(
        "MistralForCausalLM", {"sliding_window": 4096}, windows="all",
        whole=("mistral3", "Mistral3ForConditionalGeneration"),
    ),
    "qwen2": Family("Qwen2ForCausalLM", {"sliding_window": 4096}, qkv_bias=True, windows="by_layer"),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"sliding_window": 4096, "head_dim": 128}, **ALL_BIASES, qk_norm="head", windows="by_layer"
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"sliding_window": 4096, "num_key_value_heads": 4, "num_experts_per_tok": 8},
        **ALL_BIASES, qk_norm="head", windows="switched", experts=QWEN_EXPERTS,
    ),
    "mixtral": Family(
        "MixtralForCausalLM", {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        windows="all", mlp=W1_W3_W2, experts=Experts(
            "block_sparse_moe.gate", "block_sparse_moe.experts", "per_expert", "num_local_experts", "intermediate_size"
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", {"attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1.5e5},
        **ALL_BIASES, windows="by_type", full_every=2, activation="clamped", has_sinks=True, experts=Experts(
            "mlp.router", "mlp.experts", "alternating", "num_local_experts", "intermediate_size",
            routing={"scores_all": False, "precision": "rounded"}, renormalise=False, has_biases=True,
        ),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window": 4096, "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        **GEMMA, full_every=2, attention_softcap="attn_logit_softcapping", logits_softcap="final_logit_softcapping",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA3_DEFAULTS, **GEMMA, full_every=6, qk_norm="head", ropes_by_type=True,
        logits_softcap="final_logit_softcapping", whole=("gemma3", "Gemma3ForConditionalGeneration"),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", GEMMA4_DEFAULTS, **GEMMA | {"norm_offset": 0.0, "attention_scale": 1.0},
        full_every=6, qk_norm="head", has_v_norm=True, ropes_by_type=True, logits_softcap="final_logit_softcapping",
        caps_whole=True, has_layer_scale=True, has_token_inputs=True, has_varied_layers=True, experts=GEMMA4_EXPERTS,
        whole=("gemma4", "Gemma4ForConditionalGeneration"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        windows="all", has_partial_rope=True, longrope_names=("su", "yarn"), packs_qkv=True, packs_gate_up=True,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
        **ALL_BIASES, mlp_bias="mlp_bias", attention_scale="attention_multiplier",
        embedding_multiplier="embedding_multiplier", residual_multiplier="residual_multiplier",
        logits_divisor="logits_scaling",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"rope_theta": 2e6, "num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        **ALL_BIASES, mlp_bias="mlp_bias", windows="by_type", rope_layers=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, **ALL_BIASES, norms=AFTER, qk_norm="width"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
        **ALL_BIASES, norms=AFTER, qk_norm="width", windows="by_type", full_every=4, ropes_by_type=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", QWEN3_5_DEFAULTS, **QWEN3_5, whole=("qwen3_5", "Qwen3_5ForConditionalGeneration")
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        QWEN3_5_DEFAULTS | {
            "num_key_value_heads": 2, "hidden_size": 2048, "num_hidden_layers": 40, "intermediate_size": 512,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
        },
        **QWEN3_5, whole=("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"), experts=Experts(
            "mlp.gate", "mlp.experts", "per_expert", "num_experts", routing={"precision": "rounded"},
            shared="mlp.shared_expert", shared_size="shared_expert_intermediate_size",
            shared_gate="mlp.shared_expert_gate",
        ),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        LFM2_DEFAULTS | {
            "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        },
        **LFM2, adjusts_mlp=True,
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        LFM2_DEFAULTS | {
            "num_dense_layers": 2, "moe_intermediate_size": 1792, "num_experts_per_tok": 4, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "use_expert_bias": True,
        },
        **LFM2, experts=Experts(
            "feed_forward.gate", "feed_forward.experts", "per_expert", "num_experts", layers="after_first",
            routing={"scoring": "sigmoid", "epsilon": 1e-6, "precision": "logits"}, renormalise="norm_topk_prob",
            scale="routed_scaling_factor", choice_bias="feed_forward.expert_bias", choice_bias_key="use_expert_bias",
        ),
    ),
    "glm": Family("GlmForCausalLM", GLM_DEFAULTS, **GLM),
    "glm4": Family("Glm4ForCausalLM", GLM_DEFAULTS, **GLM, norms=GLM4),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        },
        qkv_bias="attention_bias", has_partial_rope=True, qk_norm="head", qk_norm_key="use_qk_norm", experts=Experts(
            "mlp.gate", "mlp.experts", "per_expert", "n_routed_experts", layers="after_first",
            routing={"scoring": "sigmoid", "epsilon": 1e-20, "group_peaks": 2}, renormalise="norm_topk_prob",
            scale="routed_scaling_factor", choice_bias="mlp.gate.e_score_correction_bias", has_wide_router=True,
            shared="mlp.shared_experts",
        ),
    ),
}  # fmt: skip
