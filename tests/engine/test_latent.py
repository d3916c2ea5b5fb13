"""Latent attention: both ways to compute give one result on every mix, the choice, what pages keep, what is refused.

Every family against transformers: test_families.py. Values that are part of keys in kernels: test_attention.py.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.catalogue import build_config
from engine.compose import load_any_config
from engine.kv.pool import PoolShape
from engine.latent import expand
from engine.latent.attention import Costs, LatentAttention, choose_expanded, keep_bound
from engine.latent.expand import Expansion, PagedExpansion, RaggedExpansion, Up, choose_num_heads
from engine.models.table import build_table, shard_config
from engine.ops.base import HALVES
from engine.staging import Ints
from engine.weights.table import Shard
from kvtransfer.layout import plan_runs
from tests.support.attention import draw
from tests.support.batches import Part, pack
from tests.support.checkpoints import write_config
from tests.support.families import DEEPSEEK_V3
from tests.support.forward import Steps
from tests.support.quantised import write_models
from wire.kv_layout import KvPart, pool_sizes

CPU = torch.device("cpu")
HEADS, RANK, PLAIN, ROTATED, VALUE = 4, 24, 12, 8, 10
SHAPE = AttentionShape(HEADS, 1, RANK + ROTATED, 0.2, value_dim=RANK, expanded=(PLAIN + ROTATED, VALUE))
LENS = [(1, 1), (1, 40), (3, 20), (17, 17), (50, 50), (20, 63), (33, 34)]  # new tokens, context
NEVER, ALWAYS = Costs(expanded=1e9), Costs(absorbed=1e9)


class Mix:
    """Heads of a batch with every kind of sequence, over pages."""

    def __init__(self, page_tokens: int) -> None:
        counts = [-(-context // page_tokens) for _, context in LENS]
        order = iter(torch.randperm(sum(counts)).tolist())
        parts = [
            Part([1] * new, context - new, [next(order) for _ in range(count)], 1)
            for (new, context), count in zip(LENS, counts, strict=True)
        ]
        self.batch = pack(parts, page_tokens, CPU)
        sizes = pool_sizes(
            num_pages=sum(counts), num_kv_heads=1, num_layers=2, page_tokens=page_tokens, head_dim=SHAPE.head_dim,
            has_values=False,
        )  # fmt: skip
        self.pool = draw(*sizes)
        num_tokens = len(self.batch.token_ids)
        self.heads = QKV(
            draw(num_tokens, HEADS, PLAIN + ROTATED), draw(num_tokens, 1, SHAPE.head_dim),
            weights=Up(draw(HEADS, PLAIN, RANK), draw(HEADS, VALUE, RANK)),
        )  # fmt: skip

    def to(self, dtype: torch.dtype) -> None:
        query, value, up = self.heads.query_key, self.heads.value, self.heads.weights
        assert isinstance(up, Up)
        self.pool = self.pool.to(dtype)
        self.heads = QKV(query.to(dtype), value.to(dtype), weights=Up(up.keys.to(dtype), up.values.to(dtype)))

    def run(self, costs: Costs, padding: int = 0) -> tuple[Tensor, Tensor]:
        """[T, Hq, V], and the pool afterwards. padding: of heads in pages, on a GPU (`Device.pad_head`)."""

        def build_expanded(shape: AttentionShape) -> TorchSdpaAttention:
            assert shape.head_dim == PLAIN + ROTATED + padding
            return TorchSdpaAttention(shape)

        expansion = PagedExpansion(SHAPE, self.pool.dtype, build_expanded, lambda dim: dim + padding)
        backend = LatentAttention(SHAPE, TorchSdpaAttention(SHAPE), expansion, costs)
        pool = functional.pad(self.pool, (0, padding))
        backend.plan(pool, self.batch)
        return backend.attend(1, self.heads, None), pool


@pytest.mark.parametrize(("page_tokens", "scratch_bytes"), [(16, 1 << 20), (16, 1), (7, 80_000)])
def test_both_ways_have_one_result_on_every_mix(
    page_tokens: int, scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks and prefixes; some sequences one way, others the other; all heads at once, or one, or two."""
    monkeypatch.setattr(expand, "SCRATCH_BYTES", scratch_bytes)
    mix = Mix(page_tokens)
    absorbed, pool = mix.run(NEVER)
    for costs, padding in ((ALWAYS, 0), (Costs(absorbed=2.0), 0), (ALWAYS, 12)):
        found, other = mix.run(costs, padding)
        assert torch.equal(other, functional.pad(pool, (0, padding))) and found.is_contiguous()
        torch.testing.assert_close(found, absorbed, rtol=1e-4, atol=1e-4)
    ways = choose_expanded(mix.batch.query_lens_host, mix.batch.seq_lens_host, SHAPE, Costs(absorbed=2.0))
    assert 0 < ways.sum() < len(ways)


@pytest.mark.parametrize("is_fast", [True, False])
def test_halves_are_near_floats_whether_a_cpu_multiplies_them_or_not(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HALVES, torch.bfloat16, lambda: is_fast)
    mix, multiplied, bmm = Mix(16), set[torch.dtype](), torch.bmm
    mix.to(torch.bfloat16)
    mix.to(torch.float32)  # rounded
    exact, _ = mix.run(NEVER)

    def bmm_noting(first: Tensor, second: Tensor) -> Tensor:
        multiplied.add(second.dtype)
        return bmm(first, second)

    monkeypatch.setattr(torch, "bmm", bmm_noting)
    mix.to(torch.bfloat16)
    for costs in (NEVER, ALWAYS):
        found, _ = mix.run(costs)
        assert found.dtype is torch.bfloat16 and (found.float() - exact).norm() < 0.02 * exact.norm()
    assert multiplied == {torch.bfloat16 if is_fast else torch.float32}


def test_expanded_heads_of_long_contexts_come_in_groups() -> None:
    assert [choose_num_heads(16, 1000 // count, 1000) for count in (100, 16, 15, 7, 2, 1)] == [16, 16, 8, 4, 2, 1]
    assert choose_num_heads(20, 2000, 1000) == 1 and choose_num_heads(20, 160, 1000) == 5


def test_prompts_are_expanded_and_few_tokens_on_a_long_prefix_are_not() -> None:
    shape = build_config(DEEPSEEK_V3).attention_shapes[0]

    def choose(new: int, context: int) -> bool:
        return bool(choose_expanded(np.array([new]), np.array([context]), shape, Costs())[0])

    assert [choose(1, 8000), choose(8, 8000), choose(100, 8000)] == [False] * 3
    assert [choose(400, 8000), choose(8000, 8000), choose(512, 512)] == [True] * 3
    for context in (200, 2000, 20_000):  # each length from some on
        ways = [choose(new, context) for new in range(1, context + 1)]
        assert [way for way, _ in itertools.groupby(ways)] == [False, True]


def test_pages_keep_one_latent_a_token() -> None:
    """DeepSeek V3: 71 times less than full heads, on each rank of a worker."""
    config = build_config(DEEPSEEK_V3)
    assert config.kv_parts == (KvPart(61, 1, 576, has_values=False),)
    assert config.kv_parts[0].pool_sizes(10, 16) == (10, 1, 61, 1, 16, 576)
    (shape,) = set(config.attention_shapes)
    assert shape.num_heads * sum(shape.expanded) / shape.head_dim == pytest.approx(71.1, abs=0.1)
    assert shape.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert config.ropes[0].attention_factor == 1.0 and config.context_tokens == 163_840
    assert [layer.is_moe for layer in config.layers] == [False] * 3 + [True] * 58
    for rank in range(8):
        own = shard_config(config, Shard(rank, 8))
        assert own.kv_parts == config.kv_parts and own.attention_shapes[0].num_heads == 16
    pages = PoolShape(1, config.kv_parts, 16, torch.bfloat16)
    assert pages.page_bytes == 61 * 16 * 576 * 2
    for size, theirs in ((1, 1), (1, 8), (8, 1), (4, 2)):  # each rank reads one copy
        for rank in range(size):
            runs = plan_runs(pages.page_parts(config.kv_parts), rank, size, theirs)
            assert [(run.source, run.target, run.num_bytes) for run in runs] == [(0, 0, pages.page_bytes)]
    num_weights = sum(np.prod(stored.shape) for stored in build_table(config).stored())
    assert num_weights == pytest.approx(671e9, rel=1e-3)


def test_kimi_k2_is_the_same_family() -> None:
    kimi = {**DEEPSEEK_V3, "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1, "topk_group": 1}
    config = build_config({**kimi, "model_type": "kimi_k2"})
    assert replace(config, family="deepseek_v3") == build_config(kimi)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "deepseek_v2", "architectures": None, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_config({**DEEPSEEK_V3, **change})


def test_blocks_of_8_bits_as_v3_ships_them(tmp_path: Path) -> None:
    """Of all products but the router, kv_b_proj among them."""
    quantised, plain = write_models(tmp_path, "fp8-block", "deepseek_v3", layers=2)
    own, expected = (Steps(folder).step((0, 0, 40))[0] for folder in (quantised, plain))
    assert torch.equal(own, expected)


def test_published_keys_and_those_of_transformers_mean_the_same(tmp_path: Path) -> None:
    config = load_any_config(write_config(tmp_path, "glm4_moe_lite"))
    assert [layer.is_moe for layer in config.layers] == [False, True, True]  # type: ignore[union-attr]


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, made.untyped_storage().nbytes())
        return result


class Zeros(TorchSdpaAttention):
    """Attends to nothing, over pages and over heads, so that only the expansion takes memory."""

    head_dims, scratch_bytes = SHAPE.expanded, 4 << 20

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        return torch.zeros(len(heads.query_key), heads.num_heads, heads.query_key.shape[-1])

    def plan_heads(self, num_heads: int, query_lens: Ints, context_lens: Ints) -> None:
        pass

    def attend_heads(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(*query.shape[:2], values.shape[-1])


@pytest.mark.parametrize("kind", ["pages", "heads"])
def test_the_peak_does_not_grow_with_the_prefix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond the bound of a step's contexts is absorbed."""
    monkeypatch.setattr(expand, "SCRATCH_BYTES", 1 << 18)
    monkeypatch.setattr(expand, "MOST_BYTES", 4 << 20)
    own = Zeros(SHAPE)
    expansion: Expansion = PagedExpansion(SHAPE, torch.float32, Zeros, lambda dim: dim)
    if kind == "heads":
        expansion = RaggedExpansion(SHAPE, torch.float32, own)
    peaks, new = [], 256
    assert expansion.most_tokens == (4 << 20) // ((2 * 20 if kind == "pages" else 30) * 4) > 16_000
    for context in (4000, 16_000):
        batch = pack([Part([1] * new, context - new, list(range(context // 16)), 1)], 16, CPU)
        pool = torch.zeros(pool_sizes(
            num_pages=context // 16, num_kv_heads=1, num_layers=1, page_tokens=16, head_dim=32, has_values=False
        ))  # fmt: skip
        expansion.plan(pool, batch)
        heads = QKV(
            draw(new, HEADS, PLAIN + ROTATED), draw(new, 1, 32),
            weights=Up(draw(HEADS, PLAIN, RANK), draw(HEADS, VALUE, RANK)),
        )  # fmt: skip
        with LargestTensor() as made:  # type: ignore[no-untyped-call]
            expansion.attend(0, heads)
        peaks.append(made.num_bytes)
        assert expansion._scratch.nbytes <= 4 << 20  # type: ignore[attr-defined]
    assert peaks[1] <= peaks[0] <= 1 << 18, "groups of heads take a little less"
    lens = np.array([10_000, 20_000, 9000, 3000], np.int32)
    wanted = np.array([True, True, False, True])
    assert keep_bound(wanted, lens, 30_000).tolist() == [True, True, False, False]
    assert keep_bound(wanted, lens, 33_000).tolist() == [True, True, False, True]
    assert not keep_bound(wanted, lens, 9999).any()
