"""config.json |-> ModelConfig, by the row of its family. Touches no tensor."""

import math
from pathlib import Path

from engine.layers.moe_config import Routing
from engine.models.config import LayerConfig, ModelConfig, Moe
from engine.models.families import FAMILIES, Experts, Family
from engine.models.json_values import Json, collection, flag, integer, number, number_unless_zero, read_json, rule
from engine.models.read_layers import FULL, SLIDING, read_kinds, read_recurrent, vary_layers
from engine.models.read_quantization import read_scheme
from engine.models.read_rope import read_ropes

DEFAULT_MAX_WINDOW_LAYERS = 28  # the default of Qwen's `max_window_layers`
ACTIVATIONS = {"silu": ("silu",), "gelu_tanh": ("gelu_pytorch_tanh",), "clamped": ("silu",)}  # as files call them
CLAMP = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # the only ones; see layers/activation.py
WHOLE = {family.whole[0]: (name, family.whole[1]) for name, family in FAMILIES.items() if family.whole}


def load_config(folder: Path) -> ModelConfig:
    """Read config.json. FileNotFoundError if it is missing.

    ValueError if it is not JSON or needs something unsupported; names the value and what is supported.
    """
    return build_config(read_json(folder / "config.json"))


def build_config(config: Json) -> ModelConfig:
    """Pure twin of `load_config`: the parsed file |-> ModelConfig. Raises the same ValueErrors."""
    is_whole = config.get("model_type") in list(WHOLE)
    if is_whole:
        config = _text_part(config, *WHOLE[config["model_type"]])
    prefix = "language_model." if is_whole else ""
    name, family = _choose_family(config)
    config = {**family.defaults, **config}
    config |= {name: config[own] for own, name in family.renamed.items() if own in config}
    _refuse_unsupported(config, family)
    num_layers = integer(config, "num_hidden_layers")
    num_heads = integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    hidden_size = integer(config, "hidden_size")
    head_dim = integer(config, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
    trained_context = integer(config, "max_position_embeddings")
    windows = _build_windows(config, family, num_layers)
    ropes, rope_of = read_ropes(config, family, windows, trained_context, head_dim)
    experts = family.experts
    moe = _build_moe(config, experts) if experts and rule(config, experts.enabled or True) else None
    recurrent, has_attention = read_recurrent(config, family, num_layers)
    layers = tuple(
        LayerConfig(
            windows[layer],
            rope_of[layer],
            is_moe=experts is not None and moe is not None and _is_moe(config, experts, layer),
            has_attention=has_attention[layer],
        )
        for layer in range(num_layers)
    )
    yarn = [int(rope.original_context * rope.factor) for rope in ropes if rope.kind == "yarn"]
    has_qk_norm = family.qk_norm_key is None or flag(config, family.qk_norm_key)
    return ModelConfig(
        family=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_inner_size(config, family),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        is_tied=flag(config, "tie_word_embeddings"),
        layers=vary_layers(config, layers) if family.has_varied_layers else layers,
        ropes=ropes,
        # Qwen's recipe for long contexts adds yarn and leaves max_position_embeddings at the original.
        context_tokens=max(trained_context, *yarn, 0),
        attention_scale=_attention_scale(config, family, head_dim),
        has_qkv_bias=rule(config, family.qkv_bias),
        has_output_bias=rule(config, family.output_bias),
        has_mlp_bias=rule(config, family.mlp_bias),
        has_sinks=family.has_sinks,
        attention_softcap=_optional(config, family.attention_softcap, 0.0),
        logits_softcap=_optional(config, None if is_whole and not family.caps_whole else family.logits_softcap, 0.0),
        qk_norm=family.qk_norm if has_qk_norm else "none",
        has_v_norm=family.has_v_norm,
        has_output_gate=family.has_output_gate,
        recurrent=recurrent,
        norms=family.norms,
        mlp=family.mlp,
        output_module=family.output_module,
        norm_offset=family.norm_offset,
        activation=family.activation,
        embedding_multiplier=_embedding_multiplier(config, family, hidden_size),
        rounds_multiplier=family.embedding_multiplier == "sqrt",
        residual_multiplier=_optional(config, family.residual_multiplier, 1.0),
        has_layer_scale=family.has_layer_scale,
        token_input_size=_token_input_size(config) if family.has_token_inputs else 0,
        logits_divisor=_optional(config, family.logits_divisor, 1.0),
        packs_qkv=family.packs_qkv,
        packs_gate_up=family.packs_gate_up,
        rope_is_interleaved=family.rope_is_interleaved,
        moe=moe,
        scheme=read_scheme(config),
        prefix=f"{prefix}model.",
        head=f"{prefix}lm_head",
    )


def _text_part(config: Json, name: str, architecture: str) -> Json:
    """The language model of a model that has other parts, too."""
    text = collection(config, "text_config", dict)
    if text.get("model_type", name) != name:
        raise ValueError(f"text_config.model_type {text['model_type']!r} is not supported; supported: {name}")
    if config.get("architectures", [architecture]) != [architecture]:
        raise ValueError(f"architectures {config['architectures']} is not supported; supported: {architecture}")
    given = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}
    return {**given, **text, "model_type": name, "architectures": [FAMILIES[name].architecture]}


def _choose_family(config: Json) -> tuple[str, Family]:
    name = config.get("model_type")
    if name not in list(FAMILIES):  # `in FAMILIES` would fail for an unhashable name
        raise ValueError(f"model_type {name!r} is not supported; supported: {', '.join([*FAMILIES, *WHOLE])}")
    family = FAMILIES[name]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise ValueError(f"architectures {architectures} is not supported for {name}; supported: {family.architecture}")
    return name, family


def _refuse_unsupported(config: Json, family: Family) -> None:
    key, supported = family.activation_key, ACTIVATIONS[family.activation]
    if config.get(key, supported[0]) not in supported:
        raise ValueError(f"{key} {config[key]!r} is not supported; supported: {', '.join(map(repr, supported))}")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # between parts of an image
        raise ValueError("use_bidirectional_attention is not supported; supported: false")
    if family.activation == "clamped":
        for key, value in CLAMP.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} {config[key]!r} is not supported; supported: {value}")


def _build_windows(config: Json, family: Family, num_layers: int) -> tuple[int | None, ...]:
    how = family.windows
    is_on = how in ("all", "by_type") or (how != "none" and flag(config, "use_sliding_window"))
    window = integer(config, "sliding_window") if is_on and config.get("sliding_window") is not None else None
    if how in ("none", "all", "switched"):
        return (window,) * num_layers
    if how == "by_layer":
        first = integer(config, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
        default = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    else:
        every = integer(config, "sliding_window_pattern", family.full_every or 1)
        default = [FULL if window is None or (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]
    kinds = read_kinds(config, default, SLIDING)
    if family.has_varied_layers:
        kinds = [*kinds[:-1], FULL]
    if SLIDING in kinds and window is None:
        raise ValueError(f"layer_types asks for {SLIDING}, but use_sliding_window and sliding_window do not")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _inner_size(config: Json, family: Family) -> int:
    size = integer(config, "intermediate_size")
    if not (family.adjusts_mlp and flag(config, "block_auto_adjust_ff_dim")):
        return size
    size, multiple = int(2 * size / 3), integer(config, "block_multiple_of")
    return -(-int(number(config, "block_ffn_dim_multiplier") * size) // multiple) * multiple


def _attention_scale(config: Json, family: Family, head_dim: int) -> float:
    if family.attention_scale is None:
        return float(head_dim**-0.5)
    if isinstance(family.attention_scale, float):
        return family.attention_scale
    scale = number(config, family.attention_scale)
    return 1 / math.sqrt(scale) if family.attention_scale == "query_pre_attn_scalar" else scale


def _embedding_multiplier(config: Json, family: Family, hidden_size: int) -> float:
    if family.embedding_multiplier == "sqrt":
        return math.sqrt(hidden_size)
    return _optional(config, family.embedding_multiplier, 1.0)


def _token_input_size(config: Json) -> int:
    size, words = integer(config, "hidden_size_per_layer_input", least=0), integer(config, "vocab_size")
    if size and (own := integer(config, "vocab_size_per_layer_input", 262_144)) != words:
        raise ValueError(f"vocab_size_per_layer_input {own} is not supported; supported: vocab_size, {words}")
    return size


def _optional(config: Json, key: str | None, default: float) -> float:
    """A family's own key; null is the default."""
    return default if key is None else number_unless_zero(config, key, default)


def _is_moe(config: Json, experts: Experts, layer: int) -> bool:
    if experts.layers == "sparse_step":
        step = integer(config, "decoder_sparse_step", 1)
        return layer not in collection(config, "mlp_only_layers", list) and (layer + 1) % step == 0
    return experts.layers == "all" or layer >= integer(config, "first_k_dense_replace", least=0)


def _build_moe(config: Json, experts: Experts) -> Moe:
    others = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config]
    count = experts.count if experts.count in config or not others else others[0]  # files and transformers differ
    num_groups = integer(config, "n_group", 1)
    inner = integer(config, experts.inner)
    has_choice_bias = experts.choice_bias_key is None or flag(config, experts.choice_bias_key)
    return Moe(
        routing=Routing(
            num_experts=integer(config, count),
            top_k=integer(config, experts.top_k),
            num_groups=num_groups,
            top_groups=integer(config, "topk_group", num_groups),
            renormalise=rule(config, experts.renormalise),
            scale=1.0 if experts.scale is None else number(config, experts.scale),
            **experts.routing,
        ),
        inner_size=inner,
        router=experts.router,
        experts=experts.module,
        layout=experts.layout,
        has_biases=experts.has_biases,
        choice_bias=experts.choice_bias if has_choice_bias else None,
        has_wide_router=experts.has_wide_router,
        shared=experts.shared,
        shared_size=_shared_size(config, experts, inner),
        shared_gate=experts.shared_gate,
        expert_scale=experts.expert_scale,
        norms=experts.norms,
    )


def _shared_size(config: Json, experts: Experts, inner: int) -> int:
    """0: there is no shared MLP, or it is the layer's own."""
    if experts.shared_size is not None:
        return integer(config, experts.shared_size)
    return inner * integer(config, "n_shared_experts") if experts.shared and not experts.norms else 0
