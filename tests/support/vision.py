"""Images to send, and a model without weights that takes them, for tests of text. See also checkpoints_vision.py."""

import base64
import json
from io import BytesIO
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer

from tests.support.tiny_tokenizer import write_byte_level

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 4096
TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]


def write_vision(folder: Path) -> Path:
    """Of the family qwen2_5_vl. Its chat template is where processors had theirs."""
    write_byte_level(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"max_position_embeddings": CONTEXT, "vocab_size": tokenizer.get_vocab_size() + 8, "eos_token_id": 1}
    config = {
        "model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": tokenizer.token_to_id(TOKENS[0]),
        "text_config": text,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    named = {**json.loads((folder / "tokenizer_config.json").read_text()), "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    return folder


def picture(color: str = "red", size: tuple[int, int] = (60, 40), kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A file of one colour."""
    file = BytesIO()
    Image.new("RGB", size, color).convert(mode).save(file, kind)
    return file.getvalue()


def data_uri(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
