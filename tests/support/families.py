"""Model families for tiny checkpoints: transformers' classes, and config values so that every kind of layer occurs.

Windows, chunks and original contexts are shorter than tests' prompts, and scales differ from what follows from the
shape, so leaving one out changes the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 320
IMAGE = 262  # the image token's id: the first after a tokenizer's bytes
WINDOW = 8  # tokens
SLIDING, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"


@dataclass(frozen=True, slots=True)
class Family:
    """One family's tiny model. Classes are names, so that only those in use are imported."""

    config: str  # transformers' class; of the text part, if the model has others
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)  # config values beside the common ones
    head_dim: int = 32
    layers: int = 2
    is_tied: bool = False
    logit_spread: float = 4.0  # standard deviation of the logits before scales and caps, if norms keep the size of rows
    norm_gain: float = 1.0  # of norms over whole rows; see GEMMA
    whole_config: str | None = None  # the config around the text part
    whole_extra: Mapping[str, Any] = field(default_factory=dict)


def rope(rope_type: str, rope_theta: float, **rest: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": rope_theta, **rest}


YARN = rope("yarn", 5e4, factor=4.0, original_max_position_embeddings=512)
LLAMA3 = rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)
LONGROPE = rope(
    "longrope", 1e4, partial_rotary_factor=0.75,
    short_factor=[1.0 + 0.1 * pair for pair in range(12)],  # 24 of 32 dimensions are rotated
    long_factor=[1.0 + 2.0 * pair for pair in range(12)],
)  # fmt: skip
HALF_ROTATED = rope("default", 1e4, partial_rotary_factor=0.5)
# Embeddings are small beside what layers add: with the embedding as head too, each token would predict itself.
GEMMA: dict[str, Any] = dict(is_tied=True, logit_spread=0.9, norm_gain=4.0)
GEMMA3 = dict(
    query_pre_attn_scalar=24, sliding_window=WINDOW, layer_types=[SLIDING, FULL, SLIDING],
    rope_parameters={SLIDING: rope("default", 1e4), FULL: rope("linear", 1e6, factor=8.0)},
)  # fmt: skip
GEMMA4 = dict(
    sliding_window=WINDOW, layer_types=[SLIDING, FULL], global_head_dim=64, final_logit_softcapping=10.0,
    rope_parameters={SLIDING: rope("default", 1e4), FULL: rope("proportional", 1e6, partial_rotary_factor=0.25)},
)  # fmt: skip
GEMMA4_E = dict(
    GEMMA4, layer_types=[SLIDING, FULL] * 3, num_kv_shared_layers=2, use_double_wide_mlp=True,
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB,
)  # fmt: skip  # layers 4 and 5 read the keys and values of layers 2 and 3
GEMMA4_LARGE = dict(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0)
QWEN3_5 = dict(
    layer_types=[LINEAR, FULL, LINEAR],
    rope_parameters=rope("default", 1e4, partial_rotary_factor=0.25, mrope_section=[2, 1, 1]),
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
)  # fmt: skip
QWEN3_5_MOE = dict(
    QWEN3_5, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96
)
QWEN_VISION = dict(
    depth=2, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=128, patch_size=4, spatial_merge_size=2
)
QWEN2_5_VISION = dict(QWEN_VISION, window_size=16, fullatt_block_indexes=[1])
QWEN3_5_VISION = dict(QWEN_VISION, num_position_embeddings=16)
QWEN3_VISION = dict(QWEN3_5_VISION, deepstack_visual_indexes=[0, 1])
QWEN_TOKENS = dict(image_token_id=IMAGE, video_token_id=263, vision_start_token_id=264, vision_end_token_id=265)
LFM2 = dict(layer_types=[CONV, FULL, CONV], conv_bias=True)
VISION = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=4
)
GEMMA_TOKENS = dict(image_token_id=IMAGE, boi_token_id=263, eoi_token_id=264)
GEMMA4_VISION = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=8, position_embedding_size=256, patch_size=4,
)  # fmt: skip
LLAVA = dict(
    image_token_id=IMAGE, vision_config=dict(VISION, model_type="clip_vision_model", image_size=24, patch_size=8)
)

# Heads of four sizes, none a product of others. Tests' heads and head_dim are not those of latents.
LATENT = dict(
    num_key_value_heads=4, head_dim=16, q_lora_rank=24, kv_lora_rank=40, qk_nope_head_dim=32, qk_rope_head_dim=16,
    v_head_dim=24,
)  # fmt: skip
LATENT_YARN = dict(YARN, mscale=1.0, mscale_all_dim=0.7)
LATENT_MOE = dict(
    LATENT, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, n_shared_experts=2,
    routed_scaling_factor=2.5, n_group=4, topk_group=2, first_k_dense_replace=1,
)  # fmt: skip

DEEPSEEK_V3: dict[str, Any] = {  # what Baton reads of https://huggingface.co/deepseek-ai/DeepSeek-V3's config.json
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip

LONGROPE_ORIGINAL = 32
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", head_dim=64),
    "mistral": Family("MistralConfig", "MistralForCausalLM", dict(sliding_window=None), head_dim=64),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", dict(max_window_layers=1), head_dim=64),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", dict(max_window_layers=1), head_dim=64),
    "qwen3_moe": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", layers=3, head_dim=64,
        extra=dict(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[1]
        ),
    ),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=4)),
    "gpt_oss": Family(
        "GptOssConfig", "GptOssForCausalLM", head_dim=64,
        extra=dict(
            sliding_window=WINDOW, num_local_experts=8, num_experts_per_tok=2,
            rope_parameters=dict(YARN, truncate=False),
        ),
    ),
    "gemma2": Family(
        "Gemma2Config", "Gemma2ForCausalLM", **GEMMA,
        extra=dict(
            query_pre_attn_scalar=24, sliding_window=WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
        ),
    ),
    "gemma3_text": Family("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3, layers=3, **GEMMA),
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3ForConditionalGeneration", GEMMA3, layers=3, **GEMMA,
        whole_config="Gemma3Config",
        whole_extra=dict(
            GEMMA_TOKENS, vision_config=dict(VISION, model_type="siglip_vision_model"), mm_tokens_per_image=16
        ),
    ),
    "gemma4_e2b": Family(
        "Gemma4TextConfig", "Gemma4ForConditionalGeneration", GEMMA4_E, layers=6, **GEMMA,
        whole_config="Gemma4Config", whole_extra=dict(GEMMA_TOKENS, vision_config=GEMMA4_VISION),
    ),
    "gemma4_12b": Family(
        "Gemma4TextConfig", "Gemma4ForConditionalGeneration", dict(GEMMA4_LARGE, use_bidirectional_attention="vision"),
        **GEMMA, whole_config="Gemma4Config", whole_extra=dict(GEMMA_TOKENS, vision_config=GEMMA4_VISION),
    ),
    "gemma4_31b": Family("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4_LARGE, **GEMMA),
    "gemma4_26b_a4b": Family(
        "Gemma4TextConfig", "Gemma4ForCausalLM", **GEMMA,
        extra=dict(GEMMA4_LARGE, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64),
    ),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", dict(sliding_window=WINDOW)),
    "phi4_mini": Family(
        "Phi3Config", "Phi3ForCausalLM", is_tied=True,
        extra=dict(rope_parameters=LONGROPE, original_max_position_embeddings=LONGROPE_ORIGINAL),
    ),
    "granite": Family(
        "GraniteConfig", "GraniteForCausalLM", logit_spread=8.0,
        extra=dict(embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.8, logits_scaling=2.0),
    ),
    "smollm3": Family("SmolLM3Config", "SmolLM3ForCausalLM", dict(no_rope_layer_interval=2), is_tied=True),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": Family(
        "Olmo3Config", "Olmo3ForCausalLM",
        dict(
            sliding_window=WINDOW, layer_types=[SLIDING, FULL],
            rope_parameters={SLIDING: rope("default", 5e4), FULL: YARN},
        ),
    ),
    "glm": Family("GlmConfig", "GlmForCausalLM", dict(rope_parameters=HALF_ROTATED)),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", dict(rope_parameters=HALF_ROTATED)),
    "glm4_moe": Family(
        "Glm4MoeConfig", "Glm4MoeForCausalLM",
        dict(
            rope_parameters=HALF_ROTATED, attention_bias=True, use_qk_norm=True, n_routed_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=64, routed_scaling_factor=2.5,
        ),
    ),
    "qwen3_5_text": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN3_5, layers=3),
    "qwen3_5": Family(
        "Qwen3_5TextConfig", "Qwen3_5ForConditionalGeneration", QWEN3_5, layers=3,
        whole_config="Qwen3_5Config", whole_extra=dict(QWEN_TOKENS, vision_config=QWEN3_5_VISION),
    ),
    "qwen3_5_moe_text": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN3_5_MOE, layers=3),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE, layers=3,
        whole_config="Qwen3_5MoeConfig", whole_extra=dict(QWEN_TOKENS, vision_config=QWEN3_5_VISION),
    ),
    "lfm2": Family(
        "Lfm2Config", "Lfm2ForCausalLM", layers=3, is_tied=True,
        extra=dict(LFM2, block_multiple_of=48, block_ffn_dim_multiplier=1.3),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeConfig", "Lfm2MoeForCausalLM", layers=3,
        extra=dict(
            LFM2, num_dense_layers=1, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
            routed_scaling_factor=1.5,
        ),
    ),
    "deepseek_v2": Family(
        "DeepseekV2Config", "DeepseekV2ForCausalLM", dict(
            LATENT_MOE, topk_method="group_limited_greedy", rope_parameters=LATENT_YARN, attention_bias=True
        ),
    ),
    "deepseek_v2_lite": Family("DeepseekV2Config", "DeepseekV2ForCausalLM", dict(LATENT_MOE, q_lora_rank=None)),
    "deepseek_v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(LATENT_MOE, rope_parameters=LATENT_YARN)),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", dict(LATENT_MOE, n_group=1, topk_group=1, v_head_dim=48),
        layers=3,
    ),
    "minicpm3": Family(
        "MiniCPM3Config", "MiniCPM3ForCausalLM", is_tied=True,
        extra=dict(LATENT, scale_emb=3, scale_depth=1.2, dim_model_base=64),
    ),
    "mistral3": Family(
        "MistralConfig", "Mistral3ForConditionalGeneration", dict(sliding_window=None), head_dim=64,
        whole_config="Mistral3Config",
        whole_extra=dict(image_token_id=IMAGE, vision_config=dict(VISION, model_type="pixtral")),
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLTextConfig", "Qwen2_5_VLForConditionalGeneration", whole_config="Qwen2_5_VLConfig",
        extra=dict(max_window_layers=1, rope_parameters=rope("default", 1e4, mrope_section=[4, 6, 6])),
        whole_extra=dict(QWEN_TOKENS, vision_config=QWEN2_5_VISION),
    ),
    "qwen3_vl": Family(
        "Qwen3VLTextConfig", "Qwen3VLForConditionalGeneration", whole_config="Qwen3VLConfig", layers=3,
        extra=dict(rope_parameters=rope("default", 1e4, mrope_section=[6, 5, 5])),
        whole_extra=dict(QWEN_TOKENS, vision_config=QWEN3_VISION),
    ),
    "smolvlm": Family(
        "LlamaConfig", "SmolVLMForConditionalGeneration", whole_config="SmolVLMConfig",
        whole_extra=dict(image_token_id=IMAGE, vision_config=dict(VISION, patch_size=8), scale_factor=2),
    ),
    "idefics3": Family(
        "LlamaConfig", "Idefics3ForConditionalGeneration", whole_config="Idefics3Config",
        whole_extra=dict(image_token_id=IMAGE, vision_config=dict(VISION, patch_size=8), scale_factor=2),
    ),
    "llava": Family(
        "LlamaConfig", "LlavaForConditionalGeneration", whole_config="LlavaConfig", whole_extra=LLAVA
    ),
    "llava_next": Family(
        "Qwen2Config", "LlavaNextForConditionalGeneration", dict(max_window_layers=1), whole_config="LlavaNextConfig",
        whole_extra=dict(LLAVA, image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]]),
    ),
    "pixtral": Family(
        "MistralConfig", "LlavaForConditionalGeneration", dict(sliding_window=None), whole_config="LlavaConfig",
        whole_extra=dict(
            image_token_id=IMAGE, vision_config=dict(VISION, model_type="pixtral"), vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
    ),
}  # fmt: skip
