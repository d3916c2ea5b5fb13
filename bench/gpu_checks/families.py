"""Checks beyond the demo model: experts of every number of rows and layers with a state, against float32 on the CPU."""

import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.gpu_checks.attention import dtype_for
from bench.gpu_checks.engine import PAGE_TOKENS
from engine.batch import ForwardRow
from engine.compose import FullEngine, build_engine
from engine.engine import name_dtype
from tests.support.checkpoints import write_checkpoint
from wire.sampling import SamplingParams
from worker.table import num_rows_for

CPU = torch.device("cpu")
PROMPT = 300  # tokens: many rows for each expert, several chunks of a recurrence
ROW_PAGES = PROMPT // PAGE_TOKENS + 2
STEPS = (1, 16, 17, 64)  # answers of a step: experts by the kernel for few rows, and by that for many
ERROR = {torch.bfloat16: 0.15, torch.float16: 0.03, torch.float32: 1e-3}  # of a log-probability of a random model
HALVES = (torch.bfloat16, torch.float16)
CASES = [*(("qwen3_moe", dtype) for dtype in HALVES), ("gpt_oss", torch.bfloat16), ("qwen3_5_text", torch.bfloat16)]


def build(folder: Path, dtype: torch.dtype, device: torch.device, size: int) -> FullEngine:
    engine = build_engine(
        str(folder), "", name_dtype(dtype), device.type, 1, PAGE_TOKENS, num_rows_for(size),
        lambda *_: (size * ROW_PAGES, 4 * num_rows_for(size)), lambda _done, _total: None, PROMPT + 1,
    )  # fmt: skip
    engine.warm_up(size if device.type == "cuda" else 0, 0)
    return engine


def peaks(engine: FullEngine, size: int) -> torch.Tensor:
    """[S] the largest log-probability after each prompt, and after one more token of all, in steps of STEPS."""
    sampling, found = SamplingParams(temperature=0.0), list[float]()
    lengths = [1 if row % 7 == 3 else PROMPT - 3 * row for row in range(size)]
    for row, length in enumerate(lengths):
        tokens = np.random.default_rng(row).integers(0, engine.config.vocab_size, length + 1).astype(np.int32)
        engine.rows.open(row, tokens, sampling, length)
        engine.rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))
        step = engine.runner.launch([ForwardRow(row, 0, length, num_logits=1, chosen_logprobs=0, state_to=row)])
        found += [one.logprob for one in step.collect().logprobs if one is not None]
        engine.rows.write_tokens([(row, length, tokens[length:])])
    for count in (count for count in STEPS if count <= size):
        rows = [
            ForwardRow(row, length, 1, num_logits=1, chosen_logprobs=0, state_from=row, state_to=size + row)
            for row, length in enumerate(lengths[:count])
        ]
        found += [one.logprob for one in engine.runner.launch(rows).collect().logprobs if one is not None]
    return torch.tensor(found)


def check_families(device: torch.device) -> str:
    """Tiny models of experts and of recurrent layers, prompts and captured steps of 1 to 64 answers."""
    is_gpu, found = device.type == "cuda", []
    size = STEPS[-1] if is_gpu else 2
    for family, dtype in CASES if is_gpu else [(family, dtype_for(device)) for family, _ in CASES[1:]]:
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(Path(folder), family)
            ours, truth = (
                peaks(build(path, own, place, size), size) for own, place in ((dtype, device), (torch.float32, CPU))
            )
        error = (ours - truth).abs().max().item()
        assert error <= ERROR[dtype], f"{family} in {name_dtype(dtype)}: off by {error:.2g}, allowed {ERROR[dtype]}"
        found.append(f"{family} {name_dtype(dtype)} off by {error:.1e}")
    return ", ".join(found)
