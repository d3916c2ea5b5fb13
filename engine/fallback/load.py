"""Loads models for which Baton has no native code: weights by transformers, from safetensors alone, then a self-check.

Runs no code of a checkpoint and unpickles nothing. What cannot be served exactly is refused by name, before or after
the weights are read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from engine.attention.choose import reference_attention
from engine.batch import ForwardRow, take_turns
from engine.device import Device
from engine.fallback.model import FallbackModel
from engine.fallback.probe import probe_config, read_config, refuse
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.prepared import build_batch, lay_out
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.reader import OnProgress
from wire.files import blamed, named
from wire.sampling import SamplingParams

MAX_NAMES_SHOWN = 8
PAGE_TOKENS, TEXT_PAGES = 16, 3
STEPS = ((17, 5), (13, 11), (8, 3), (1, 1), (1, 1))  # new tokens of the two sequences
# Largest error of a row of logits, relative to their spread, and the share of rows that must keep it. In half
# precision a near tie in a mixture of experts may be decided otherwise, which changes a few rows completely.
LIMITS = {torch.float32: (2e-3, 1.0), torch.float16: (0.05, 0.5), torch.bfloat16: (0.2, 0.5)}


def load_fallback(
    folder: Path, dtype: torch.dtype | None, device: Device, on_progress: OnProgress | None = None
) -> FallbackModel:
    """Load the checkpoint in `folder` onto `device` and compare it with transformers alone.

    dtype: None is the checkpoint's own. Calls on_progress(done_bytes, total_bytes) before and after. Raises
    FileNotFoundError for a missing file, ValueError for a model that cannot be served or a checkpoint without tensors.
    """
    config = read_config(folder)
    with named(folder / "config.json"):
        shape = probe_config(config)
    total_bytes = sum(entry.num_bytes for entry in SafetensorsCheckpoint(folder).entries.values())
    if on_progress:
        on_progress(0, total_bytes)
    library: Any = AutoModelForCausalLM
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, on stderr
    with blamed(folder / "config.json"):
        loaded, report = library.from_pretrained(
            folder, config=config, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False,
            use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    # transformers fills such tensors with random numbers
    if lacking := sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]):
        shown = ", ".join(lacking[:MAX_NAMES_SHOWN]) + (", ..." if len(lacking) > MAX_NAMES_SHOWN else "")
        raise ValueError(f"{folder}: the checkpoint does not fit its config.json: missing or mis-shaped: {shown}")
    model = FallbackModel(device.take(loaded), shape, device.ops)
    if model.dtype not in LIMITS:
        supported = ", ".join(str(known).removeprefix("torch.") for known in LIMITS)
        raise refuse(shape.family, f"its weights are {model.dtype}", f"set --dtype to one of {supported}")
    check(model)
    if on_progress:
        on_progress(total_bytes, total_bytes)
    return model


@torch.inference_mode()
def check(model: FallbackModel) -> None:
    """Compare a model over pages with the same weights by transformers alone. ValueError if they differ.

    Two sequences in ragged chunks and decode steps. Beside them each step has a decoy, a token at the last position of
    the context: if it changes the others, the model mixes rows outside attention (frequencies by the longest position,
    state).
    """
    dice = torch.Generator().manual_seed(0)
    lengths = [sum(counts) for counts in zip(*STEPS, strict=True)]
    texts = [torch.randint(model.config.vocab_size, (length,), generator=dice) for length in lengths]
    expected = torch.cat([model.compute_alone(text.to(model.device)) for text in texts])  # [N, V]
    difference = (_compute_over_pages(model, texts) - expected).norm(dim=-1)  # [N]
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
    limit, share = LIMITS[model.dtype]
    error = float((difference / spread).nan_to_num(torch.inf).quantile(share))
    if error > limit:
        raise refuse(
            model.config.family,
            f"in chunks over pages it computes other logits than alone; they differ by {error:.1g} of their spread, "
            f"the limit in {model.dtype} is {limit}",
        )


def _compute_over_pages(model: FallbackModel, texts: Sequence[Tensor]) -> Tensor:
    """Two texts, [T] each |-> their logits one after the other, [N, V]."""
    config, device, num_texts = model.config, model.device, len(texts)
    attention = reference_attention(config.attention_shapes, PAGE_TOKENS)
    shape = PoolShape(num_texts * TEXT_PAGES + 1, config.kv_parts, PAGE_TOKENS, model.dtype)
    pool = torch.zeros(shape.sizes, dtype=shape.dtype, device=device)
    rows = InputBatch(num_texts + 1, TEXT_PAGES * PAGE_TOKENS, PAGE_TOKENS, config.vocab_size, device)
    for row, text in enumerate([*texts, torch.zeros(1)]):
        rows.open(row, text.numpy().astype(np.int32), SamplingParams(), 0)
        rows.write_pages(row, 0, range(row * TEXT_PAGES, min((row + 1) * TEXT_PAGES, shape.num_pages)))
    begins = [0] * num_texts
    if config.state_parts:  # two slots a row, read and written in turn
        states = PoolShape(2 * (num_texts + 1), config.state_parts, PAGE_TOKENS, torch.float32)
        rows.states = states.split(torch.zeros(states.num_pages, states.page_elements, device=device))
    parts: list[list[Tensor]] = [[] for _ in texts]
    for number, counts in enumerate(STEPS):
        slots = [take_turns(row, number) for row in range(num_texts)]
        requests = [
            ForwardRow(row, begins[row], count, count, state_from=source, state_to=target)
            for row, (count, (source, target)) in enumerate(zip(counts, slots, strict=True))
        ]
        layout = lay_out(rows, [*requests, ForwardRow(num_texts, 0, 1, state_to=2 * num_texts)])
        layout.positions[-1] = config.context_tokens - 1  # the decoy's
        logits = model.forward(build_batch(layout, rows), pool, attention)
        for part, own in zip(parts, torch.split(logits, list(counts)), strict=True):
            part.append(own)
        begins = [begin + count for begin, count in zip(begins, counts, strict=True)]
    return torch.cat([own for part in parts for own in part])
