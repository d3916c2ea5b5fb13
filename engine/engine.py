"""A model ready to compute, with its pool: what a worker builds once at start."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.choose import AttentionChoice, choose_attention
from engine.kvcache.pool import Pool, PoolShape
from engine.model.assemble import OnProgress
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.linear import Quantization
from engine.model.weights import load_model, resolve_model_folder, weight_fingerprint
from engine.rows import Rows
from engine.runner import Runner


@dataclass(frozen=True, slots=True)
class Engine:
    """Owns everything large."""

    folder: Path  # of the checkpoint
    config: ModelConfig
    weights: str  # fingerprint
    dtype: str  # "float32", "bfloat16" or "float16"
    device: torch.device
    attention: AttentionChoice
    pool: Pool
    rows: Rows  # of both models
    runner: Runner
    draft_weights: str  # fingerprint of the draft model; empty without one
    draft_runner: Runner | None  # the draft model over the second part of the same pages
    quantization: Quantization = "none"  # of both models

    def describe(self) -> dict[str, str]:
        """What people want to know at start."""
        shape = self.pool.shape
        return {
            "device": str(self.device),
            "dtype": self.dtype,
            "quantization": self.quantization,
            "attention": self.attention.backend.name,
            "attention_reason": self.attention.reason,
            "pool": f"{shape.num_pages} pages of {shape.page_tokens} tokens, {self.pool.page_bytes} bytes each",
            "draft_model": self.draft_weights[:12] or "none",
        }

    def find_weaknesses(self) -> dict[str, str]:
        """What works worse than it could on this machine |-> why, and what to change."""
        found = {}
        if self.attention.is_fallback:
            found["slow attention"] = self.attention.reason
        if self.pool.why_private is not None:
            found["pages go over gRPC even on this host"] = self.pool.why_private
        return found


SizePool = Callable[[int, int, int | None], int]
"""(model's context in tokens, bytes of a page, free bytes of the GPU or None) |-> pages"""


def build_engine(
    model: str,
    draft_model: str,
    dtype: str,
    device_name: str,
    threads: int,
    page_tokens: int,
    num_rows: int,
    size_pool: SizePool,
    on_progress: OnProgress,
    max_context_tokens: int = 0,
    quantization: Quantization = "none",
) -> Engine:
    """Load a model by folder or hub id, a draft model too unless `draft_model` is empty, and allocate their pool.

    `num_rows`: sequences in steps at once. `max_context_tokens`: no sequence will be longer; 0: the model's own limit.
    Raises FileNotFoundError or ValueError that say what is wrong with the checkpoint or the device.
    """
    torch.set_num_threads(threads)
    device = choose_device(device_name)
    folder = resolve_model_folder(model)
    decoder = load_model(folder, dtype, device, on_progress, quantization)
    config = decoder.config
    context_tokens = min(config.context_tokens, max_context_tokens or config.context_tokens)
    draft = _load_draft(draft_model, decoder, context_tokens, quantization) if draft_model else None
    attention = choose_attention(config.attention_shape, config.windows, device, decoder.dtype)
    shape = _pool_shape(decoder, page_tokens)
    draft_shape = _pool_shape(draft.decoder, page_tokens) if draft else None
    page_bytes = shape.page_bytes + (draft_shape.page_bytes if draft_shape else 0)
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    rows = Rows(num_rows, context_tokens, page_tokens, config.vocab_size, device)
    pool = Pool(shape.with_pages(size_pool(config.context_tokens, page_bytes, free_bytes)), device, draft_shape)
    return Engine(
        folder=folder,
        config=config,
        weights=weight_fingerprint(folder, quantization),
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=device,
        attention=attention,
        pool=pool,
        rows=rows,
        runner=Runner(decoder, attention.backend, pool.tensor, rows),
        draft_weights=draft.weights if draft else "",
        draft_runner=_build_draft_runner(draft, pool, rows) if draft else None,
        quantization=quantization,
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    weights: str  # fingerprint
    decoder: Decoder


def _load_draft(draft_model: str, target: Decoder, context_tokens: int, quantization: Quantization) -> _Draft:
    """The draft model in the dtype and on the device of `target`, quantised like it.

    Raises ValueError when it does not go with it, or takes fewer than `context_tokens`, the most in a sequence.
    """
    folder = resolve_model_folder(draft_model)
    decoder = load_model(folder, str(target.dtype).removeprefix("torch."), target.device, quantization=quantization)
    here, there = target.config.vocab_size, decoder.config.vocab_size
    if here != there:
        raise ValueError(
            f"draft model {draft_model} does not go with the model: its vocab_size is {there}, the model's {here}; "
            "choose another --draft-model, or none"
        )
    if decoder.config.context_tokens < context_tokens:
        raise ValueError(
            f"draft model {draft_model} takes {decoder.config.context_tokens} tokens, less than a context of "
            f"{context_tokens}: set --max-context-tokens {decoder.config.context_tokens} or less, or choose another "
            "--draft-model, or none"
        )
    return _Draft(weight_fingerprint(folder, quantization), decoder)


def _build_draft_runner(draft: _Draft, pool: Pool, rows: Rows) -> Runner:
    assert pool.draft_tensor is not None
    decoder = draft.decoder
    attention = choose_attention(decoder.config.attention_shape, decoder.config.windows, decoder.device, decoder.dtype)
    return Runner(decoder, attention.backend, pool.draft_tensor, rows)


def _pool_shape(decoder: Decoder, page_tokens: int) -> PoolShape:
    config = decoder.config
    return PoolShape(1, config.num_layers, config.num_kv_heads, page_tokens, config.head_dim, decoder.dtype)


def choose_device(wanted: str) -> torch.device:
    """Turn a name into a device: "auto" is cuda when there is one. Raises ValueError without a GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or install torch with CUDA")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
