"""config.json |-> ModelConfig, by the row of its family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.json_values import Json, collection, flag, integer, number, read_json
from engine.layers.config import Routing
from engine.models.config import LayerConfig, ModelConfig, Moe
from engine.models.families import FAMILIES, ExpertKeys, Family
from engine.models.read_layers import read_kv_heads, read_recurrent, read_ropes, read_windows
from engine.weights.scheme import read_scheme

ACTIVATIONS = {"silu": ("silu",), "gelu_tanh": ("gelu_pytorch_tanh",), "clamped": ("silu",)}  # as files call them
CLAMP = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # the only ones; see ops/base.py
WHOLE = {family.whole[0]: (name, family.whole[1]) for name, family in FAMILIES.items() if family.whole}


def has_native_code(folder: Path) -> bool:
    """Whether the model_type is a family of Baton's. Raises FileNotFoundError or ValueError like `load_config`."""
    name = read_json(folder / "config.json").get("model_type")
    if not isinstance(name, str):
        raise ValueError(f"model_type {name!r} in config.json is not the name of a family of models")
    return name in [*FAMILIES, *WHOLE]


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
    fields = _resolve({**family.fields, **(family.whole_fields if is_whole else {})}, config)
    _refuse_unsupported(config, family, fields.get("activation", "silu"))
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
    windows = read_windows(config, family, num_layers)
    ropes, rope_of = read_ropes(config, family, windows, trained_context, head_dim)
    moe = _read_moe(config, family.experts) if family.experts else None
    recurrent, has_attention = read_recurrent(config, family, num_layers)
    layers = tuple(
        LayerConfig(
            windows[layer],
            rope_of[layer],
            is_moe=family.experts is not None and moe is not None and _is_moe(config, family.experts, layer),
            has_attention=has_attention[layer],
        )
        for layer in range(num_layers)
    )
    yarn = [int(rope.original_context * rope.factor) for rope in ropes if rope.kind == "yarn"]
    given = {
        "intermediate_size": integer(config, "intermediate_size"),
        "attention_scale": float(head_dim**-0.5),
        **fields,
    }
    return ModelConfig(
        family=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        is_tied=flag(config, "tie_word_embeddings"),
        layers=read_kv_heads(config, layers) if family.has_varied_layers else layers,
        ropes=ropes,
        # Qwen's recipe for long contexts adds yarn and leaves max_position_embeddings at the original.
        context_tokens=max(trained_context, *yarn, 0),
        recurrent=recurrent,
        moe=moe,
        scheme=read_scheme(config),
        prefix=f"{prefix}model.",
        head=f"{prefix}lm_head",
        **given,
    )


def _resolve(fields: Mapping[str, Any], config: Json) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in fields.items()}


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


def _refuse_unsupported(config: Json, family: Family, activation: str) -> None:
    key, supported = family.activation_key, ACTIVATIONS[activation]
    if config.get(key, supported[0]) not in supported:
        raise ValueError(f"{key} {config[key]!r} is not supported; supported: {', '.join(map(repr, supported))}")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # between parts of an image
        raise ValueError("use_bidirectional_attention is not supported; supported: false")
    if activation == "clamped":
        for key, value in CLAMP.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} {config[key]!r} is not supported; supported: {value}")


def _read_moe(config: Json, experts: ExpertKeys) -> Moe | None:
    if experts.enabled and not flag(config, experts.enabled):
        return None
    return Moe(routing=Routing(**_resolve(experts.routing, config)), **_resolve(experts.moe, config))


def _is_moe(config: Json, experts: ExpertKeys, layer: int) -> bool:
    if experts.layers == "sparse_step":
        step = integer(config, "decoder_sparse_step", 1)
        return layer not in collection(config, "mlp_only_layers", list) and (layer + 1) % step == 0
    return experts.layers == "all" or layer >= integer(config, "first_k_dense_replace", least=0)
