"""Writes a tiny checkpoint as a GGUF file, as llama.cpp's conversion would; names and keys are those of `gguf`."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, write_byte_level

KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv", "rms_norm_eps": "layer_norm_rms_eps", "sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "attention_multiplier": "attention_scale",
}  # fmt: skip  # of config.json |-> a method of gguf's writer
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,), "Q3_K": (108,), "IQ4_XS": (0,)}  # fmt: skip  # places of float16 numbers in a block
MIXED = {"Q4_K_M": {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"}}  # kind of a file |-> of modules
EXPERT = re.compile(r"\.experts\.(\d+)\.")
Blocks = tuple[str, NDArray[np.uint8]]  # kind, [rows, bytes]


def write_gguf_models(folder: Path, kind: str) -> tuple[Path, Path]:
    """A GGUF file with a tokenizer, and the plain checkpoint of the same values in float32.

    Kinds that `gguf` does not write have random blocks.
    """
    plain = write_checkpoint(folder / "plain", "llama", rope_theta=5e4, vocab=362, hidden=256, intermediate=512)
    write_byte_level(folder / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_bytes((folder / "text" / name).read_bytes())
    tensors, blocks = load_file(plain / "model.safetensors"), dict[str, Blocks]()
    for seed, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() == 2:
            own = MIXED.get(kind, {}).get(name.split(".")[-2], kind.removesuffix("_M"))
            dtype, (num_rows, depth) = gguf.GGMLQuantizationType[own], tensor.shape
            is_random = own.endswith("_K")
            rows = random_blocks(own, num_rows, depth, seed, 2e-4) if is_random else quantize(tensor.numpy(), dtype)
            blocks[name], tensors[name] = (own, rows), torch.from_numpy(dequantize(rows, dtype))
    path = write_gguf(plain, folder / "tiny.gguf", "llama", blocks, is_paired=True)
    save_file(tensors, plain / "model.safetensors")
    return path, plain


def write_gguf(
    folder: Path, out: Path, architecture: str, blocks: Mapping[str, Blocks] | None = None, is_paired: bool = False
) -> Path:
    """The checkpoint of `folder` in float32, or with `blocks` in place of matrices. Returns `out`."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_experts": config.get("num_experts") or config.get("num_local_experts")}
    writer: Any = gguf.GGUFWriter(str(out), architecture)
    for key, method in KEYS.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{method}")(config[key])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config["num_hidden_layers"]
    )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stacks: dict[str, list[NDArray[Any]]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items(), key=lambda item: _by_expert(item[0])):
            base, _, suffix = name.rpartition(".")
            kind, values = (blocks or {}).get(name, ("F32", tensor.float().numpy()))
            if architecture.startswith("gemma") and base.endswith("norm"):
                values = values + 1
            if is_paired and (module := base.rpartition(".")[2]) in heads:
                values = values.reshape(heads[module], 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            stored = f"{names.get_name(EXPERT.sub('.experts.', base))}.{suffix}"
            stacks[stored].append(values)
            kinds[stored] = kind
    for name, parts in stacks.items():
        values = np.ascontiguousarray(np.stack(parts) if "_exps" in name else parts[0])
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kinds[name]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _by_expert(name: str) -> tuple[str, int]:
    found = EXPERT.search(name)
    return EXPERT.sub(".experts.", name), int(found[1]) if found else 0


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[token not in special] for token in range(len(tokens))])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def random_blocks(kind: str, num_rows: int, depth: int, seed: int, size: float = 0.01) -> NDArray[np.uint8]:
    """[num_rows, bytes]: random codes, scales around `size`."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (num_rows, depth // num_values, num_bytes), np.uint8)
    for at in HALVES[kind]:
        halves = draw.standard_normal(blocks.shape[:2]).astype(np.float16) * np.float16(size)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)
