"""Tiny checkpoints that take images, as transformers and Baton both load them: weights, tokenizer, image processor."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers

from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.families import VOCAB

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'PLACEHOLDER' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")  # with the ids of families.py
IDEFICS_TOKENS = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)  # fmt: skip
PARTS_TEMPLATE = TEMPLATE.replace(  # as of LLaVA 1.5: contents that are texts leave nothing behind
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}", "{% if true %}"
)
PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


@dataclass(frozen=True, slots=True)
class Vision:
    """How a family's images are read. Classes are names of transformers."""

    image_processor: str
    settings: Mapping[str, Any]  # of it
    processor: str
    tokens: tuple[str, ...]  # the image token, then others
    named: Mapping[str, str] = field(default_factory=dict)  # attributes of the tokenizer
    placeholder: str = ""  # in a chat, if it is not the image token
    template: str = TEMPLATE
    processor_settings: Mapping[str, Any] = field(default_factory=dict)


def _qwen(processor: str, pixels: int) -> Vision:
    settings = dict(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": pixels})
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    return Vision("Qwen2VLImageProcessorPil", settings, processor, QWEN_TOKENS, placeholder=placeholder)


def _idefics(kind: str, **named: str) -> Vision:
    settings = dict(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return Vision(
        f"{kind}ImageProcessorPil", settings, f"{kind}Processor", IDEFICS_TOKENS, named,
        processor_settings={"image_seq_len": 4}, template=PARTS_TEMPLATE,
    )  # fmt: skip


def _llava(kind: str, **settings: Any) -> Vision:
    size = dict(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    chosen = dict(patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    image_processor = "LlavaNextImageProcessorPil" if settings else "CLIPImageProcessorPil"
    return Vision(image_processor, size | settings, f"{kind}Processor", ("<image>",), processor_settings=chosen,
        template=TEMPLATE if settings else PARTS_TEMPLATE,
    )  # fmt: skip


GEMMA4 = Vision(
    "Gemma4ImageProcessorPil", dict(patch_size=4, max_soft_tokens=70), "Gemma4Processor",
    ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
    dict(
        image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>", video_token="<|video|>",
        audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>",
    ),
)  # fmt: skip
VISIONS: dict[str, Vision] = {
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", 1280),
    "qwen3_vl": _qwen("Qwen3VLProcessor", 1280),
    "qwen3_5": _qwen("Qwen3VLProcessor", 1280),
    "gemma3": Vision(
        "Gemma3ImageProcessorPil", dict(size={"height": 32, "width": 32}), "Gemma3Processor",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        dict(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"),
        "<start_of_image>", processor_settings={"image_seq_length": 16},
    ),
    "gemma4_e2b": GEMMA4,
    "gemma4_12b": GEMMA4,
    "smolvlm": _idefics("SmolVLM"),
    "idefics3": _idefics("Idefics3"),
    "llava": _llava("Llava"),
    "llava_next": _llava("LlavaNext", image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]]),
    "mistral3": Vision(
        "PixtralImageProcessorPil", dict(patch_size=4, size={"longest_edge": 32}), "PixtralProcessor", PIXTRAL_TOKENS,
        processor_settings={"patch_size": 4, "spatial_merge_size": 2},
    ),
    "pixtral": Vision(
        "PixtralImageProcessorPil", dict(patch_size=4, size={"longest_edge": 32}), "PixtralProcessor", PIXTRAL_TOKENS,
        processor_settings={"patch_size": 4},
    ),
}  # fmt: skip


def write_vlm_checkpoint(folder: Path, family: str, **shape: Any) -> Path:
    """A key of VISIONS; shape: see `write_checkpoint`. Images of 28 to 64 pixels a side become 4 to 70 tokens."""
    return write_reading(write_checkpoint(folder, family, **shape), family)


def write_reading(folder: Path, family: str) -> Path:
    """What turns texts and images into tokens, beside a config.json."""
    kind = VISIONS[family]
    placeholder = kind.placeholder or kind.tokens[0]
    write_tokenizer(folder, VOCAB, kind.tokens, kind.template.replace("PLACEHOLDER", placeholder), **kind.named)
    getattr(transformers, kind.image_processor)(**kind.settings).save_pretrained(folder)
    described = {"processor_class": kind.processor, **kind.processor_settings}
    (folder / "processor_config.json").write_text(json.dumps(described))
    return folder


def leave_out_torchvision() -> None:
    """Pixtral's processor takes a function from a module that needs it, of which this is the twin."""
    twin = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    sys.modules["transformers.models.pixtral.image_processing_pixtral"] = twin
