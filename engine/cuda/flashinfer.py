"""Attention by FlashInfer on NVIDIA GPUs: reads pages in place, whatever their strides.

The only file that imports FlashInfer; imported only where a GPU is chosen. `plan` passes host lengths in pinned memory
and page ids on the device, so nothing waits for the GPU. `attend` launches a layer's kernels; a CUDA graph may capture
them and replays them with the last plan. Answers, which a step begins with, are planned apart from prompts: FlashInfer
chooses one tile for all rows of a plan, and of prompts alone fa3 is the faster one. Answers with drafts, and those
after them, count as prompts where no graph takes the step.

    new tokens of a step   | 1 | 1 | 1 | 1 | 512            | 300      |
    plans                  | decode        | prefill, by fa2 or fa3    |
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from engine.attention.base import FP8_LIMIT
from engine.attention.qkv import NO_ROPE, QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from engine.cuda.gpu_layers import join_pages, rope_and_write
from engine.cuda.modules import HEAD_DIMS, Kernels
from engine.cuda.splits import choose_part, scratch_bytes
from engine.staging import Ints, find_starts, mark, pin
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation; zero at first use
PLAN_BYTES = 8 << 20  # FlashInfer's size of a plan
PLANS_AHEAD = 6  # plans of each kind on their way to the device: of two steps of a model, and what drafts for each
DTYPES = (torch.bfloat16, torch.float16)
# New tokens per sequence from which fa3 attends. A tile of fa3 has 128 tokens of one query head (192 at D = 64); a tile
# of fa2 has the tokens of all heads that share a KV head, and fa2 divides long contexts too.
FA3_TOKENS = 128
NO_SINKS = "FlashInfer's fa2 kernels for decode and prefill have no attention sinks"

Window = int | None
Wrapper = BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper
WrapperT = TypeVar("WrapperT", BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)


class GraphSize(NamedTuple):
    """The size of a captured step."""

    num_sequences: int
    num_tokens: int  # new tokens of each sequence
    num_pages: int  # at most, of all sequences together


class Workspace:
    """What backends that run in turn share: FlashInfer's scratch memory, and plans on their way to the device.

    Each wrapper would have a plan of its own on both sides, and its next plan would wait until the last one was copied,
    which is after all steps launched before. On one stream a device buffer for each kind of plan is enough.
    """

    def __init__(self, device: torch.device) -> None:
        self.scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._mark: Callable[[], torch.cuda.Event | None] = mark if device.type == "cuda" else lambda: None
        self._planned: dict[tuple[Window, bool], Tensor] = {}
        self._staged: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()  # the oldest first

    def reserve(self, num_bytes: int) -> None:
        """Scratch memory of wrappers that are built from now on: those before keep theirs."""
        if num_bytes > self.scratch.numel():
            self.scratch = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def share(self, wrapper: WrapperT, window: Window) -> WrapperT:
        """The wrapper, which keeps its plan here. Call it before the first plan, and before a capture."""
        kind = window, isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper)
        if kind not in self._planned:
            self._planned[kind] = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._device)
        _replace(wrapper, "_int_workspace_buffer", self._planned[kind])
        return wrapper

    @contextmanager
    def stage(self, wrapper: Wrapper) -> Iterator[None]:
        """Plan within: from pinned memory of which nothing is on its way any more. FlashInfer has no call for that."""
        copied = self._staged[0][1] if self._staged else None
        is_free = copied is None or copied.query()  # type: ignore[no-untyped-call]
        if not self._staged or not (is_free or len(self._staged) == PLANS_AHEAD * len(self._planned)):
            pinned = torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        else:
            pinned, _ = self._staged.popleft()
            if copied is not None and not is_free:
                copied.synchronize()
        _replace(wrapper, "_pin_memory_int_workspace_buffer", pinned)
        yield
        self._staged.append((pinned, self._mark()))


def _replace(wrapper: Wrapper, name: str, buffer: Tensor) -> None:
    """A buffer for which FlashInfer has no call. Under another name it would change nothing, and plans would race."""
    if not hasattr(wrapper, name):
        raise AttributeError(f"this FlashInfer has no {name}: install flashinfer-python 0.7.2")
    setattr(wrapper, name, buffer)


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
        num_processors: int,
        has_fa3: bool = False,
        workspace: Workspace | None = None,
        graph: GraphSize | None = None,
    ) -> None:
        """windows: those of all layers; dtype: of queries. Backends that run in turn may share one `workspace`.

        num_processors: multiprocessors of the device. has_fa3: its modules can be used. graph: the size of captured
        steps; None: steps of any size.
        """
        self._shape, self._windows, self._dtype, self._device = shape, tuple(windows), dtype, device
        self._workspace, self._num_processors = workspace or Workspace(device), num_processors
        share = self._workspace.share
        self._num_tokens = 1 if graph is None else graph.num_tokens
        self._workspace.reserve(0 if graph is None else scratch_bytes(shape, *graph[:2], num_processors))
        self._scratch_bytes = self._workspace.scratch.numel()
        self._decode = {window: share(self._build_decode(graph), window) for window in windows}
        kinds: tuple[Kernels, ...] = () if graph else ("fa2", "fa3") if has_fa3 else ("fa2",)
        self._prefill = {
            kind: {window: share(self._build_prefill(kind), window) for window in windows} for kind in kinds
        }
        self._has_loaded = False  # every prefill module
        self._planned: list[tuple[slice, Mapping[Window, Wrapper]]] = []  # of which new tokens

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "FlashInferAttention":
        graph = GraphSize(num_sequences, num_tokens, num_pages)
        return FlashInferAttention(
            self._shape, self._windows, self._dtype, self._device, self._num_processors,
            workspace=self._workspace, graph=graph,
        )  # fmt: skip

    def _build_decode(self, graph: GraphSize | None) -> BatchDecodeWithPagedKVCacheWrapper:
        """By tensor cores: the other kernels are at best as fast."""
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
            self._workspace.scratch, "HND", use_cuda_graph=graph is not None, use_tensor_cores=True,
            backend="fa2", **buffers,
        )  # fmt: skip

    def _build_prefill(self, kind: Kernels) -> BatchPrefillWithPagedKVCacheWrapper:
        return BatchPrefillWithPagedKVCacheWrapper(self._workspace.scratch, "HND", backend=kind)

    def plan(self, pool: Tensor, batch: Batch) -> None:
        self._batch = batch
        # [L, 2, num_pages, Hkv, page_tokens, D], a view
        self._layers = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)
        page_tokens, seq_lens = pool.shape[TOKENS], batch.seq_lens_host.astype(np.int64)
        num_pages = -(-seq_lens // page_tokens)
        starts = find_starts(num_pages)
        last_lens = (seq_lens - (num_pages - 1) * page_tokens).astype(np.int32)
        cu_seqlens_q = find_starts(batch.query_lens_host.astype(np.int64))
        indices = torch.empty(int(starts[-1]), dtype=torch.int32, device=self._device)
        (host_starts,) = pin([starts], self._device)
        join_pages(batch.page_table, host_starts.to(self._device, non_blocking=True), indices)
        query_lens, size = batch.query_lens_host, len(seq_lens)
        answers = size if cu_seqlens_q[-1] == self._num_tokens * size else int(np.argmax(query_lens != 1))
        self._planned = []
        for begin, end in ((0, answers), (answers, size)):
            if begin == end:
                continue
            tokens = slice(int(cu_seqlens_q[begin]), int(cu_seqlens_q[end]))
            own_starts, own_query_starts = starts[begin : end + 1], cu_seqlens_q[begin : end + 1]
            host_starts, host_last_lens, host_lens, host_query_starts = pin(
                [
                    own_starts - own_starts[0], last_lens[begin:end], batch.seq_lens_host[begin:end],
                    own_query_starts - own_query_starts[0],
                ],
                self._device,
            )  # fmt: skip
            is_answer = end == answers
            planned = [self._decode] if is_answer else self._choose_prefill(tokens.stop - tokens.start, end - begin)
            starts_of_queries = () if is_answer else (host_query_starts,)
            mask = {"q_len_per_req": self._num_tokens} if is_answer else {"causal": True}
            part = self._choose_part(num_pages[begin:end], page_tokens) if is_answer else None
            for window, wrapper in (pair for wrappers in planned for pair in wrappers.items()):
                with self._workspace.stage(wrapper):
                    wrapper.plan(
                        *starts_of_queries, host_starts, indices[own_starts[0] : own_starts[-1]], host_last_lens,
                        self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim, page_tokens,
                        **mask, window_left=-1 if window is None else window - 1, sm_scale=self._shape.scale,
                        logits_soft_cap=self._shape.softcap, q_data_type=self._dtype, kv_data_type=pool.dtype,
                        seq_lens=host_lens, fixed_split_size=part if window is None else None,
                    )  # fmt: skip
            self._planned.append((tokens, planned[-1]))

    def _choose_prefill(self, num_tokens: int, num_sequences: int) -> list[Mapping[Window, Wrapper]]:
        """The wrappers to be planned, of which the last ones attend."""
        kind = choose_prefill(num_tokens, num_sequences, "fa3" in self._prefill)
        others = () if self._has_loaded else self._prefill  # a plan loads its module, which may compile it
        self._has_loaded = True
        return [*(self._prefill[other] for other in others if other != kind), self._prefill[kind]]

    def _choose_part(self, num_pages: Ints, page_tokens: int) -> int | None:
        if scratch_bytes(self._shape, len(num_pages), self._num_tokens, self._num_processors) > self._scratch_bytes:
            return None
        return choose_part(num_pages, page_tokens, self._num_tokens, self._shape, self._num_processors)

    def attend(self, layer: int, heads: QKV, window: Window, sinks: Tensor | None = None) -> Tensor:
        if sinks is not None:
            raise ValueError(NO_SINKS)
        keys, values = self._layers[layer]  # each [num_pages, Hkv, page_tokens, D]
        limit = FP8_LIMIT if keys.dtype is torch.float8_e4m3fn else 0.0
        batch, rope = self._batch, heads.rope or NO_ROPE
        query = rope_and_write(
            heads.query_key, heads.value, *rope, keys, values, batch.slot_mapping, limit,
        )  # fmt: skip
        out = query.new_empty(query.shape)  # without it, FlashInfer's prefill fills its own with zeros first
        for tokens, wrappers in self._planned:
            wrappers[window].run(query[tokens], (keys, values), out=out[tokens])
        return out


def choose_prefill(num_tokens: int, num_sequences: int, has_fa3: bool) -> Kernels:
    """The faster kernels for prompts with so many new tokens. Short ones want fa2."""
    return "fa3" if has_fa3 and num_tokens >= FA3_TOKENS * num_sequences else "fa2"


def find_obstacle(shape: AttentionShape, dtype: torch.dtype, has_sinks: bool = False) -> str | None:
    """Why FlashInfer does not support such a model; None if it does."""
    if has_sinks:
        return NO_SINKS
    if dtype not in DTYPES:
        return f"FlashInfer has no {dtype}"
    if shape.value_dim:
        return "these kernels have values beside keys"
    if shape.head_dim not in HEAD_DIMS:
        return f"FlashInfer has no heads of {shape.head_dim} dimensions, only of {', '.join(map(str, HEAD_DIMS))}"
    return None
