"""Checkpoints with random weights, for benchmarks whose figures do not depend on what a model says."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE, CONTEXT_TOKENS = 32_000, 4096


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A target of 213 million parameters and a draft model of 10 million, both bfloat16."""
    target = _write(folder / "target", hidden=1024, layers=16, heads=16, kv_heads=4, intermediate=2816)
    draft = _write(folder / "draft", hidden=256, layers=2, heads=4, kv_heads=2, intermediate=704)
    return target, draft


def _write(folder: Path, *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=intermediate,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder
