"""config.json |-> ModelConfig, by the row of its family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.json_values import Json, collection, flag, integer, number
from engine.models.config import LayerConfig, ModelConfig
from engine.models.families import FAMILIES, Extend, Family, resolve
from engine.models.read_layers import read_ropes, read_windows
from wire.files import named, read_json_object

ACTIVATIONS = {"silu": ("silu",), "gelu_tanh": ("gelu_pytorch_tanh",), "clamped": ("silu",)}  # as files call them
CLAMP = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # the only ones; see ops/base.py

OpenWhole = Callable[[Json], tuple[Json, Extend] | None]
"""A config.json |-> the part that is a language model, and what the rest adds to it; None: it is one itself."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The configs that can be read; engine/catalogue.py has all of them."""

    families: Mapping[str, Family]  # by model_type
    wholes: tuple[str, ...] = ()  # model_types of models with other parts than a language model
    open_whole: OpenWhole = lambda config: None

    @property
    def names(self) -> list[str]:
        return [*self.families, *self.wholes]


PLAIN = Catalogue(FAMILIES)


def has_native_code(folder: Path, catalogue: Catalogue = PLAIN) -> bool:
    """Whether the model_type is a family of Baton's. Raises FileNotFoundError or ValueError like `load_config`."""
    name = read_json_object(path := folder / "config.json").get("model_type")
    if not isinstance(name, str):
        raise ValueError(f"{path}: model_type {name!r:.80} is not the name of a family of models")
    return name in catalogue.names


def load_config(folder: Path, catalogue: Catalogue = PLAIN) -> ModelConfig:
    """Read config.json. FileNotFoundError if it is missing.

    ValueError if it is not JSON or needs something unsupported; names the value and what is supported.
    """
    config = read_json_object(path := folder / "config.json")
    with named(path):
        return build_config(config, catalogue)


def build_config(config: Json, catalogue: Catalogue = PLAIN) -> ModelConfig:
    """Pure twin of `load_config`: the parsed file |-> ModelConfig. Raises the same ValueErrors."""
    config, *added = catalogue.open_whole(config) or (config,)
    name, family = _choose_family(config, catalogue)
    config = {**family.defaults, **config}
    config |= {name: config[own] for own, name in family.renamed.items() if own in config}
    fields = resolve(family.fields, config)
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
    yarn = [int(rope.original_context * rope.factor) for rope in ropes if rope.kind == "yarn"]
    given = {
        "intermediate_size": integer(config, "intermediate_size"),
        "attention_scale": float(head_dim**-0.5),
        "num_kv_heads": num_kv_heads,
        **fields,
    }
    model = ModelConfig(
        family=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        is_tied=flag(config, "tie_word_embeddings") or lacks_head(config, family),
        layers=tuple(map(LayerConfig, windows, rope_of)),
        ropes=ropes,
        # Qwen's recipe for long contexts adds yarn and leaves max_position_embeddings at the original.
        context_tokens=max(trained_context, *yarn, 0),
        quantization=collection(config, "quantization_config", dict) or None,
        **given,
    )
    for extend in (*family.extend, *added):
        model = extend(config, model)
    return model


def _choose_family(config: Json, catalogue: Catalogue) -> tuple[str, Family]:
    name = config.get("model_type")
    if name not in list(catalogue.families):  # `in` a mapping would fail for an unhashable name
        raise ValueError(f"model_type {name!r} is not supported; supported: {', '.join(catalogue.names)}")
    family = catalogue.families[name]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture] and not lacks_head(config, family):
        raise ValueError(f"architectures {architectures} is not supported for {name}; supported: {family.architecture}")
    return name, family


def lacks_head(config: Json, family: Family) -> bool:
    """Whether the checkpoint has no head for tokens, or another one: it makes vectors of texts, or classes."""
    stem = family.architecture.removesuffix("ForCausalLM")
    return config.get("architectures") in ([f"{stem}Model"], [f"{stem}ForSequenceClassification"])


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
