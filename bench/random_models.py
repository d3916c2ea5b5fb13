"""Checkpoints with random weights, for benchmarks whose figures do not depend on what a model says."""

from pathlib import Path

from demo.shapes import llama_config, new_model

VOCAB_SIZE = 32_000


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A target of 213 million parameters and a draft model of 10 million, both bfloat16."""
    target = _write(folder / "target", width=1024, inner=2816, num_layers=16, num_heads=16, num_kv_heads=4)
    draft = _write(folder / "draft", width=256, inner=704, num_layers=2, num_heads=4, num_kv_heads=2)
    return target, draft


def _write(folder: Path, **shape: int) -> Path:
    config = llama_config(**shape, vocab_size=VOCAB_SIZE)
    new_model(config, seed=0).bfloat16().save_pretrained(folder)
    return folder
