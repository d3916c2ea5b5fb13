"""Tiny folders of models that take images, for tests of text: tokenizer, processor and chat template, no weights.

And images to send.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from tokenizers import Tokenizer

from tests.support.tiny_tokenizer import write_byte_level

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}@{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As of LLaVA 1.5: contents that are texts leave nothing behind
PARTS_TEMPLATE = TEMPLATE.replace("{% if m.content is string %}{{ m.content }}{% else %}", "{% if True %}")
CONTEXT = 4096
QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
IDEFICS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")


class Family(NamedTuple):
    """What differs between families."""

    tokens: Sequence[str]  # for images; the first is what the template writes
    placeholder: str  # in the template
    image_token: str
    pixels: Mapping[str, Any]  # preprocessor_config.json
    processor: Mapping[str, Any] = {}  # processor_config.json
    names: Mapping[str, str] = {}  # of the tokenizer's tokens
    template: str = TEMPLATE


_TILES = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
_CROP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_VISION = "<|vision_start|><|image_pad|><|vision_end|>"
_SOFT = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_SOFT4 = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>")
_NAMES4 = ("boi_token", "image_token", "eoi_token", "video_token", "boa_token", "audio_token", "eoa_token")
FAMILIES = {
    "qwen2_5_vl": Family(QWEN, _VISION, QWEN[0], {"image_processor_type": "Qwen2VLImageProcessor"}),
    "qwen3_vl": Family(QWEN, _VISION, QWEN[0], {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}),
    "gemma3": Family(
        _SOFT, _SOFT[0], _SOFT[1],
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}},
        {"image_seq_length": 16}, {"boi_token": _SOFT[0], "image_token": _SOFT[1], "eoi_token": _SOFT[2]},
    ),
    "gemma4": Family(
        _SOFT4, _SOFT4[1], _SOFT4[1], {"image_processor_type": "Gemma4ImageProcessor"}, {},
        dict(zip(_NAMES4, _SOFT4, strict=True)),
    ),
    "smolvlm": Family(
        IDEFICS, IDEFICS[0], IDEFICS[0], {"image_processor_type": "SmolVLMImageProcessor", **_TILES},
        {"image_seq_len": 4}, {}, PARTS_TEMPLATE,
    ),
    "idefics3": Family(
        IDEFICS, IDEFICS[0], IDEFICS[0], {"image_processor_type": "Idefics3ImageProcessor", **_TILES},
        {"image_seq_len": 4},
    ),
    "llava": Family(
        ("<image>",), "<image>\n", "<image>", {"image_processor_type": "CLIPImageProcessor", **_CROP}, _LLAVA, {},
        PARTS_TEMPLATE,
    ),
    "llava_next": Family(
        ("<image>",), "<image>\n", "<image>",
        {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[56, 112], [112, 56]], **_CROP},
        _LLAVA,
    ),
    "mistral3": Family(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]", "[IMG]",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 140}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
}  # fmt: skip


def write_vision(folder: Path, name: str = "qwen2_5_vl") -> Path:
    """A model of a family of FAMILIES. Its chat template is where processors had theirs."""
    family = FAMILIES[name]
    write_byte_level(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(family.tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"max_position_embeddings": CONTEXT, "vocab_size": tokenizer.get_vocab_size() + 8, "eos_token_id": 1}
    token_id = tokenizer.token_to_id(family.image_token)
    config = {"model_type": name, "vision_config": {}, "image_token_id": token_id, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    named = {
        **json.loads((folder / "tokenizer_config.json").read_text()),
        "pad_token": "<|end|>",
        "extra_special_tokens": dict(family.names),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    template = {"chat_template": family.template.replace("@", family.placeholder)}
    (folder / "chat_template.json").write_text(json.dumps(template))
    (folder / "preprocessor_config.json").write_text(json.dumps(family.pixels))
    if family.processor:
        (folder / "processor_config.json").write_text(json.dumps(family.processor))
    return folder


def picture(color: str = "red", size: tuple[int, int] = (60, 40), kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A file of one colour."""
    file = BytesIO()
    Image.new("RGB", size, color).convert(mode).save(file, kind)
    return file.getvalue()


def data_uri(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
