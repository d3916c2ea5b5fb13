"""Tiny checkpoint folders for tests of text: a tokenizer, a chat template and a config, no weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = (  # prints everything in a conversation and its tools
    "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' and loop.first %}{{ raise_exception('a tool message must follow a call') }}{% endif %}"
    "{% if m.name == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.name }}{{ m.tool_call_id }}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Like Qwen 3: reasoning is possible, or switched off by an empty block. `opens_thinking` begins it in the prompt, as
# DeepSeek R1 does. Includes past reasoning; writes calls like Hermes.
THINKING_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}\nWrite calls so: "
    '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|end|>{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens_thinking %}<think>\n{% endif %}"
    "{% if reasoning_effort == 'max' %}[max]{% endif %}"
    "{% endif %}"
)
SPECIAL = ["<|start|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "how are you today? I am fine",
    "stop here now END",
]
END = SPECIAL.index("<|end|>")  # its id
CONTEXT = 512


def byte_token(char: str) -> int:
    """The byte-level tokenizer's id of a single letter."""
    return len(SPECIAL) + ord(char) - ord("!")


def write_byte_level(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Byte-level BPE like GPT-2's, with control tokens and one added plain token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=361, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(["<think now>"])
    return _write(folder, tokenizer, config or {})


def write_thinking(folder: Path, *, has_control_markers: bool = False) -> Path:
    """The same for a reasoning model; its markers are single tokens, plain as Qwen's or control tokens as Mistral's."""
    write_byte_level(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = ["<think>", "</think>"]
    _ = tokenizer.add_special_tokens(markers) if has_control_markers else tokenizer.add_tokens(markers)
    return _write(folder, tokenizer, {}, THINKING_TEMPLATE)


def write_family(
    folder: Path,
    template: str,
    markers: Sequence[str] = (),
    end: str = "<|end|>",
    tokens: Sequence[str] = (),
    context: int = CONTEXT,
) -> Path:
    """The same with another template, its markers as control tokens, another end token, and other tokens."""
    write_byte_level(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(markers))
    tokenizer.add_tokens(list(tokens))
    config = {"eos_token_id": tokenizer.token_to_id(end), "max_position_embeddings": context}
    return _write(folder, tokenizer, config, template, end)


def write_system_first(folder: Path) -> Path:
    """The same whose template, like Qwen 3.5's, refuses the system's messages but for the first."""
    tokenizer = Tokenizer.from_file(str(write_byte_level(folder) / "tokenizer.json"))
    refuse = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('the system comes first') }}{% endif %}{% endfor %}"
    )
    return _write(folder, tokenizer, {}, refuse + CHAT_TEMPLATE)


def write_sentencepiece(folder: Path) -> Path:
    """BPE with byte fallback like Llama 2's: a start token, and a space put before the text and stripped afterwards."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", *SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special + pieces, show_progress=False)
    tokenizer.train_from_iterator([f"▁{line.replace(' ', '▁')}" for line in CORPUS * 3], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in pieces]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    start = tokenizer.token_to_id("<|start|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", start)]
    )
    return _write(folder, tokenizer, {})


def _write(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], chat_template: str = CHAT_TEMPLATE, end: str = "<|end|>"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": end,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    # Embeddings are often padded beyond the tokenizer, so some ids have no token.
    defaults = {"model_type": "llama", "max_position_embeddings": CONTEXT, "vocab_size": tokenizer.get_vocab_size() + 8}
    (folder / "config.json").write_text(json.dumps({**defaults, "eos_token_id": 1, **config}))
    return folder
