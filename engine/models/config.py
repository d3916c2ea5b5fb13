"""A checkpoint's config.json as one frozen value. Families are data; nothing here touches a tensor."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.attention.shape import AttentionShape
from engine.layers.rope_config import ROPE_KINDS, RopeConfig, yarn_attention_factor
from wire.kv_layout import KvPart

Json = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from Llama, and the meaning of absent keys in its config.json.

    A bias is True, False, or the config key that decides.
    """

    architecture: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norm: bool = False  # RMSNorm over each head of query and key
    windows: str = "none"  # "none", "all" layers, or "by_layer" (use_sliding_window, max_window_layers, layer_types)
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Family("MistralForCausalLM", windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="by_layer"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "attention_bias",
        "attention_bias",
        has_qk_norm=True,
        windows="by_layer",
        default_head_dim=128,
    ),
}
DEFAULT_WINDOW_TOKENS = 4096  # the default of `sliding_window` in Mistral and Qwen configs
DEFAULT_MAX_WINDOW_LAYERS = 28  # the default of Qwen's `max_window_layers`
DEFAULT_THETA = 10000.0
NULL_IS_ABSENT = {"head_dim", "num_key_value_heads", "factor", "attention_factor"}  # as in transformers
NEEDED_BY_ROPE = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}  # kind |-> keys
LARGEST = 2**53  # far beyond any model; integers up to it are exact as floats


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Built by `load_config`; immutable."""

    family: str  # a key of FAMILIES
    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # I
    num_layers: int  # L
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv, divides Hq
    head_dim: int  # D
    rms_eps: float
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool  # lm_head shares the embedding
    windows: tuple[int | None, ...]  # L values: tokens a query sees, itself included; None is all of them
    rope: RopeConfig
    context_tokens: int  # most in a sequence

    @property
    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """L values."""
        shape = AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)
        return (shape,) * self.num_layers

    @property
    def kv_parts(self) -> tuple[KvPart, ...]:
        """Layers with equal shapes are one part, in the order of their first layers."""
        return tuple(
            KvPart(count, shape.num_kv_heads, shape.head_dim) for shape, count in Counter(self.attention_shapes).items()
        )


def load_config(folder: Path) -> ModelConfig:
    """Read config.json. FileNotFoundError if it is missing.

    ValueError if it is not JSON or needs something unsupported; names the value and what is supported.
    """
    return build_config(_read_json(folder / "config.json"))


def build_config(config: Json) -> ModelConfig:
    """Pure twin of `load_config`: the parsed file |-> ModelConfig. Raises the same ValueErrors."""
    name, family = _choose_family(config)
    _refuse_unsupported(config)
    num_layers = _integer(config, "num_hidden_layers")
    num_heads = _integer(config, "num_attention_heads")
    num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
    hidden_size = _integer(config, "hidden_size")
    head_dim = _integer(config, "head_dim", family.default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
    trained_context = _integer(config, "max_position_embeddings")
    rope = _build_rope(config, trained_context)
    return ModelConfig(
        family=name,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        has_qkv_bias=_bias(config, family.qkv_bias),
        has_output_bias=_bias(config, family.output_bias),
        has_mlp_bias=_bias(config, family.mlp_bias),
        has_qk_norm=family.has_qk_norm,
        is_tied=_flag(config, "tie_word_embeddings"),
        windows=_build_windows(config, family, num_layers),
        rope=rope,
        # Qwen's recipe for long contexts adds yarn and leaves max_position_embeddings at the original.
        context_tokens=max(trained_context, int(rope.original_context * rope.factor) if rope.kind == "yarn" else 0),
    )


def _choose_family(config: Json) -> tuple[str, Family]:
    name = config.get("model_type")
    if name not in list(FAMILIES):  # `in FAMILIES` would fail for an unhashable name
        raise ValueError(f"model_type {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise ValueError(f"architectures {architectures} is not supported for {name}; supported: {family.architecture}")
    return name, family


def _refuse_unsupported(config: Json) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; supported: 'silu'")
    if quantization := _collection(config, "quantization_config", dict):
        method = quantization.get("quant_method")
        raise ValueError(f"quantization_config ({method!r}) is not supported; supported: plain float weights")


def _build_windows(config: Json, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * num_layers
    is_sliding = family.windows == "all" or _flag(config, "use_sliding_window")
    is_sliding = is_sliding and config.get("sliding_window", DEFAULT_WINDOW_TOKENS) is not None
    window = _integer(config, "sliding_window", DEFAULT_WINDOW_TOKENS) if is_sliding else None
    if family.windows == "all":
        return (window,) * num_layers
    first_sliding = _integer(config, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
    kinds = _collection(config, "layer_types", list) or [
        "sliding_attention" if window is not None and layer >= first_sliding else "full_attention"
        for layer in range(num_layers)
    ]
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise ValueError(f"layer_types {unknown} not supported; supported: full_attention, sliding_attention")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("layer_types asks for sliding_attention, but use_sliding_window and sliding_window do not")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _build_rope(config: Json, trained_context: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), else `rope_scaling` beside `rope_theta`, else the default."""
    given = _collection(config, "rope_scaling", dict) or _collection(config, "rope_parameters", dict)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"rope_parameters per layer type ({', '.join(given)}) are not supported; supported: one rope")
    rotary = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {rotary} is not supported; supported: 1.0")
    theta = _number(given if "rope_theta" in given else config, "rope_theta", DEFAULT_THETA, above=1)
    if kind == "default":
        return RopeConfig(kind, theta)
    for key in NEEDED_BY_ROPE.get(kind, []):
        if given.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs a `{key}`")
    if kind == "linear":
        return RopeConfig(kind, theta, _number(given, "factor"))
    original_key = "original_max_position_embeddings"
    original = _integer(config if original_key in config else given, original_key, trained_context)
    factor = _number(given, "factor", trained_context / original)
    if kind == "llama3":
        low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    mscales = _number_unless_zero(given, "mscale", 0.0), _number_unless_zero(given, "mscale_all_dim", 0.0)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=_number_unless_zero(given, "beta_fast", 32.0),
        beta_slow=_number_unless_zero(given, "beta_slow", 1.0),
        truncate=_flag(given, "truncate", True),
        attention_factor=_number(given, "attention_factor", yarn_attention_factor(factor, *mscales)),
    )


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _integer(config: Json, key: str, default: int | None = None, least: int = 1) -> int:
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise ValueError(f"config.json: {key} must be an integer from {least} to 2**53, not {value!r}")
    return value


def _number(config: Json, key: str, default: float | None = None, above: float = 0) -> float:
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= LARGEST:
        raise ValueError(f"config.json: {key} must be a number above {above} and at most 2**53, not {value!r}")
    return float(value)


def _number_unless_zero(config: Json, key: str, default: float) -> float:
    """Yarn's finer settings: 0 and null mean the default."""
    return _number(config, key) if config.get(key) else default


def _value(config: Json, key: str, default: object) -> Any:
    value = config.get(key, default)
    return default if value is None and key in NULL_IS_ABSENT else value


def _flag(config: Json, key: str, default: bool = False) -> bool:
    """Null is false."""
    value = config.get(key, default)
    if not isinstance(value, bool | None):
        raise ValueError(f"config.json: {key} must be true or false, not {value!r}")
    return bool(value)


def _collection(config: Json, key: str, kind: type[T]) -> T:
    """An object or a list, empty when it is null or absent."""
    value = config.get(key) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"config.json: {key} must be {'a list' if kind is list else 'an object'}, not {value!r}")
    return value


def _bias(config: Json, rule: bool | str) -> bool:
    return rule if isinstance(rule, bool) else _flag(config, rule)
