"""Latent attention on a GPU: FlashInfer's wrapper for latents as it is, doubles of its module and of that for heads.

Both ways of every shape against torch, with the Triton kernels around them in the interpreter. On CPUs: test_latent.py.
"""

from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn import functional

from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.catalogue import build_config
from engine.cuda import flashinfer, flashinfer_latents
from engine.cuda.flashinfer_latents import FlashInferLatents, find_latent_obstacle
from engine.cuda.modules import Kernels, pad_expanded, pad_head, pad_latent_heads
from engine.cuda.splits import latent_scratch_bytes
from engine.latent.attention import Costs, LatentAttention
from engine.latent.expand import RaggedExpansion, Up
from tests.support.attention import draw
from tests.support.batches import Part, pack
from tests.support.combinations import combination
from tests.support.families import DEEPSEEK_V3
from tests.support.flashinfer_doubles import LatentModule, Ragged, Wrapper, use_latent_module
from wire.kv_layout import KvPart

CPU = torch.device("cpu")
LENS = [(1, 1), (1, 40), (3, 20), (5, 71), (9, 9)]  # new tokens, context
NEVER, ALWAYS = Costs(expanded=1e9), Costs(absorbed=1e9)
V3 = (512, 64, 128, 128)  # K, R, N, V of DeepSeek's; GLM-4.7-Flash and MiniCPM3 differ
SIZES = {"deepseek": V3, "glm": (512, 64, 192, 256), "minicpm3": (256, 32, 64, 64)}
HALF = torch.float16  # of which FlashInfer takes, the one with more digits
H100 = 132


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_latent_module(monkeypatch)
    monkeypatch.setattr(flashinfer_latents, "BatchPrefillWithRaggedKVCacheWrapper", Ragged)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(Wrapper, "plans", [])


class GpuMix:
    """Sequences of some lengths over a GPU's pages, two layers."""

    def __init__(self, sizes: tuple[int, ...], num_heads: int, lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
        rank, rotated, plain, value = sizes
        own = AttentionShape(num_heads, 1, rank + rotated, (plain + rotated) ** -0.5)
        self.shape = replace(own, value_dim=rank, expanded=(plain + rotated, value))
        counts = [-(-context // 16) for _, context in lens]
        order = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist())
        parts = [
            Part([1] * new, context - new, [next(order) for _ in range(count)], 1)
            for (new, context), count in zip(lens, counts, strict=True)
        ]
        self.batch, num_tokens = pack(parts, 16, CPU), sum(new for new, _ in lens)
        sizes_of_pool = KvPart(2, 1, rank + rotated, has_values=False).pool_sizes(sum(counts), 16)
        self.pool = functional.pad(draw(*sizes_of_pool), (0, pad_head(rank + rotated) - rank - rotated)).to(dtype)
        up = Up(draw(num_heads, plain, rank) / 16, draw(num_heads, value, rank) / 16)
        query, kept = draw(num_tokens, num_heads, plain + rotated), draw(num_tokens, 1, rank + rotated)
        self.heads = QKV(query.to(HALF), kept.to(HALF), weights=Up(*(half.to(HALF) for half in up)))

    def check(self, backend: LatentAttention) -> None:
        """Against torch in float32, absorbed."""
        pool = self.pool.clone()
        backend.plan(pool, self.batch)
        found = backend.attend(1, self.heads._replace(query_key=self.heads.query_key.clone()), None)
        truth = LatentAttention(self.shape, TorchSdpaAttention(self.shape), None)
        wide = QKV(
            self.heads.query_key.float(), self.heads.value.float(),
            weights=Up(*(half.float() for half in self.heads.weights)),
        )  # fmt: skip
        expected_pool = self.pool.float()
        truth.plan(expected_pool, self.batch)
        torch.testing.assert_close(found.float(), truth.attend(1, wide, None), rtol=2e-2, atol=2e-2)
        assert torch.equal(pool.float(), expected_pool.to(self.pool.dtype).float())


def build_gpu(mix: GpuMix, kind: Kernels = "fa3", costs: Costs = NEVER) -> LatentAttention:
    own = FlashInferLatents(mix.shape, HALF, CPU, H100, kind)
    return LatentAttention(mix.shape, own, RaggedExpansion(mix.shape, HALF, own), costs)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    ("family", "num_heads"), [("deepseek", 16), combination("deepseek", 128), ("glm", 20), combination("minicpm3", 40)]
)
@pytest.mark.parametrize("costs", [NEVER, ALWAYS, Costs(absorbed=2.0)], ids=["absorbed", "expanded", "mixed"])
def test_a_gpu_attends_both_ways(
    family: str, num_heads: int, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Drafts and short chunks too: heads are padded so that no length is refused. Heads in groups, tokens in parts."""
    monkeypatch.setattr(flashinfer_latents, "EXPANDED_BYTES", 1 << 19)
    mix = GpuMix(SIZES[family], num_heads, LENS, HALF)
    with capture_logs() as lines:
        mix.check(build_gpu(mix, costs=costs))
    assert bool(Wrapper.plans) == (costs is not NEVER) and LatentModule.made, "the first prompt loads both"
    ((said,),) = [[line["kernels"] for line in lines if "takes minutes" in line["event"]]]
    rank, rotated = SIZES[family][0], pad_expanded(mix.shape.expanded)[0]
    assert said == [f"f16 with KV in f16, latents of {rank}, fa3", f"f16 with KV in f16, heads of {rotated}, fa3"]


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 16), (4, 20), combination(1, 128)])
def test_captured_steps_share_the_memory_of_plans_and_use_the_scratch_that_was_planned(
    num_tokens: int, num_heads: int
) -> None:
    lens = [(num_tokens, 5), (num_tokens, 70)]
    mix, other = GpuMix(V3, num_heads, lens, HALF), GpuMix(V3, num_heads, lens * 2, HALF)
    backend = build_gpu(mix, "fa2")
    small, large = backend.for_graph(2, num_tokens, 6), backend.for_graph(4, num_tokens, 12)
    for _ in range(2):  # plans alternate, as graphs of steps do
        mix.check(small)
        other.check(large)
    workspace = backend._absorbed._workspace  # type: ignore[attr-defined]
    (memory,) = workspace._planned.values()
    assert memory.data_ptr() in LatentModule.plans
    scratch = latent_scratch_bytes(512, H100)
    assert workspace.scratch.numel() == scratch and LatentModule.used_bytes == {scratch - 32}
    with pytest.raises(ValueError, match="insufficient or incompatible capacity"):
        mix.check(backend.for_graph(3, num_tokens, 6))


@pytest.mark.usefixtures("doubles")
def test_latents_in_fp8_pages() -> None:
    mix = GpuMix(V3, 16, [(1, 20), (1, 3)], torch.bfloat16)
    pool = mix.pool.to(torch.float8_e4m3fn)
    query, kept = mix.heads.query_key.to(torch.bfloat16), mix.heads.value.to(torch.bfloat16)
    query_key = functional.pad(query, (0, 576 - 192)), kept * 1000  # beyond its largest number
    backend = FlashInferLatents(mix.shape, torch.bfloat16, CPU, H100, "fa3")
    backend.plan(pool, mix.batch)
    backend.attend(1, QKV(torch.cat(query_key, 1), query_key[1]), None)
    assert pool.float().abs().max() == 448 and LatentModule.made[0][1:3] == (torch.bfloat16, torch.float8_e4m3fn)


class Copying:
    """A torch.cuda event of a copy."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.mark.usefixtures("doubles")
def test_plans_on_their_way_keep_their_memory() -> None:
    mix = GpuMix(V3, 16, [(1, 20)], HALF)
    backend = FlashInferLatents(mix.shape, HALF, CPU, H100, "fa3")
    workspace = backend._workspace
    workspace._mark = Copying  # type: ignore[assignment]
    for step in range(3):
        backend.plan(mix.pool, mix.batch)
        assert len({buffer.data_ptr() for buffer, _ in workspace._held}) == step + 1
    for _, copied in workspace._held:
        copied.is_done = True  # type: ignore[union-attr]
    backend.plan(mix.pool, mix.batch)
    assert len(workspace._held) == 1


def test_what_flashinfer_has_no_kernels_for() -> None:
    shape = build_config(DEEPSEEK_V3).attention_shapes[0]
    assert find_latent_obstacle(shape, torch.bfloat16) is None
    assert "float32" in str(find_latent_obstacle(shape, torch.float32))
    small = replace(shape, head_dim=32, value_dim=24, num_heads=4)
    assert "latents of 24 and 8 for 4 heads" in str(find_latent_obstacle(small, torch.bfloat16))
    assert [pad_latent_heads(count) for count in (1, 5, 16, 20, 40, 64, 65, 128)] == [1, 8, 16, 32, 64, 64, 128, 128]
