"""Attention to latents by FlashInfer: absorbed ones in their pages, and the heads that they are expanded to.

Its kernels take our pages as they are: a token's K + R numbers are one row, of which they read both parts, and strides
of tokens and pages are passed on (flashinfer: attention/mla.cuh, load_kv). Expanded keys and values have different
dimensions, for which fa3 has no kernel over pages (hopper/prefill_sm90.cuh): they lie one token after the other.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from torch import Tensor
from torch.nn import functional

from engine.attention.base import FP8_LIMIT
from engine.attention.qkv import NO_ROPE, QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from engine.cuda.flashinfer import DTYPES, GraphSize, Workspace, announce, join_contexts
from engine.cuda.gpu_layers import rope_and_write
from engine.cuda.modules import (
    LATENT_DIMS,
    MOST_LATENT_HEADS,
    ROTATED_DIM,
    Kernels,
    pad_expanded,
    pad_head,
    pad_latent_heads,
)
from engine.cuda.sizes import EXPANDED_BYTES
from engine.cuda.splits import latent_scratch_bytes
from engine.staging import Ints, find_starts, pin
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS


class FlashInferLatents:
    """An `AttentionBackend` for layers whose values are part of the keys, and `HeadsAttention`. One stream, one caller.

    A graph's plans: FlashInfer copies what changes to the buffers that it was given, before each replay.
    """

    name = "flashinfer"
    is_capturable = True

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, num_processors: int, kernels: Kernels,
        workspace: Workspace | None = None, graph: GraphSize | None = None,
    ) -> None:  # fmt: skip
        """dtype: of queries. num_processors: multiprocessors of the device. Others: see `FlashInferAttention`."""
        self._shape, self._dtype, self._device = shape, dtype, device
        self._num_processors, self._kernels, self._graph = num_processors, kernels, graph
        self._workspace = workspace or Workspace(device)
        self._workspace.reserve(latent_scratch_bytes(shape.value_dim, num_processors))
        self._padding = pad_head(shape.head_dim) - shape.head_dim, pad_latent_heads(shape.num_heads) - shape.num_heads
        self.head_dims, self.scratch_bytes = pad_expanded(shape.expanded), EXPANDED_BYTES

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "FlashInferLatents":
        graph = GraphSize(num_sequences, num_tokens, num_pages)
        return FlashInferLatents(
            self._shape, self._dtype, self._device, self._num_processors, self._kernels, self._workspace, graph
        )

    @cached_property
    def _wrapper(self) -> Any:
        graph, buffers = self._graph, dict[str, Tensor]()
        if graph is not None:
            size = graph.num_sequences
            sizes = {"qo_indptr": size + 1, "kv_indptr": size + 1, "kv_indices": graph.num_pages, "kv_len_arr": size}
            buffers = {name: torch.zeros(n, dtype=torch.int32, device=self._device) for name, n in sizes.items()}
        return BatchMLAPagedAttentionWrapper(
            self._workspace.scratch, use_cuda_graph=graph is not None, backend=self._kernels, **buffers
        )

    @cached_property
    def _heads(self) -> BatchPrefillWithRaggedKVCacheWrapper:
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(self._workspace.scratch, "NHD", backend=self._kernels)
        return self._workspace.share(wrapper, None, "heads")

    def plan(self, pool: Tensor, batch: Batch) -> None:
        self._batch = batch
        # [L, num_pages, page_tokens, K + R], a view
        self._layers = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)[:, 0, :, 0]
        self._scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if pool.dtype is torch.float8_e4m3fn else {}
        shape, page_tokens = self._shape, pool.shape[TOKENS]
        _, starts, indices = join_contexts(batch, page_tokens, self._device)
        query_starts = find_starts(batch.query_lens_host.astype(np.int64))
        host_starts, host_query_starts, lens = pin([starts, query_starts, batch.seq_lens_host], self._device)
        arguments: dict[str, Any] = {
            "metadata": MLAPlanMetadata.csr(host_query_starts, host_starts, indices, lens),
            "num_heads": shape.num_heads + self._padding[1], "head_dim_ckv": shape.value_dim,
            "head_dim_kpe": pool.shape[HEAD_DIM] - shape.value_dim, "page_size": page_tokens, "causal": True,
            "sm_scale": shape.scale, "q_data_type": self._dtype, "kv_data_type": pool.dtype,
        }  # fmt: skip
        is_first = "_wrapper" not in self.__dict__
        if is_first and self._graph is None:
            padded = replace(shape, head_dim=pool.shape[HEAD_DIM])
            announce(padded, [None], self._dtype, pool.dtype, self._kernels)
        self._plan(arguments)
        if (
            is_first and self._graph is not None
        ):  # its plans lie where the first one did: those of all graphs in one place
            self._workspace.share(self._wrapper._planned_backend, None, "latents")
            self._plan(arguments)

    def _plan(self, arguments: dict[str, Any]) -> None:
        self._wrapper.plan(**arguments)
        self._workspace.hold(self._wrapper._pin_memory_int_workspace_buffer)

    def attend(self, layer: int, heads: QKV, window: int | None, sinks: Tensor | None = None) -> Tensor:
        latents, shape, (dims, more_heads) = self._layers[layer], self._shape, self._padding
        keys = latents[:, None]  # [num_pages, 1, page_tokens, K + R]
        limit = FP8_LIMIT if keys.dtype is torch.float8_e4m3fn else 0.0
        query = rope_and_write(heads.query_key, heads.value, *NO_ROPE, keys, keys, self._batch.slot_mapping, limit)
        if dims or more_heads:
            query = functional.pad(query, (0, dims, 0, more_heads))
        out = query.new_empty(*query.shape[:2], shape.value_dim)
        self._wrapper.run(query=query, kv_cache=latents, out=out, **self._scales)
        return out[:, : shape.num_heads].contiguous() if more_heads else out

    def plan_heads(self, num_heads: int, query_lens: Ints, context_lens: Ints) -> None:
        """See `HeadsAttention`."""
        starts = pin([find_starts(query_lens), find_starts(context_lens)], self._device)
        with self._workspace.stage(self._heads, False):
            self._heads.plan(
                *starts, num_heads, num_heads, *self.head_dims, causal=True, sm_scale=self._shape.scale,
                q_data_type=self._dtype, kv_data_type=self._dtype,
            )  # fmt: skip

    def attend_heads(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `HeadsAttention`."""
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        self._heads.run(query, keys, values, out=out)
        return out


def find_latent_obstacle(shape: AttentionShape, dtype: torch.dtype) -> str | None:
    """Why FlashInfer does not support such latents; None if it does."""
    rotated = pad_head(shape.head_dim) - shape.value_dim
    if dtype not in DTYPES:
        return f"FlashInfer has no {dtype}"
    if shape.value_dim not in LATENT_DIMS or rotated != ROTATED_DIM or shape.num_heads > MOST_LATENT_HEADS:
        return f"FlashInfer has no latents of {shape.value_dim} and {rotated} for {shape.num_heads} heads"
    return None
