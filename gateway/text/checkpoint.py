"""Reads a model's limits, sampling defaults and example prompts from its checkpoint folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.sampling import SamplingParams

# Prompts for the page, of which each model that follows instructions can answer some. A folder may bring its own.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
_DEFAULT_CONTEXTS = {"gemma3_text": 131_072}  # of files that leave it out
_EXAMPLES = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me three names for a small grey cat.",
)
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # in generation_config.json


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Limits and defaults of one model."""

    vocab_size: int | None  # rows of the embedding; None: not in config.json
    context_tokens: int  # most tokens in prompt and answer together
    eos_token_ids: frozenset[int]
    defaults: SamplingParams  # for parameters that a request does not set
    examples: tuple[str, ...]  # prompts that it can answer


def read_model_facts(folder: Path) -> ModelFacts:
    """Reads config.json and, if present, generation_config.json and examples.json, a list of prompts.

    Raises ValueError saying what is wrong.
    """
    config = _read_object(folder / "config.json")
    text_config = config.get("text_config") or config  # multimodal checkpoints nest the language model
    generation = _read_object(folder / "generation_config.json")
    context = next((text_config[key] for key in _CONTEXT_KEYS if key in text_config), None)
    context = context or _DEFAULT_CONTEXTS.get(str(text_config.get("model_type")))
    if not isinstance(context, int) or context < 2:
        raise ValueError(f"{folder / 'config.json'} must give max_position_embeddings as an integer of at least 2")
    context = max(context, _yarn_context(text_config))
    eos = generation.get("eos_token_id", text_config.get("eos_token_id"))
    eos_ids = frozenset[int]() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)
    defaults = SamplingParams(**{name: generation[name] for name in _DEFAULTED if generation.get(name) is not None})
    path = folder / "examples.json"
    examples = json.loads(path.read_text(encoding="utf-8")) if path.exists() else _EXAMPLES
    if not all(isinstance(one, str) for one in examples):
        raise ValueError(f"{path} must hold a list of texts")
    return ModelFacts(text_config.get("vocab_size"), context, eos_ids, defaults, tuple(examples))


def _yarn_context(config: Mapping[str, Any]) -> int:
    """The context with yarn, 0 without it. Recipes that add yarn leave max_position_embeddings at the original."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return 0
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = rope.get("factor")
    is_sane = isinstance(original, int) and isinstance(factor, int | float) and 0 < factor < 2**53
    return int(original * factor) if is_sane else 0  # the workers report the error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
