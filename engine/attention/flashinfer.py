"""Attention by FlashInfer on NVIDIA GPUs: reads pages in place, whatever their strides.

The only file that imports FlashInfer; imported only where a GPU is chosen. `plan` passes host lengths in pinned memory
and page ids on the device, so nothing waits for the GPU. `attend` launches a layer's kernels; a CUDA graph may capture
them and replays them with the last plan.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from engine.attention.base import FP8_LIMIT
from engine.attention.modules import HEAD_DIMS
from engine.attention.qkv import NO_ROPE, QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from engine.kernels.gpu_layers import join_pages, rope_and_write
from engine.ranges import find_starts
from engine.staging import mark, pin
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation; zero at first use
DTYPES = (torch.bfloat16, torch.float16)
BACKEND = "fa2"  # takes any strides; one family of modules for prefill, decode and verification
CUDA_CORE_GROUPS = (1, 2, 3)  # query heads per KV head for which decode without tensor cores is as fast
NO_SINKS = "FlashInfer's fa2 kernels for decode and prefill have no attention sinks"

Window = int | None


class GraphSize(NamedTuple):
    """The size of a captured step."""

    num_sequences: int
    num_tokens: int  # new tokens of each sequence
    num_pages: int  # at most, of all sequences together


class FlashInferAttention:
    """An `AttentionBackend`. Owns FlashInfer's wrappers and workspace. One caller at a time, on one stream."""

    name = "flashinfer"
    is_capturable = True

    def __init__(
        self,
        shape: AttentionShape,
        windows: Collection[Window],
        dtype: torch.dtype,
        device: torch.device,
        workspace: Tensor | None = None,
        graph: GraphSize | None = None,
    ) -> None:
        """windows: those of all layers; dtype: of queries. Backends that run in turn may share one `workspace`.

        graph: the size of captured steps; None: steps of any size.
        """
        self._shape, self._windows, self._dtype, self._device = shape, tuple(windows), dtype, device
        self._workspace = (
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device) if workspace is None else workspace
        )
        self._num_tokens = 1 if graph is None else graph.num_tokens
        self._decode = {window: self._build_decode(graph) for window in windows}
        self._prefill = {} if graph else {window: self._build_prefill() for window in windows}
        self._planned: Mapping[Window, BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper] = {}
        self._is_staged: torch.cuda.Event | None = None  # after the last copy out of FlashInfer's pinned buffers

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "FlashInferAttention":
        graph = GraphSize(num_sequences, num_tokens, num_pages)
        return FlashInferAttention(self._shape, self._windows, self._dtype, self._device, self._workspace, graph)

    def _build_decode(self, graph: GraphSize | None) -> BatchDecodeWithPagedKVCacheWrapper:
        group = self._shape.num_heads // self._shape.num_kv_heads
        has_tensor_cores = group not in CUDA_CORE_GROUPS or (graph is not None and graph.num_tokens > 1)
        buffers = {}
        if graph is not None:
            sizes = {
                "indptr": graph.num_sequences + 1, "indices": graph.num_pages, "last_page_len": graph.num_sequences
            }  # fmt: skip
            buffers = {
                f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=self._device)
                for name, size in sizes.items()
            }
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_cuda_graph=graph is not None, use_tensor_cores=has_tensor_cores,
            backend=BACKEND, **buffers,
        )  # fmt: skip

    def _build_prefill(self) -> BatchPrefillWithPagedKVCacheWrapper:
        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=BACKEND)

    def plan(self, pool: Tensor, batch: Batch) -> None:
        self._batch = batch
        # [L, 2, num_pages, Hkv, page_tokens, D], a view
        self._layers = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)
        page_tokens, seq_lens = pool.shape[TOKENS], batch.seq_lens_host.astype(np.int64)
        num_pages = -(-seq_lens // page_tokens)
        starts = find_starts(num_pages)
        last_lens = (seq_lens - (num_pages - 1) * page_tokens).astype(np.int32)
        cu_seqlens_q = find_starts(batch.query_lens_host.astype(np.int64))
        host_starts, host_last_lens, host_lens, host_query_starts = pin(
            [starts, last_lens, batch.seq_lens_host, cu_seqlens_q], self._device
        )
        indices = torch.empty(int(starts[-1]), dtype=torch.int32, device=self._device)
        join_pages(batch.page_table, host_starts.to(self._device, non_blocking=True), indices)
        is_decode = cu_seqlens_q[-1] == self._num_tokens * len(seq_lens)
        if self._is_staged is not None:
            self._is_staged.synchronize()
        self._planned = self._decode if is_decode else self._prefill
        starts_of_queries = () if is_decode else (host_query_starts,)
        kind = {"q_len_per_req": self._num_tokens} if is_decode else {"causal": True}
        for window, wrapper in self._planned.items():
            wrapper.plan(
                *starts_of_queries, host_starts, indices, host_last_lens,
                self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim, page_tokens,
                **kind, window_left=-1 if window is None else window - 1, sm_scale=self._shape.scale,
                logits_soft_cap=self._shape.softcap, q_data_type=self._dtype, kv_data_type=pool.dtype,
                seq_lens=host_lens,
            )  # fmt: skip
        if self._device.type == "cuda":
            self._is_staged = mark()

    def attend(self, layer: int, heads: QKV, window: Window, sinks: Tensor | None = None) -> Tensor:
        if sinks is not None:
            raise ValueError(NO_SINKS)
        keys, values = self._layers[layer]  # each [num_pages, Hkv, page_tokens, D]
        limit = FP8_LIMIT if keys.dtype is torch.float8_e4m3fn else 0.0
        batch, rope = self._batch, heads.rope or NO_ROPE
        query = rope_and_write(
            heads.query_key, heads.value, *rope, keys, values, batch.slot_mapping, limit,
        )  # fmt: skip
        attended: Tensor = self._planned[window].run(query, (keys, values))
        return attended


def find_obstacle(shape: AttentionShape, dtype: torch.dtype, has_sinks: bool = False) -> str | None:
    """Why FlashInfer does not support such a model; None if it does."""
    if has_sinks:
        return NO_SINKS
    if dtype not in DTYPES:
        return f"FlashInfer has no {dtype}"
    if shape.head_dim not in HEAD_DIMS:
        return f"FlashInfer has no heads of {shape.head_dim} dimensions, only of {', '.join(map(str, HEAD_DIMS))}"
    return None
