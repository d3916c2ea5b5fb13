"""The decoder's Triton kernels against their torch twins on the same device."""

import importlib

import torch
from torch import Tensor

from bench.gpu_checks.attention import dtype_for
from engine.attention.qkv import QKV, RopeArgs
from engine.cuda.gpu_layers import rope_and_write
from engine.cuda.ops import CudaOps
from engine.ops.base import Ops
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS, pool_sizes

EPS = 1e-5
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, DIM = 37, 32, 8, 128


def check_layers(device: torch.device) -> str:
    """Norms, gate, rotation and the write of KV, within two roundings of the type."""
    if device.type != "cuda" and not is_interpreted():
        return "skipped: neither a GPU nor Triton's interpreter"
    dtype = dtype_for(device)
    slack = max(2 * torch.finfo(dtype).eps, 1e-5)  # float32 sums of 4,096 squares
    worst = 0.0

    def compare(name: str, found: Tensor, expected: Tensor) -> None:
        nonlocal worst
        difference = ((found.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)).max().item()
        assert difference <= slack, f"{name}: off by {difference:.2g}, allowed {slack:.2g}"
        worst = max(worst, difference)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(device, dtype)

    ours, theirs = CudaOps(), Ops()
    rows, delta, weight = normal(NUM_TOKENS, 4096), normal(NUM_TOKENS, 4096), normal(4096)
    compare("norm", ours.norm(rows, weight, EPS), theirs.norm(rows, weight, EPS))
    sums = rows.float().clone(), rows.float().clone()
    added = ours.add_norm_(sums[0], delta, weight, EPS), theirs.add_norm_(sums[1], delta, weight, EPS)
    compare("sum", *sums)
    compare("norm of a sum", *added)
    gate_up = normal(NUM_TOKENS, 2 * 1536)
    compare("gate", ours.gate(gate_up.clone()), theirs.gate(gate_up.clone()))

    num_rotated = NUM_HEADS + NUM_KV_HEADS
    qkv = normal(NUM_TOKENS, num_rotated + NUM_KV_HEADS, DIM)
    rope = RopeArgs(normal(NUM_TOKENS, 1, DIM), normal(NUM_TOKENS, 1, DIM), normal(num_rotated, DIM), EPS)
    sizes = pool_sizes(num_pages=4, num_kv_heads=NUM_KV_HEADS, num_layers=3, page_tokens=16, head_dim=DIM)
    pool = torch.zeros(sizes, dtype=dtype, device=device)
    keys, values = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)[1]
    places = torch.arange(NUM_TOKENS, device=device)
    fused = qkv.clone()
    query_key, value = fused[:, :num_rotated], fused[:, num_rotated:]
    queries = rope_and_write(query_key, value, *rope, keys, values, places)
    wide = RopeArgs(rope.cos.float(), rope.signed_sin.float(), None if rope.norm is None else rope.norm.float(), EPS)
    truth = QKV(qkv[:, :num_rotated].float(), qkv[:, num_rotated:].float(), wide).ready()
    for name, found, expected in zip(
        ("queries", "keys", "values"),
        (queries, keys[places // 16, :, places % 16], values[places // 16, :, places % 16]),
        truth,
        strict=True,
    ):
        compare(name, found, expected.to(dtype))
    return f"largest difference {worst:.1e} ({dtype}, allowed {slack:.1e})"


def is_interpreted() -> bool:
    """Whether Triton kernels defined from now on run in its interpreter."""
    triton = importlib.import_module("triton")
    return bool(triton.knobs.runtime.interpret)
