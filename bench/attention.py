"""Attention backends against SDPA on contiguous KV, in the shape of Llama-3.2-1B: `python -m bench.attention`.

All contenders of a row take turns in each round, so a busy machine slows them equally; compare ratios.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention, visible_keys
from engine.batch import Batch, ForwardRow
from engine.compose import choose_attention
from engine.cpu.build import load_kernel
from engine.cpu.cpu_math import Math
from engine.cpu.cpu_paged import CpuPagedAttention
from engine.input_batch import InputBatch
from engine.kv.pool import Pool, PoolShape
from engine.prepared import build_batch, lay_out
from wire.kv_layout import LAYERS, KvPart
from wire.sampling import SamplingParams

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=64, scale=64**-0.5)
CPU = torch.device("cpu")
PAGE_TOKENS = 16
CACHE_BYTES = 1 << 30  # KV that a row cycles through, as a model's layers would


@dataclass(frozen=True, slots=True)
class Case:
    phase: str
    num_sequences: int
    query_len: int
    context_len: int

    @property
    def operations(self) -> float:
        """Floating-point operations of Q K' and P V over the keys that each query sees."""
        seen = self.query_len * (self.context_len - (self.query_len - 1) / 2)
        return 4 * self.num_sequences * seen * SHAPE.num_heads * SHAPE.head_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V that one layer reads."""
        return 2 * self.num_sequences * self.context_len * SHAPE.num_kv_heads * SHAPE.head_dim * dtype.itemsize


CASES = [
    *(Case("decode", count, 1, context) for count in (1, 16) for context in (128, 1024, 4096)),
    Case("decode, 4 drafted", 1, 5, 1024),
    *(Case("prefill", 1, 512, context) for context in (512, 2048)),
]


def build_case(case: Case, dtype: torch.dtype) -> tuple[Batch, QKV, Tensor]:
    """Batch, query [T, Hq, D], key and value [T, Hkv, D], pool with as many layers as CACHE_BYTES hold, 4 to 16."""
    pages_each = -(-case.context_len // PAGE_TOKENS)
    num_pages = pages_each * case.num_sequences
    order = torch.randperm(num_pages).tolist()
    rows = InputBatch(case.num_sequences, case.context_len, PAGE_TOKENS, 1, CPU)
    for row in range(case.num_sequences):
        rows.open(row, np.zeros(case.context_len, np.int32), SamplingParams(), 0)
        rows.write_pages(row, 0, order[row * pages_each : (row + 1) * pages_each])
    begin = case.context_len - case.query_len
    requests = [ForwardRow(row, begin, case.query_len, 1) for row in range(case.num_sequences)]

    def shape_of(num_layers: int) -> PoolShape:
        return PoolShape(num_pages, (KvPart(num_layers, SHAPE.num_kv_heads, SHAPE.head_dim),), PAGE_TOKENS, dtype)

    num_layers = max(4, min(16, CACHE_BYTES // (num_pages * shape_of(1).page_bytes)))
    pool = Pool(shape_of(num_layers), lends=False).tensor.normal_()  # with huge pages, as decode workers have
    num_tokens = case.num_sequences * case.query_len
    query_key = torch.randn(num_tokens, SHAPE.num_heads + SHAPE.num_kv_heads, SHAPE.head_dim).to(dtype)
    value = torch.randn(num_tokens, SHAPE.num_kv_heads, SHAPE.head_dim).to(dtype)
    return build_batch(lay_out(rows, requests), rows), QKV(query_key, value), pool


def contiguous_sdpa(case: Case, query: Tensor, num_layers: int) -> Callable[[int], Tensor]:
    """SDPA on contiguous KV, [layers][B, Hkv, C, D], with a group's heads folded into queries."""
    group = SHAPE.num_heads // SHAPE.num_kv_heads
    shape = (num_layers, 2, case.num_sequences, SHAPE.num_kv_heads, case.context_len, SHAPE.head_dim)
    cache = torch.randn(shape[1:]).to(query.dtype).expand(shape).clone()
    mask = visible_keys(case.query_len, case.context_len, None, query.device).repeat(group, 1)
    is_plain = case.query_len == 1
    is_causal = case.query_len == case.context_len

    def attend(layer: int) -> Tensor:
        split = query.reshape(case.num_sequences, case.query_len, SHAPE.num_kv_heads, group, SHAPE.head_dim)
        keys, values = cache[layer]
        if is_causal:  # SDPA's own causal mask, which skips masked parts
            heads = split.flatten(2, 3).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True)
        folded = split.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, group * L, D]
        return functional.scaled_dot_product_attention(folded, keys, values, attn_mask=None if is_plain else mask)

    return attend


def measure(contenders: dict[str, Callable[[int], Tensor]], num_layers: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call. Contenders take turns, each at another layer, so none finds its data in the cache."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    deadline = time.perf_counter() + seconds
    layer = 0
    while time.perf_counter() < deadline or len(next(iter(times.values()))) < 5:
        for name, call in contenders.items():
            layer = (layer + 3) % num_layers
            begin = time.perf_counter()
            call(layer)
            times[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in times.items()}  # the first call warms up


def bench_case(case: Case, dtype: torch.dtype, seconds: float, quantile: float) -> str:
    batch, heads, pool = build_case(case, dtype)
    num_layers = pool.shape[LAYERS]

    def over_pages(backend: AttentionBackend) -> Callable[[int], Tensor]:
        backend.plan(pool, batch)
        return lambda layer: backend.attend(layer, heads, None)

    chosen = choose_attention(SHAPE, [None], CPU, dtype)
    contenders = {
        "contiguous": contiguous_sdpa(case, heads.ready()[0], num_layers),
        chosen.backend.name: over_pages(chosen.backend),
    }
    if not chosen.is_fallback:
        contenders["plain vectors"] = over_pages(CpuPagedAttention(SHAPE, load_kernel("cpu_paged"), Math.WIDENED))
        contenders["torch_sdpa"] = over_pages(TorchSdpaAttention(SHAPE))
    times = {name: sorted(values) for name, values in measure(contenders, num_layers, seconds).items()}
    base = times["contiguous"][int(quantile * len(times["contiguous"]))]
    rates = "".join(
        f"{name} {base / values[int(quantile * len(values))]:5.2f}x   "
        for name, values in times.items()
        if name != "contiguous"
    )
    label = f"{case.phase:18} {case.num_sequences:3} x {case.query_len:3} at {case.context_len:4}"
    return f"{label}   contiguous {base * 1e3:8.3f} ms   {rates}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    parser.add_argument("--quantile", type=float, default=0.5, help="of the times; 0.1 where others use the cores")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    print(f"{options.dtype}, {options.threads} threads; speed relative to SDPA on contiguous KV (higher is faster)")
    print(choose_attention(SHAPE, [None], CPU, dtype).reason)
    for case in CASES:
        print(bench_case(case, dtype, options.seconds, options.quantile), flush=True)


if __name__ == "__main__":
    main()
