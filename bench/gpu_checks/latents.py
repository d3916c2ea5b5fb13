"""Latent attention on the device, of DeepSeek's shape: absorbed and expanded, eager and captured, against torch."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu_checks.attention import PAGE_TOKENS, TOLERANCE, dtype_for
from bench.gpu_checks.card import measure_bandwidth, require, time_calls
from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import Batch
from engine.compose import choose_attention
from engine.cuda.graphs import CudaCapture
from engine.latent.attention import LatentAttention
from engine.latent.expand import Up
from tests.support.batches import Part, pack
from wire.kv_layout import KvPart

RANK, ROTATED, PLAIN, VALUE = 512, 64, 128, 128
NUM_LAYERS, LAYER = 4, 2
BANDWIDTH_SHARE = 0.5  # of a copy's, that answers of 16 heads read latents with
Lens = tuple[tuple[int, int], ...]  # (new tokens, context) of each sequence
STEPS: dict[str, Lens] = {
    "answers": ((1, 1), (1, 500), (1, 16), (1, 9000)),
    "drafts": ((4, 600), (4, 70), (4, 1025)),
    "prompts": ((700, 700), (1024, 5000), (16, 16)),
    "answers beside prompts": ((1, 3000), (1, 20), (20, 2000), (600, 600)),
}


class Problem(NamedTuple):
    """Random heads over shuffled pages."""

    shape: AttentionShape
    batch: Batch
    pool: Tensor
    heads: QKV

    def run(self, backend: AttentionBackend) -> tuple[Tensor, Tensor]:
        """[T, Hq, V], and the pool afterwards."""
        pool = self.pool.clone()
        backend.plan(pool, self.batch)
        return self.attend(backend), pool

    def attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(LAYER, self.heads._replace(query_key=self.heads.query_key.clone()), None)

    def run_captured(self, backend: AttentionBackend) -> Tensor:
        """Captured at short contexts, then planned again: as decode graphs do."""
        batch, pool, lens = self.batch, self.pool.clone(), self.batch.query_lens_host
        num_pages = len(lens) * batch.page_table.shape[1]
        own = backend.for_graph(len(lens), int(lens[0]), num_pages)
        out = torch.zeros_like(self.heads.query_key[..., :VALUE])
        own.plan(pool, replace(batch, seq_lens=torch.from_numpy(lens).to(pool.device), seq_lens_host=lens))

        def attend() -> None:
            out.copy_(self.attend(own))

        replay = CudaCapture()(attend) if pool.is_cuda else attend
        own.plan(pool, batch)
        replay()
        return out


def build_problem(lens: Lens, num_heads: int, device: torch.device) -> Problem:
    generator, dtype = torch.Generator().manual_seed(0), dtype_for(device)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    counts = [-(-context // PAGE_TOKENS) for _, context in lens]
    order = iter(torch.randperm(sum(counts), generator=generator).tolist())
    parts = [
        Part([1] * new, context - new, [next(order) for _ in range(count)], num_logits=1)
        for (new, context), count in zip(lens, counts, strict=True)
    ]
    num_tokens, width = sum(new for new, _ in lens), RANK + ROTATED
    part = KvPart(NUM_LAYERS, 1, width, has_values=False)
    pool = torch.empty(part.pool_sizes(sum(counts), PAGE_TOKENS), dtype=dtype, device=device).normal_()
    expanded = PLAIN + ROTATED, VALUE
    shape = AttentionShape(num_heads, 1, width, expanded[0] ** -0.5, value_dim=RANK, expanded=expanded)
    up = Up(draw(num_heads, PLAIN, RANK) * RANK**-0.5, draw(num_heads, VALUE, RANK) * RANK**-0.5)
    heads = QKV(draw(num_tokens, num_heads, expanded[0]), draw(num_tokens, 1, width), weights=up)
    return Problem(shape, pack(parts, PAGE_TOKENS, device), pool, heads)


def check_latents(device: torch.device) -> str:
    """Latents of 512 + 64 for 16, 20 and 128 heads, absorbed and expanded, captured: near torch"""
    worst, name, num_steps, is_gpu = 0.0, "", 0, device.type == "cuda"
    for num_heads in (16, 20, 128) if is_gpu else (4,):
        for step, given in STEPS.items():
            lens = given if is_gpu else tuple((min(new, 20), min(context, 60)) for new, context in given)
            problem = build_problem(lens, num_heads, device)
            choice = choose_attention(problem.shape, [None], device, problem.pool.dtype)
            assert not choice.is_fallback, choice.reason
            name = choice.backend.name
            truth, written = problem.run(LatentAttention(problem.shape, TorchSdpaAttention(problem.shape), None))
            found, pool = problem.run(choice.backend)
            assert torch.equal(pool, written), f"{num_heads} heads, {step}: something else is written"
            outs = [found]
            if len({new for new, _ in lens}) == 1:
                outs.append(problem.run_captured(choice.backend))
            off = max((out.float() - truth.float()).abs().max().item() for out in outs)
            assert off < TOLERANCE, f"{num_heads} heads, {step}: off by {off:.2g}"
            worst, num_steps = max(worst, off), num_steps + len(outs)
    return f"{name}, {num_steps} steps; largest difference from torch {worst:.1e}"


def time_latents(device: torch.device) -> str:
    """64 answers on 8,192 tokens read latents with half the bandwidth of a copy; a chunk of 2,048 on them, in ms"""
    is_gpu, found = device.type == "cuda", []
    size, context, chunk = (64, 8192, 2048) if is_gpu else (2, 100, 40)
    share = 1.0
    for num_heads in (16, 128):
        problem = build_problem(((1, context),) * size, num_heads, device)
        backend = choose_attention(problem.shape, [None], device, problem.pool.dtype).backend
        backend.plan(problem.pool, problem.batch)
        seconds = time_calls(lambda own=problem, by=backend: own.attend(by), device)  # type: ignore[misc]
        rate = size * context * (RANK + ROTATED) * problem.pool.itemsize / seconds
        share = min(share, rate / measure_bandwidth(device)) if num_heads == 16 else share
        prompt = build_problem(((chunk, context),), num_heads, device)
        backend.plan(prompt.pool, prompt.batch)
        chunk_s = time_calls(lambda own=prompt, by=backend: own.attend(by), device)  # type: ignore[misc]
        found.append(f"{num_heads} heads: {rate / 1e12:.2f} TB/s, a chunk {chunk_s * 1e3:.2f} ms a layer")
    return require(share >= BANDWIDTH_SHARE, "; ".join(found), device)
