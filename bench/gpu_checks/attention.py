"""Attention on the device: FlashInfer over our strided pages against contiguous ones and against torch_sdpa."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.gpu_checks.card import GIB, require, synchronize, time_calls
from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import Batch
from engine.compose import choose_attention, open_device
from engine.cuda.graphs import Capture, CudaCapture
from tests.support.batches import Part, pack
from wire.kv_layout import LAYERS, PAGES, pool_sizes

PAGE_TOKENS, LAYER, NUM_LAYERS = 16, 2, 4
DEEP = 32  # layers of an 8B model
TOLERANCE = 2e-2  # bfloat16: 2 ** -8 of outputs up to about 3, and of probabilities
LONG = (32_768, 8192, 100, 1)  # contexts of captured steps
AMONG_MANY = (32_768, *[1024] * 40)  # FlashInfer alone would not divide the long one
GROUPS = (1, 2, 4, 8)  # query heads a KV head
KV_HEADS = 8
CAPTURED_TOKENS = (1, 4)  # new ones of each sequence


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step."""

    name: str
    lens: tuple[tuple[int, int], ...]  # (new tokens, context) of each sequence
    heads: tuple[int, int]  # query, KV
    head_dim: int
    window: int | None = None
    has_sinks: bool = False


DECODE = ((1, 1), (1, 500), (1, 16), (1, 2049))
CASES = [
    Case("decode, 2 query heads a KV head", DECODE, (16, 8), 64),
    Case("decode, 4", DECODE, (32, 8), 128),
    Case("decode, 7", DECODE, (28, 4), 128),
    Case("decode, window 200", DECODE, (32, 8), 128, 200),
    Case("prompts", ((700, 700), (100, 1100), (16, 16)), (32, 8), 128),
    Case("prompts, window 200", ((700, 700), (100, 1100)), (32, 8), 64, 200),
    Case("drafts", ((4, 600), (1, 70), (9, 9), (3, 1025)), (32, 8), 128),
    Case("heads of 96", DECODE, (32, 8), 96),
    Case("sinks", DECODE, (64, 8), 64, 128, has_sinks=True),
    Case("prompts, sinks", ((700, 700), (100, 1100)), (64, 8), 64, has_sinks=True),
]


@dataclass(frozen=True, slots=True)
class Problem:
    """Random heads and pages for a case, the pages shuffled."""

    case: Case
    batch: Batch
    pool: Tensor
    heads: QKV

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(*self.case.heads, self.case.head_dim, self.case.head_dim**-0.5)

    def run(self, backend: AttentionBackend, pool: Tensor, layer: int) -> Tensor:
        """[T, Hq, D]; writes into `pool`."""
        backend.plan(pool, self.batch)
        query_key, value, rope, _ = self.heads
        sinks = torch.linspace(-1, 4, self.case.heads[0], device=pool.device) if self.case.has_sinks else None
        return backend.attend(layer, QKV(query_key.clone(), value, rope), self.case.window, sinks)


def build_problem(case: Case, device: torch.device, dtype: torch.dtype, num_layers: int = NUM_LAYERS) -> Problem:
    generator = torch.Generator().manual_seed(0)
    counts = [-(-context // PAGE_TOKENS) for _, context in case.lens]
    order = iter(torch.randperm(sum(counts), generator=generator).tolist())
    parts = [
        Part([1] * query, context - query, [next(order) for _ in range(count)], num_logits=1)
        for (query, context), count in zip(case.lens, counts, strict=True)
    ]
    num_heads, num_kv_heads = case.heads
    sizes = pool_sizes(
        num_pages=sum(counts), num_kv_heads=num_kv_heads, num_layers=num_layers, page_tokens=PAGE_TOKENS,
        head_dim=open_device(device).pad_head(case.head_dim),
    )  # fmt: skip
    num_tokens = sum(query for query, _ in case.lens)
    pool = torch.empty(sizes, dtype=dtype, device=device).normal_()
    pool[..., case.head_dim :] = 0
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, case.head_dim, generator=generator).to(device, dtype)
    heads = QKV(qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :])
    return Problem(case, pack(parts, PAGE_TOKENS, device), pool, heads)


def shorten(case: Case) -> Case:
    """The same kind of step, small enough for a CPU."""
    return replace(case, lens=tuple((min(query, 40), min(context, 150)) for query, context in case.lens))


def dtype_for(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_attention(device: torch.device) -> str:
    """The chosen backend over strided pages: bit for bit what it gives over contiguous ones, and near torch_sdpa."""
    worst, name = 0.0, ""
    for case in CASES:
        problem = build_problem(case if device.type == "cuda" else shorten(case), device, dtype_for(device))
        choice = choose_attention(problem.shape, [case.window], device, problem.pool.dtype, has_sinks=case.has_sinks)
        assert not choice.is_fallback, choice.reason
        name = choice.backend.name
        strided, contiguous = problem.pool.clone(), problem.pool.narrow(LAYERS, LAYER, 1).contiguous()
        out = problem.run(choice.backend, strided, LAYER)
        assert torch.equal(out, problem.run(choice.backend, contiguous, 0)), f"{case.name}: strides change what is read"
        assert torch.equal(strided.narrow(LAYERS, LAYER, 1), contiguous), f"{case.name}: strides change what is written"
        others = [layer for layer in range(NUM_LAYERS) if layer != LAYER]
        assert torch.equal(strided.select(LAYERS, others[-1]), problem.pool.select(LAYERS, others[-1])), case.name
        truth = problem.run(TorchSdpaAttention(problem.shape), problem.pool.clone(), LAYER)
        difference = (out.float() - truth.float()).abs().max().item()
        assert difference < TOLERANCE, f"{case.name}: differs from torch_sdpa by {difference:.2g}"
        worst = max(worst, difference)
    return f"{name}, {len(CASES)} kinds of steps; largest difference from torch_sdpa {worst:.1e}"


def run_captured(problem: Problem, backend: AttentionBackend, capture: Capture) -> Tensor:
    """[T, Hq, D] of a step that was captured at short contexts, then planned again: as decode graphs do."""
    batch, window, heads, pool = problem.batch, problem.case.window, problem.heads, problem.pool.clone()
    width, size = batch.page_table.shape[1], len(batch.seq_lens)
    own = backend.for_graph(size, int(batch.query_lens_host[0]), size * width)
    out = torch.zeros_like(heads.query_key[:, : problem.case.heads[0]])

    def attend() -> None:
        out.copy_(own.attend(LAYER, QKV(heads.query_key.clone(), heads.value, heads.rope), window))

    query_lens = batch.query_lens_host
    seq_lens = torch.from_numpy(query_lens).to(batch.seq_lens.device)
    own.plan(pool, replace(batch, seq_lens=seq_lens, seq_lens_host=query_lens))
    replay = capture(attend)
    own.plan(pool, batch)
    replay()
    return out


def check_captured(device: torch.device) -> str:
    """Captured steps over contexts to 32k, 1 to 8 query heads a KV head: near torch_sdpa"""
    return _check_captured(device, dtype_for(device), GROUPS)


def check_captured_half(device: torch.device) -> str:
    """Captured steps in float16"""
    return _check_captured(device, torch.float16, GROUPS[1:2])


def _check_captured(device: torch.device, dtype: torch.dtype, groups: Sequence[int]) -> str:
    is_gpu = device.type == "cuda"
    lens = LONG if is_gpu else (150, 40)
    worst, num_steps = 0.0, 0
    steps: list[tuple[int, int, int | None, tuple[int, ...]]] = [
        (group, new, window, lens)
        for group, new, window in product(groups, CAPTURED_TOKENS, (None, 4096 if is_gpu else 20))
    ]
    if is_gpu:
        steps.append((groups[-1], 1, None, AMONG_MANY))
    for group, new, window, lengths in steps:
        contexts = tuple((new, one) for one in lengths)
        problem = build_problem(Case("", contexts, (group * KV_HEADS, KV_HEADS), 128, window), device, dtype)
        backend = choose_attention(problem.shape, [window], device, dtype).backend
        truth = problem.run(TorchSdpaAttention(problem.shape), problem.pool.clone(), LAYER)
        found = run_captured(problem, backend, _capture_for(device))
        off = (found.float() - truth.float()).abs().max().item()
        assert off < TOLERANCE, f"{group} heads a KV head, {new} new, window {window}: off by {off:.2g}"
        worst, num_steps = max(worst, off), num_steps + 1
    return f"{num_steps} steps; largest difference {worst:.1e}"


def _capture_for(device: torch.device) -> Capture:
    return CudaCapture() if device.type == "cuda" else lambda compute: compute


def time_fa3(device: torch.device) -> str:
    """On sm_90, prompts of 8k and 32k by fa3 against fa2: equal, and faster"""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "skipped: fa3 is for compute capability 9.0"
    from engine.cuda.flashinfer import FlashInferAttention

    found, is_faster, processors = [], True, torch.cuda.get_device_properties(device).multi_processor_count
    for context in (8192, 32_768):
        problem = build_problem(Case("", ((2048, context),), (32, 8), 128), device, torch.bfloat16)
        if "fa3" not in (reason := choose_attention(problem.shape, [None], device, torch.bfloat16).reason):
            return f"skipped: {reason}"
        times, outs = [], []
        for has_fa3 in (False, True):
            backend = FlashInferAttention(problem.shape, [None], torch.bfloat16, device, processors, has_fa3)
            outs.append(problem.run(backend, problem.pool.clone(), LAYER).float())
            times.append(time_calls(partial(backend.attend, LAYER, problem.heads, None), device))
        off = (outs[0] - outs[1]).abs().max().item()
        assert off < TOLERANCE, f"{context}: fa3 is off by {off:.2g}"
        found.append(f"{context} tokens: fa3 {times[1] * 1e3:.2f} ms, fa2 {times[0] * 1e3:.2f}, off by {off:.1e}")
        is_faster = is_faster and times[1] < times[0]
    return require(is_faster, "; ".join(found), device)


def time_layouts(device: torch.device) -> str:
    """Decode attention over page-major pages against layer-major ones: 64 sequences of 4,400 tokens, an 8B's heads.

    That is 34 GiB of distinct pages, more than a GPU's address caches reach; one of less than 80 GB gets fewer layers.
    """
    is_gpu = device.type == "cuda"
    num_sequences, context, num_layers = (64, 4400, DEEP) if is_gpu else (2, 100, NUM_LAYERS)
    if is_gpu and torch.cuda.get_device_properties(device).total_memory < 72 * GIB:
        num_layers = NUM_LAYERS
    case = Case("", ((1, context),) * num_sequences, (32, 8), 128)
    problem = build_problem(case, device, dtype_for(device), num_layers)
    layer_major = problem.pool.movedim(LAYERS, PAGES).contiguous().movedim(PAGES, LAYERS)  # outermost in memory only
    backend: AttentionBackend = TorchSdpaAttention(problem.shape)
    if is_gpu:
        backend = choose_attention(problem.shape, [None], device, problem.pool.dtype).backend
    times: list[list[float]] = [[], []]
    for _ in range(7):
        for own, pool in zip(times, (problem.pool, layer_major), strict=True):
            backend.plan(pool, problem.batch)
            own.append(_time_layers(backend, problem.heads, num_layers, device))
    ratio = sorted(a / b for a, b in zip(*times, strict=True))[3]
    return f"page-major takes {ratio:.3f} of layer-major's time ({sorted(times[0])[3] * 1e6:.0f} us a layer)"


def _time_layers(backend: AttentionBackend, heads: QKV, num_layers: int, device: torch.device) -> float:
    """Seconds per layer."""
    synchronize(device)
    started = time.perf_counter()
    for layer in range(num_layers):
        backend.attend(layer, heads, None)
    synchronize(device)
    return (time.perf_counter() - started) / num_layers
