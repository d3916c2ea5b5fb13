"""A GGUF file's description of its model, as config.json and generation_config.json. Loads no tensors."""

from collections.abc import Mapping
from typing import Any

from engine.formats.gguf_file import Metadata
from engine.weights.files import TensorEntry

FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3", "granite": "granite", "smollm3": "smollm3", "olmo2": "olmo2",
}  # fmt: skip
PAIRED = ("llama", "granite", "smollm3")  # rows of a head: those that are rotated together stand side by side
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # of an architecture |-> in config.json
FIXED: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma3": {"hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 1e4},
    "qwen3moe": {"norm_topk_prob": True},
}
WIDE_GEMMAS = {("gemma2", 46), ("gemma3", 62)}  # by layers: their scale of attention follows from the hidden size
OTHERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # part of the config here
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def architecture_of(metadata: Metadata) -> str:
    """Its name in GGUF. ValueError names what is supported."""
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ValueError(f"a GGUF of architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return str(name)


def build_config_json(metadata: Metadata, entries: Mapping[str, TensorEntry], rope: Mapping[str, list[float]]) -> Any:
    """The config.json that the model would have. rope: values of `OTHERS`, those that the file has."""
    name = architecture_of(metadata)
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    config = {"model_type": FAMILIES[name], "torch_dtype": "bfloat16"} | FIXED.get(name, {})
    config |= {theirs: own[key] for key, theirs in KEYS.items() if own.get(key) is not None}
    for needed in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        least = 2 if needed == "max_position_embeddings" else 1
        if not isinstance(config.get(needed), int) or config[needed] < least:
            raise ValueError(f"its metadata has no usable {needed}: {config.get(needed)!r}")
    if "token_embd.weight" not in entries:
        raise ValueError("it has no tensor token_embd.weight")
    if name == "llama" and config.get("num_experts"):
        config |= {"model_type": "mixtral", "num_local_experts": config["num_experts"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = own.get("rope.dimension_count", head_dim)
    if name == "phi3":
        config["partial_rotary_factor"] = rotated / head_dim
    elif "head_dim" not in config:
        head_dim = rotated
    config |= {
        "head_dim": head_dim,
        "vocab_size": entries["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in entries,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if name.startswith("gemma"):
        is_wide = (name, config["num_hidden_layers"]) in WIDE_GEMMAS
        scalar = config["hidden_size"] // config["num_attention_heads"] if is_wide else head_dim
        config["query_pre_attn_scalar"] = scalar
    config["rope_scaling"] = _rope_scaling(own, config, rope)
    return config


def _rope_scaling(own: Metadata, config: Mapping[str, Any], rope: Mapping[str, list[float]]) -> Any:
    context = config["max_position_embeddings"]
    if "rope_freqs.weight" in rope:  # each frequency is divided by its factor, whatever rule gave them
        factors = rope["rope_freqs.weight"]
        given = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": context, **given}
    if "rope_factors_long.weight" in rope:
        given = {f"{kind}_factor": rope[f"rope_factors_{kind}.weight"] for kind in ("long", "short")}
        if "rope.scaling.attn_factor" in own:
            given["attention_factor"] = own["rope.scaling.attn_factor"]
        original = own.get("rope.scaling.original_context_length", context)
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **given}
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    given = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    if "rope.scaling.original_context_length" in own:
        given["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    return given


def build_generation_json(metadata: Metadata) -> Any:
    """The generation_config.json that the model would have."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    sampling = {theirs: metadata.get(f"general.sampling.{name}") for name, theirs in SAMPLING.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    return {"eos_token_id": sorted({end for end in ends if end is not None}), **given}
