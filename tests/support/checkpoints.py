"""Writes small random checkpoints, optionally with a tokenizer, that transformers and Baton both load.

Weights are scaled so that logits spread over several units, which avoids near-ties between greedy tokens. Norms and
biases are random too, so leaving one out changes the result.
"""

import copy
import itertools
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.families import FAMILIES, VOCAB, Family

SPECIAL_TOKENS = ["<|begin|>", "<|stop|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
BOS_ID, EOS_ID = 0, 1  # the first two
MIN_VOCAB = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROW_NORM = re.compile(r"(?<!q_)(?<!k_)norm(_\d)?\.weight$")


def write_checkpoint(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **shape: Any
) -> Path:
    """Write config.json, generation_config.json and at least `shards` safetensors files into `folder`; return it.

    shape: of `tiny_config`.
    """
    kind = FAMILIES[family]
    model = getattr(transformers, kind.model)(tiny_config(family, **shape))
    randomise(model, seed, kind)
    if dtype != torch.float32:
        model.to(dtype)
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=math.ceil(size_bytes / shards) if shards > 1 else "50GB")
    return folder


def write_config(folder: Path, family: str, **shape: Any) -> Path:
    """Write config.json alone."""
    tiny_config(family, **shape).save_pretrained(folder)
    return folder


def tiny_config(
    family: str, *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int | None = None, hidden: int = 128,
    intermediate: int | None = None, layers: int | None = None, vocab: int = VOCAB, tied: bool | None = None,
    rope_theta: float = 10000.0, rope_scaling: dict[str, Any] | None = None, context: int = 2048, **extra: Any,
) -> Any:  # fmt: skip
    """transformers' config. None: the family's own value. extra: config values, in place of the family's.

    rope_theta and rope_scaling count only for families without `rope_parameters` of their own.
    """
    kind = FAMILIES[family]
    is_tied = kind.is_tied if tied is None else tied
    common = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers or kind.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim or kind.head_dim,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=is_tied,
        rope_parameters={"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta},
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    config = build_config(kind, common, extra)
    if kind.whole_config:
        whole_class = getattr(transformers, kind.whole_config)
        config = whole_class(text_config=config, tie_word_embeddings=is_tied, **kind.whole_extra)
    return config


def build_config(kind: Family, common: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """The text part's config. ValueError for a value that the family does not have."""
    config_class = getattr(transformers, kind.config)
    for key in extra:
        if not hasattr(config_class, key):
            raise ValueError(f"{kind.config} has no {key}")
    values = {**common, **copy.deepcopy(dict(kind.extra)), **extra}  # a config may write into lists
    if hasattr(config_class, "use_sliding_window"):
        values["use_sliding_window"] = values.get("sliding_window") is not None
    return config_class(**values)


def randomise(model: torch.nn.Module, seed: int, kind: Family) -> None:
    """Overwrite every tensor of the checkpoint, whatever its dtype, with seeded random values of useful size."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    for name, tensor in itertools.chain(model.named_parameters(), buffers):
        values = torch.randn(tensor.shape, generator=generator)
        if ROW_NORM.search(name):
            values = kind.norm_gain * (1.0 + 0.3 * values)
        elif name.endswith(("norm.weight", "scale", "scalar")):
            values = 1.0 + 0.3 * values
        elif name.endswith(("bias", "sinks")):
            values = 0.3 * values
        else:
            is_vocab = "embed_tokens" in name or "lm_head" in name
            values *= (kind.logit_spread if is_vocab else 1.5) / math.sqrt(tensor.shape[-1])
        tensor.data.copy_(values)


def write_tokenizer(
    folder: Path, vocab: int, more_special: Sequence[str] = (), template: str = CHAT_TEMPLATE, **named: str
) -> Path:
    """Write a byte-level tokenizer of exactly `vocab` ids (at least MIN_VOCAB) with a chat template; return folder.

    more_special: tokens from MIN_VOCAB on. named: the tokenizer's attributes |-> those that they are.
    """
    if vocab < MIN_VOCAB + len(more_special):
        raise ValueError(f"vocab {vocab} is below {MIN_VOCAB + len(more_special)}, the specials and 256 bytes")
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *more_special]
    pieces += [f"~{index:06x}" for index in range(len(pieces), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *more_special])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[EOS_ID],
        chat_template=template,
        **({"extra_special_tokens": named} if named else {}),
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
    config.pop("layer_types", None)  # all are alike
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    return folder
