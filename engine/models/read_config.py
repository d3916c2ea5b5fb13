"""config.json |-> ModelConfig, by the row of its family."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.json_values import Json, collection, flag, integer, number
from engine.layer_config import Routing
from engine.models.config import LayerConfig, ModelConfig, Moe
from engine.models.families import FAMILIES, ExpertKeys, Family
from engine.models.read_layers import read_axes, read_kv_heads, read_recurrent, read_ropes, read_windows
from engine.models.wholes import DEFAULTS, WHOLES, Whole
from wire.files import named, read_json_object

ACTIVATIONS = {"silu": ("silu",), "gelu_tanh": ("gelu_pytorch_tanh",), "clamped": ("silu",)}  # as files call them
CLAMP = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # the only ones; see ops/base.py
TIED = "tie_word_embeddings"


def has_native_code(folder: Path) -> bool:
    """Whether the model_type is a family of Baton's. Raises FileNotFoundError or ValueError like `load_config`."""
    name = read_json_object(path := folder / "config.json").get("model_type")
    if not isinstance(name, str):
        raise ValueError(f"{path}: model_type {name!r:.80} is not the name of a family of models")
    return name in [*FAMILIES, *WHOLES]


def load_config(folder: Path) -> ModelConfig:
    """Read config.json. FileNotFoundError if it is missing.

    ValueError if it is not JSON or needs something unsupported; names the value and what is supported.
    """
    config = read_json_object(path := folder / "config.json")
    with named(path):
        return build_config(config)


def build_config(config: Json) -> ModelConfig:
    """Pure twin of `load_config`: the parsed file |-> ModelConfig. Raises the same ValueErrors."""
    whole_name = config.get("model_type")
    whole = WHOLES[whole_name] if whole_name in list(WHOLES) else None
    image_token = None
    if whole is not None:
        image_token = _read_image_token(config, whole)
        config = _text_part(config, whole)
    prefix = "" if whole is None else "language_model."
    name, family = _choose_family(config)
    config = {**(DEFAULTS.get(name, {}) if whole else {}), **family.defaults, **config}
    config |= {name: config[own] for own, name in family.renamed.items() if own in config}
    fields = _resolve({**family.fields, **(whole.fields if whole else {})}, config)
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
    if whole is not None:
        ropes = tuple(replace(rope, axes=read_axes(config, whole, rope, head_dim)) for rope in ropes)
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
        "num_kv_heads": num_kv_heads,
        **fields,
    }
    return ModelConfig(
        family=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        is_tied=flag(config, "tie_word_embeddings"),
        layers=read_kv_heads(config, layers) if family.has_varied_layers else layers,
        ropes=ropes,
        # Qwen's recipe for long contexts adds yarn and leaves max_position_embeddings at the original.
        context_tokens=max(trained_context, *yarn, 0),
        recurrent=recurrent,
        moe=moe,
        quantization=collection(config, "quantization_config", dict) or None,
        prefix=f"{prefix}model.",
        head=f"{prefix}lm_head",
        whole=whole_name if whole is not None else None,
        image_token=image_token,
        **given,
    )


def _resolve(fields: Mapping[str, Any], config: Json) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in fields.items()}


def _text_part(config: Json, whole: Whole) -> Json:
    """The language model of a model that has other parts, too. Older files of some have its values beside theirs."""
    text = collection(config, "text_config", dict) or {**config, "model_type": next(iter(whole.families))}
    kind = text.get("model_type", next(iter(whole.families)))
    if kind not in list(whole.families):
        supported = ", ".join(whole.families)
        raise ValueError(f"text_config.model_type {kind!r} is not supported; supported: {supported}")
    if config.get("architectures", [whole.architecture]) != [whole.architecture]:
        raise ValueError(f"architectures {config['architectures']} is not supported; supported: {whole.architecture}")
    given = {"quantization_config": config["quantization_config"]} if "quantization_config" in config else {}
    if tied := [part[TIED] for part in (config, text) if TIED in part]:
        text = {**text, TIED: next(filter(None, tied), tied[-1])}  # either says so
    family = whole.families[kind]
    return {**given, **text, "model_type": family, "architectures": [FAMILIES[family].architecture]}


def _read_image_token(config: Json, whole: Whole) -> int | None:
    if whole.image_token is None:
        return None
    named = [integer(config, key, least=0) for key in ("image_token_id", "image_token_index") if key in config]
    return named[0] if named else whole.image_token


def _choose_family(config: Json) -> tuple[str, Family]:
    name = config.get("model_type")
    if name not in list(FAMILIES):  # `in FAMILIES` would fail for an unhashable name
        raise ValueError(f"model_type {name!r} is not supported; supported: {', '.join([*FAMILIES, *WHOLES])}")
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
    if kinds := collection(config, "mlp_layer_types", list):
        if len(kinds) <= layer:
            raise ValueError(f"mlp_layer_types has {len(kinds)} entries, fewer than num_hidden_layers")
        return bool(kinds[layer] == "sparse")
    return experts.layers == "all" or layer >= integer(config, "first_k_dense_replace", least=0)
