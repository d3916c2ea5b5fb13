"""The models with other parts than a language model: which family that part is of, and what images need of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.json_values import Json, collection, integer
from engine.layer_config import RopeConfig
from engine.models.config import ModelConfig
from engine.models.families import Extend, Fields, resolve

# How an image token's time, row and column turn the pairs of a head: each a run of pairs, or in turns.
TIED = "tie_word_embeddings"
Axes = Literal["none", "runs", "turns"]


@dataclass(frozen=True, slots=True)
class Whole:
    """A model whose `text_config` is a language model."""

    architecture: str
    families: Mapping[str, str]  # model_type of text_config |-> the family; the first one if the file does not say
    image_token: int | None = None  # its id where the file does not say; None: Baton gives it no images
    fields: Fields = field(default_factory=dict)  # of config.ModelConfig, beside those of the family
    axes: Axes = "none"
    sections: tuple[int, ...] = ()  # `mrope_section` where the file does not say


def _see_windows(config: Json) -> str:
    return "windows" if config.get("use_bidirectional_attention") == "vision" else "causal"


LLAVA_TEXTS = {name: name for name in ("llama", "mistral", "qwen2")}
WHOLES: Mapping[str, Whole] = {
    "gemma3": Whole(
        "Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}, 262_144,
        {"logits_softcap": 0.0, "image_attention": "all"},
    ),
    "gemma4": Whole(
        "Gemma4ForConditionalGeneration", {"gemma4_text": "gemma4_text"}, 258_880,
        {"image_attention": _see_windows, "pad_token": lambda config: config.get("pad_token_id") or 0},
    ),
    "idefics3": Whole("Idefics3ForConditionalGeneration", {"llama": "llama"}, 128_257),
    "llava": Whole("LlavaForConditionalGeneration", LLAVA_TEXTS, 32_000),
    "llava_next": Whole("LlavaNextForConditionalGeneration", LLAVA_TEXTS, 32_000),
    "mistral3": Whole("Mistral3ForConditionalGeneration", {"mistral": "mistral"}, 10),
    "qwen2_5_vl": Whole(
        "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": "qwen2"}, 151_655, axes="runs",
        sections=(16, 24, 24),
    ),
    "qwen3_5": Whole(
        "Qwen3_5ForConditionalGeneration", {"qwen3_5_text": "qwen3_5_text"}, 248_056, axes="turns",
        sections=(11, 11, 10),
    ),
    "qwen3_5_moe": Whole(
        "Qwen3_5MoeForConditionalGeneration", {"qwen3_5_moe_text": "qwen3_5_moe_text"}, 248_056, axes="turns",
        sections=(11, 11, 10),
    ),
    "qwen3_vl": Whole(
        "Qwen3VLForConditionalGeneration", {"qwen3_vl_text": "qwen3"}, 151_655, axes="turns", sections=(24, 20, 20)
    ),
    "smolvlm": Whole("SmolVLMForConditionalGeneration", {"llama": "llama"}, 128_257),
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # family |-> what such files leave out of text_config
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
}  # fmt: skip


def find_axes(how: Axes, sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
    """Pairs for time, rows and columns |-> which of the three turns each pair of a head; empty: one position does.

    ValueError if they are not those of such a head.
    """
    if how == "none":
        return ()
    if len(sections) != 3 or not all(isinstance(one, int) and one >= 0 for one in sections):
        raise ValueError(f"mrope_section {sections} is not supported; supported: three numbers of pairs")
    runs = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    if len(runs) != num_pairs:
        raise ValueError(f"mrope_section {sections} does not add up to the {num_pairs} pairs of a head")
    if how == "runs":
        return runs
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))


def open_whole(config: Json) -> tuple[Json, Extend] | None:
    """See `read_config.OpenWhole`."""
    name = config.get("model_type")
    if name not in list(WHOLES):
        return None
    whole, image_token = WHOLES[name], _read_image_token(config, WHOLES[name])

    def add_parts(text: Json, model: ModelConfig) -> ModelConfig:
        """text: of the language model."""
        ropes = (replace(rope, axes=_read_axes(text, whole, rope, model.head_dim)) for rope in model.ropes)
        return replace(
            model, ropes=tuple(ropes), prefix="language_model.model.", head="language_model.lm_head", whole=name,
            image_token=image_token, **resolve(whole.fields, text),
        )  # fmt: skip

    return _text_part(config, whole), add_parts


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
    others = {key: value for key, value in {**given, **text}.items() if key != "architectures"}
    return {**DEFAULTS.get(family, {}), **others, "model_type": family}


def _read_image_token(config: Json, whole: Whole) -> int | None:
    if whole.image_token is None:
        return None
    named = [integer(config, key, least=0) for key in ("image_token_id", "image_token_index") if key in config]
    return named[0] if named else whole.image_token


def _read_axes(config: Json, whole: Whole, rope: RopeConfig, head_dim: int) -> tuple[int, ...]:
    """See `RopeConfig.axes`."""
    given = collection(config, "rope_scaling", dict) or collection(config, "rope_parameters", dict)
    sections = collection(given, "mrope_section", list) or whole.sections
    return find_axes(whole.axes, sections, (rope.rotated_dims or head_dim) // 2)
