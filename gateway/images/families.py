"""The families of models that take images, and transformers' processors of them. Pure."""

from collections.abc import Mapping
from typing import Any

# family |-> transformers' package and class
PROCESSORS: Mapping[str, tuple[str, str]] = {
    "gemma3": ("gemma3", "Gemma3Processor"),
    "gemma4": ("gemma4", "Gemma4Processor"),
    "idefics3": ("idefics3", "Idefics3Processor"),
    "llava": ("llava", "LlavaProcessor"),
    "llava_next": ("llava_next", "LlavaNextProcessor"),
    "mistral3": ("pixtral", "PixtralProcessor"),
    "pixtral": ("pixtral", "PixtralProcessor"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_5": ("qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_5_moe": ("qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLProcessor"),
    "smolvlm": ("idefics3", "Idefics3Processor"),  # writes the same; SmolVLM's own needs a package for videos
}


def find_family(config: Mapping[str, Any]) -> str | None:
    """The family of the model that a config.json describes; None if it takes no images, or is not supported."""
    vision, kind = config.get("vision_config"), config.get("model_type")
    if not isinstance(vision, Mapping):
        return None
    if kind == "llava" and vision.get("model_type") == "pixtral":
        kind = "pixtral"
    return kind if kind in PROCESSORS else None
