"""Draft heads: EAGLE-3 checkpoints, and a model's own layers that predict several tokens ahead (MTP).

Both become a ModelConfig of one layer and the names that its table has for the tensors. Imports no torch.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.fallback.config import FallbackConfig
from engine.heads.config import DraftHead
from engine.heads.read_medusa import is_medusa, read_medusa
from engine.json_values import collection, flag, integer
from engine.models.config import LayerConfig, ModelConfig
from engine.models.families import FAMILIES
from engine.models.read_config import build_config
from wire.files import named, read_json_object

UNUSED = ("t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight")  # d2t is read by itself
FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class MtpNames(NamedTuple):
    """Where a family's checkpoints have their MTP layer."""

    prefix: str  # {}: the number of layers before it
    num_layers_key: str
    renamed: Mapping[str, str]  # there |-> here; everything else is of the layer, or below `layer`
    layer: str = ""


GLM = {
    "enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "fc", "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
}  # fmt: skip
QWEN = {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "fc", "norm": "norm"}
MTP: dict[str, MtpNames] = {
    **dict.fromkeys(
        ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2"),
        MtpNames("model.layers.{}.", "num_nextn_predict_layers", GLM),
    ),
    "qwen3_5_text": MtpNames("mtp.", "mtp_num_hidden_layers", QWEN, "layers.0."),
    "qwen3_5_moe_text": MtpNames("mtp.", "mtp_num_hidden_layers", QWEN, "layers.0."),
}


def is_draft_head(folder: Path) -> bool:
    """Whether the checkpoint is a head and no model, as far as its config.json shows. ValueError: it is no JSON."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json_object(path := folder / "config.json")
    with named(path):
        is_eagle3 = any("eagle3" in str(name).lower() for name in collection(config, "architectures", list))
    return "speculators_model_type" in config or is_eagle3 or is_medusa(folder)


def read_head(folder: Path, model: ModelConfig | FallbackConfig, *, is_mtp: bool) -> ModelConfig:
    """An MTP layer of the model's own folder, or heads of a checkpoint. ValueError says what is not supported."""
    with named(folder / "config.json"):
        if not is_mtp and is_medusa(folder):
            return read_medusa(folder, model)
        return read_mtp(folder, model) if is_mtp else read_eagle3(folder, model)


def read_eagle3(folder: Path, model: ModelConfig | FallbackConfig) -> ModelConfig:
    """config.json of a head for a model, in SpecForge's form or that of `speculators`.

    ValueError names what is not supported.
    """
    config = read_json_object(folder / "config.json")
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"speculators_model_type {kind!r} is not supported; supported: eagle3")
    layer = {**(collection(config, "transformer_layer_config", dict) or config)}
    options = {**collection(config, "eagle_config", dict), **config}
    if not flag({"use_aux_hidden_state": True, **options}, "use_aux_hidden_state"):
        raise ValueError("use_aux_hidden_state false is not supported; supported: true")
    if flag(options, "parallel_drafting"):
        raise ValueError("parallel_drafting true is not supported; supported: false")
    if (own := integer(layer, "num_hidden_layers", 1)) != 1:
        raise ValueError(f"num_hidden_layers {own} of a draft head is not supported; supported: 1")
    family = layer.get("model_type", "llama")
    if family not in ("llama", "qwen3"):
        raise ValueError(f"model_type {family!r} of a draft head is not supported; supported: llama, qwen3")
    layer |= {"model_type": family, "architectures": [FAMILIES[family].architecture], "num_hidden_layers": 1}
    for key in ("layer_types", "quantization_config"):
        layer.pop(key, None)
    decoder = build_config(layer)
    tap_size = integer(options, "target_hidden_size", decoder.hidden_size)
    if tap_size != model.hidden_size:
        raise ValueError(f"it is made for a hidden_size of {tap_size}, the model's is {model.hidden_size}")
    num_layers = model.num_layers if isinstance(model, ModelConfig) else model.depth
    taps = collection(options, AUX_LAYERS, list) or [2, num_layers // 2, num_layers - 3]
    if not all(isinstance(tap, int) and 0 <= tap < num_layers for tap in taps) or taps != sorted(set(taps)):
        raise ValueError(f"{AUX_LAYERS} is {taps}; expected ascending layers of the model, which has {num_layers}")
    return replace(
        decoder,
        context_tokens=model.context_tokens,  # positions only turn: what was trained for less goes on beyond it
        prefix="",
        is_tied=False,
        layers=(replace(decoder.layers[0], window=None),),
        draft_head=DraftHead(
            "eagle3",
            tuple(taps),
            tap_size,
            integer(options, "draft_vocab_size", decoder.vocab_size),
            **{name: flag(options, name) for name in FLAGS},
        ),
    )


def name_eagle3(entries: Collection[str]) -> dict[str, str]:
    """Names of the head's table |-> in its checkpoint."""
    found = dict[str, str]()
    for theirs in entries:
        name = re.sub("^midlayer\\.", "layers.0.", theirs.removeprefix("model."))
        if name not in UNUSED:
            found["hidden_norm.weight" if name == "layers.0.hidden_norm.weight" else name] = theirs
    return found


def read_mtp(folder: Path, model: ModelConfig | FallbackConfig) -> ModelConfig:
    """The first MTP layer of a model. ValueError if it has none that is supported."""
    names = MTP.get(model.family)
    if names is None or isinstance(model, FallbackConfig):
        raise ValueError(f"MTP layers of {model.family} are not supported; supported: {', '.join(MTP)}")
    config = read_json_object(folder / "config.json")
    if not integer(collection(config, "text_config", dict) or config, names.num_layers_key, 0, least=0):
        raise ValueError(f"the model has no MTP layer: its {names.num_layers_key} is 0 or not there")
    return replace(
        model,
        num_layers=1,
        layers=(LayerConfig(is_moe=model.moe is not None),),
        recurrent=None,
        prefix="",
        head="lm_head",
        is_tied=False,
        draft_head=DraftHead(
            "mtp", (model.num_layers,), model.hidden_size, model.vocab_size, norm_output=names.layer != ""
        ),
    )


def name_mtp(model: ModelConfig, entries: Collection[str]) -> dict[str, str]:
    """Names of the MTP layer's table |-> in the model's checkpoint. The embedding's copy is left out."""
    own, found = MTP[model.family], dict[str, str]()
    prefix = own.prefix.format(model.num_layers)
    for name in entries:
        rest = name.removeprefix(prefix)
        if not name.startswith(prefix) or rest.startswith("embed_tokens."):
            continue
        here = next(
            (f"{new}{rest[len(old) :]}" for old, new in own.renamed.items() if rest.startswith(f"{old}.")), None
        )
        found[here or f"layers.0.{rest.removeprefix(own.layer)}"] = name
    return found
