"""Writes small random checkpoints, optionally with a tokenizer, that transformers and Baton both load.

Weights are scaled so that logits spread over several units, which avoids near-ties between greedy tokens. Norms and
biases are random too, so leaving one out changes the result.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}  # fmt: skip
SPECIAL_TOKENS = ["<|begin|>", "<|stop|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
BOS_ID, EOS_ID = 0, 1  # the first two
MIN_VOCAB = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LOGIT_SPREAD = 4.0  # standard deviation of the logits


def write_checkpoint(
    folder: Path, family: str, *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 64, hidden: int = 128,
    intermediate: int | None = None, layers: int = 2, vocab: int = 320, tied: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.float32, shards: int = 1, rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None, sliding_window: int | None = None, max_window_layers: int = 1,
    attention_bias: bool = False, mlp_bias: bool = False, context: int = 2048,
) -> Path:  # fmt: skip
    """Write config.json, generation_config.json and at least `shards` safetensors files into `folder`; return it."""
    config_class, model_class = FAMILIES[family]
    extra: dict[str, Any] = {}
    if family == "mistral":
        extra = {"sliding_window": sliding_window}
    elif family in ("qwen2", "qwen3"):
        extra = {"use_sliding_window": sliding_window is not None, "sliding_window": sliding_window}
        extra["max_window_layers"] = max_window_layers
    elif sliding_window is not None:
        raise ValueError(f"{family} has no sliding window")
    if family in ("llama", "qwen3"):
        extra["attention_bias"] = attention_bias
    if family == "llama":
        extra["mlp_bias"] = mlp_bias
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        **extra,
    )
    model = model_class(config)
    randomise(model, seed)
    model.to(dtype)
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=math.ceil(size_bytes / shards) if shards > 1 else "50GB")
    return folder


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter, whatever its dtype, with seeded random values of useful size."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.3 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        else:
            is_vocab = "embed_tokens" in name or "lm_head" in name
            values *= (LOGIT_SPREAD if is_vocab else 1.5) / math.sqrt(parameter.shape[1])
        parameter.data.copy_(values)


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """Write a byte-level tokenizer of exactly `vocab` ids (at least MIN_VOCAB) with a chat template; return folder."""
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab {vocab} is below {MIN_VOCAB}, the specials and 256 bytes")
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"~{index:06x}" for index in range(len(pieces), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[EOS_ID],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    return folder


def write_slow_twin(original: Path, folder: Path, num_layers: int) -> Path:
    """Write `original` with extra layers that add nothing: the same logits, more slowly."""
    shutil.copytree(original, folder, dirs_exist_ok=True)
    config = json.loads((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    for layer in range(config["num_hidden_layers"], num_layers):
        for name, tensor in first.items():
            is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
            copied = torch.zeros_like(tensor) if is_last else tensor.clone()
            tensors[name.replace(".0.", f".{layer}.", 1)] = copied
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    return folder
