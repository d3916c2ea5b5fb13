"""Finds what transformers' own code of a model asks of attention, and whether pages can give it.

Found by one forward on the meta device, with neither weights nor memory.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)

from engine.attention.shape import AttentionShape
from engine.fallback.config import FallbackConfig, KeptState
from engine.fallback.hooks import POSITIONS, PROBE, build_cache, find_cache_name, keeps_states, read_kept
from engine.json_values import Json, collection
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.files import INDEX_NAME, SINGLE_NAME
from wire.files import named, read_json_object

ATTENTION_TYPES = {"full_attention", "sliding_attention", "attention", "hybrid"}
LAYER_TYPES = {*ATTENTION_TYPES, "linear_attention", "conv", "moe", "mlp"}
FORGETFUL = ("jamba", "mamba", "falcon_mamba")  # in their code, each chunk of a prompt begins without a state
USED_OPTIONS = {"scaling", "sliding_window", "softcap", "s_aux"}
IDLE_OPTIONS = {  # passed along, without effect on attention: the mask says what is visible, and the probe checks it
    "dropout", "is_causal", "position_ids", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict",
}  # fmt: skip
LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks?)$|_depth$|^depth$")  # counts in any config
MOST_EXPERTS = 1 << 12
ADVICE = "choose another model, or run this one with `transformers serve`"


def refuse(family: object, reason: str, advice: str = ADVICE) -> ValueError:
    """The error of a model that transformers' code cannot run here."""
    return ValueError(f"model_type {family!r} has no native code in Baton, and transformers' cannot be used: {reason}. "
                      f"What to do: {advice}")  # fmt: skip


def probe(folder: Path) -> FallbackConfig:
    """Read config.json and find out what attention must do. Reads no weights.

    FileNotFoundError if it is missing; ValueError says what the model needs that Baton lacks.
    """
    config = read_config(folder)
    with named(folder / "config.json"):
        return probe_config(config)


def read_config(folder: Path) -> PreTrainedConfig:
    """transformers' view of config.json. Raises like `probe`; never runs code of the checkpoint."""
    given = read_json_object(path := folder / "config.json")
    with named(path):
        return _read_config(given, folder)


def _read_config(given: Json, folder: Path) -> PreTrainedConfig:
    family = given.get("model_type")
    if family not in list(CONFIG_MAPPING):  # `in` would fail for an unhashable name
        if "auto_map" in given:
            raise refuse(family, "it needs code from its checkpoint (auto_map), which Baton never runs")
        raise refuse(family, "this version of transformers does not know it", "upgrade transformers")
    if quantised := collection(given, "quantization_config", dict):
        method = quantised.get("quant_method")
        raise refuse(family, f"its weights are quantised ({method})", "use a checkpoint of plain float weights")
    if any((folder / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
        _check_counts(given, len(SafetensorsCheckpoint(folder).entries))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each config class has its own
        raise refuse(family, f"its config.json is refused: {_first_line(error)}", "correct config.json") from error
    return config


def _check_counts(given: object, num_tensors: int) -> None:
    """Layers and experts of any family, by the names that configs have for them: each has a tensor, or a row of one."""
    for key, value in given.items() if isinstance(given, dict) else ():
        most = num_tensors if LAYERS.search(key) else MOST_EXPERTS if "experts" in key else None
        if most is not None and isinstance(value, int) and value > most:
            raise ValueError(f"{key} is {value}, more than {most}: the weights have {num_tensors} tensors")
        _check_counts(value, num_tensors)


def probe_config(config: PreTrainedConfig) -> FallbackConfig:
    """`probe` of a config that is already read. Does not modify it."""
    family, text = config.model_type, config.get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refuse(family, "transformers has no causal language model for it")
    if config.is_encoder_decoder:
        raise refuse(family, "it has an encoder, and its layers attend to the encoder's output")
    if family in FORGETFUL:
        raise refuse(family, "between chunks of a prompt, its layers lose their state")
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if unknown := sorted(set(kinds) - LAYER_TYPES):
        raise refuse(family, f"its layers are of type {', '.join(unknown)}, which need more than pages")
    calls = _Calls(family)
    vocab_size, kept = _run_on_meta(config, calls)
    wanted = sum(kind in ATTENTION_TYPES for kind in kinds) if kept else text.num_hidden_layers
    if len(calls.found) != wanted or not wanted:
        counted = f"{len(calls.found)} of its {text.num_hidden_layers} layers"
        raise refuse(family, f"{counted} use transformers' attention interface; no other attention or state is kept")
    layers = list(calls.found.values())
    _check_windows(family, text, kinds, [layer.window for layer in layers])
    return FallbackConfig(
        family=family,
        vocab_size=vocab_size,
        context_tokens=_find_context(family, text),
        attention_shapes=tuple(layer.shape for layer in layers),
        windows=tuple(layer.window for layer in layers),
        has_sinks=any(layer.has_sinks for layer in layers),
        attention_modules=tuple(calls.found),
        kept_states=kept,
        hidden_size=text.hidden_size,
        depth=text.num_hidden_layers,
    )


def _check_windows(family: str, text: PreTrainedConfig, kinds: Sequence[str], windows: Sequence[int | None]) -> None:
    """A window of the config that no layer passes may be applied elsewhere, as in transformers' cache."""
    passed = [layer for layer, window in enumerate(windows) if window is not None]
    named = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    if kinds and named != passed:
        raise refuse(family, f"layers {passed} pass a window to attention, and layer_types names {named}")
    window = getattr(text, "sliding_window", None)
    if window and not kinds and not passed and getattr(text, "use_sliding_window", True):
        raise refuse(family, f"config.json has sliding_window {window}, but no layer passes it to attention")


def _find_context(family: str, text: PreTrainedConfig) -> int:
    """max_position_embeddings; with longrope no more than the original context, where all steps use its short factors.

    Beyond it, transformers chooses factors by the longest position of a *batch*, so neighbours would change answers.
    "dynamic" scaling changes nothing up to max_position_embeddings.
    """
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise refuse(family, f"max_position_embeddings is {context}", "set it in config.json to the trained context")
    given = getattr(text, "rope_parameters", None) or {}
    ropes = [given, *(value for value in given.values() if isinstance(value, dict))]  # one, or one per layer type
    limits = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(context, *limits) if limits else context


def _run_on_meta(config: PreTrainedConfig, calls: "_Calls") -> tuple[int, tuple[KeptState, ...]]:
    """One forward that fills `calls`. Returns the number of logits of a token, and the states that layers keep."""
    library: Any = AutoModelForCausalLM
    tokens = torch.zeros(1, len(POSITIONS), dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"):
            model = library.from_config(
                copy.deepcopy(config), attn_implementation=PROBE, dtype=torch.bfloat16, trust_remote_code=False
            )
        for name, module in model.named_modules():
            module.baton_attend = partial(calls.record, name)
            if getattr(module, "rope_type", None) == "dynamic":
                module.rope_type = "default"  # the same within the context, and does not compare positions on the host
        with torch.inference_mode():
            text = config.get_text_config(decoder=True)
            cache = build_cache(text) if keeps_states(text) else None
            # with a mask of ones, or a cache, transformers does not look for sequence borders in the positions
            mask = tokens + 1 if cache is None else None
            output = model.eval()(
                input_ids=tokens, position_ids=tokens, attention_mask=mask, use_cache=cache is not None,
                **({} if cache is None else {find_cache_name(model): cache}),
            )  # fmt: skip
    except _Unsupported as error:
        raise refuse(calls.family, str(error)) from error
    except Exception as error:  # transformers' code of any model
        stage = "" if calls.found else " before any layer called transformers' attention interface"
        described = f"{type(error).__name__}: {_first_line(error)}"
        raise refuse(calls.family, f"a trial run without weights failed{stage} ({described})") from error
    return int(output.logits.shape[-1]), read_kept(cache, torch.bfloat16) if cache is not None else ()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class _Unsupported(Exception):  # noqa: N818
    """A layer needs something that attention over pages lacks."""


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: AttentionShape
    window: int | None
    has_sinks: bool


@dataclass
class _Calls:
    """The layers' calls of attention in order."""

    family: str
    found: dict[str, _Layer] = field(default_factory=dict)  # name of the attention module |-> its call

    def record(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        if name in self.found:
            raise _Unsupported(f"{name} calls attention several times")
        unknown = [key for key, given in options.items() if given is not None]
        if unknown := sorted(set(unknown) - USED_OPTIONS - IDLE_OPTIONS):
            raise _Unsupported(f"{name} passes {', '.join(unknown)} to attention")
        num_heads, num_kv_heads, num_tokens = query.shape[1], key.shape[1], query.shape[2]
        if key.shape[2] != num_tokens or num_heads % num_kv_heads or value.shape[1] != num_kv_heads:
            shapes = ", ".join(str(list(part.shape)) for part in (query, key, value))
            raise _Unsupported(f"{name} attends with queries, keys and values of shapes {shapes}")
        window, scale = options.get("sliding_window"), options.get("scaling")
        self._check_mask(name, mask, window)
        shape = AttentionShape(
            num_heads,
            num_kv_heads,
            head_dim=max(key.shape[-1], value.shape[-1]),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=float(options.get("softcap") or 0.0),
        )
        self.found[name] = _Layer(shape, window, options.get("s_aux") is not None)
        return value.new_empty(1, num_tokens, num_heads, value.shape[-1])

    def _check_mask(self, name: str, mask: Tensor | None, window: int | None) -> None:
        """At serving nothing reads the mask, so it must say the same as the window."""
        position = torch.tensor(POSITIONS, device="cpu")
        expected = position <= position[:, None]
        if window is not None:
            expected &= position > position[:, None] - window
        if mask is None or mask.device.type != "cpu" or mask.shape[-2:] != expected.shape:
            raise _Unsupported(f"the mask of {name} cannot be compared with causal attention")
        if not torch.equal(mask[0, 0], expected):
            passed = "passes no window" if window is None else f"passes a window of {window}"
            raise _Unsupported(f"{name} {passed} to attention, but its mask shows other positions")
