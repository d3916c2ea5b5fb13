"""Attention by FlashInfer on NVIDIA GPUs: reads pages in place, whatever their strides.

Only this file and flashinfer_latents.py import FlashInfer, where a GPU is chosen. `plan` passes host lengths in pinned
memory and page ids on the device, so nothing waits for the GPU. `attend` launches a layer's kernels; a CUDA graph may
capture them and replays them with the last plan. Answers, which a step begins with, are planned apart from prompts:
FlashInfer chooses one tile for all rows of a plan, and of prompts alone fa3 is the faster one. Answers with drafts, and
those after them, have a plan of their own where no graph takes the step.

    new tokens of a step   | 1 | 1 | 1 | 1 | 5 | 3 | 5 | 512            | 300      |
    plans                  | decode        | fa2       | prefill, by fa2 or fa3    |
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import structlog
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer import __version__ as flashinfer_version
from flashinfer import utils as flashinfer_utils
from flashinfer.jit import env as jit_environment
from flashinfer.jit.attention.variants import attention_sink_decl
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.attention.base import FP8_LIMIT
from engine.attention.qkv import NO_ROPE, QKV
from engine.attention.shape import AttentionShape
from engine.batch import Batch
from engine.cuda.gpu_layers import join_pages, rope_and_write
from engine.cuda.modules import (
    FLASHINFER,
    HEAD_DIMS,
    PADDED_HEAD_DIMS,
    Kernels,
    describe,
    find_built,
    name_modules,
    pad_head,
    specify_sinks,
)
from engine.cuda.splits import choose_part, scratch_bytes
from engine.cuda.toolkit import JIT_CACHE
from engine.staging import Ints, find_starts, mark, pin
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS
from wire.sampling import MAX_DRAFT_TOKENS

log = structlog.get_logger()
VERSION: str = flashinfer_version  # what is installed
WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation; zero at first use
MOST_DRAFTED = 1 + MAX_DRAFT_TOKENS  # new tokens of an answer; a prompt's few count as one, too
LARGEST_RANGE = 1 << 13  # more than the sequences of any step
PLAN_BYTES = 8 << 20  # FlashInfer's size of a plan
PLANS_AHEAD = 6  # plans of each kind on their way to the device: of two steps of a model, and what drafts for each
DTYPES = (torch.bfloat16, torch.float16)
# New tokens per sequence from which fa3 attends. A tile of fa3 has 128 tokens of one query head (192 at D = 64); a tile
# of fa2 has the tokens of all heads that share a KV head, and fa2 divides long contexts too.
FA3_TOKENS = 128

Window = int | None
Wrapper = BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper
WrapperT = TypeVar("WrapperT")


class GraphSize(NamedTuple):
    """The size of a captured step."""

    num_sequences: int
    num_tokens: int  # new tokens of each sequence
    num_pages: int  # at most, of all sequences together


class Workspace:
    """Shared by backends that run in turn: FlashInfer's scratch memory, and plans on their way to the device.

    Each wrapper would have a plan of its own on both sides, and its next plan would wait until the last one was copied,
    which is after all steps launched before. On one stream a device buffer for each kind of plan is enough.
    """

    def __init__(self, device: torch.device) -> None:
        self.scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._mark: Callable[[], torch.cuda.Event | None] = mark if device.type == "cuda" else lambda: None
        if device.type == "cuda":
            _pin_ranges()
        self._unused = torch.empty(LARGEST_RANGE, dtype=torch.int32)
        self._planned: dict[tuple[Window, str], Tensor] = {}
        self._staged: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()  # the oldest first
        self._held: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def reserve(self, num_bytes: int) -> None:
        """Scratch memory of wrappers that are built from now on: those before keep theirs."""
        if num_bytes > self.scratch.numel():
            self.scratch = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def share(self, wrapper: WrapperT, window: Window, name: str) -> WrapperT:
        """The wrapper, which keeps its plan here. Call it before the first plan, and before a capture.

        name: of wrappers of which a step plans one for each window.
        """
        kind = window, name
        if kind not in self._planned:
            self._planned[kind] = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._device)
        _replace(wrapper, "_int_workspace_buffer", self._planned[kind])
        return wrapper

    @contextmanager
    def stage(self, wrapper: Any, keeps_starts: bool) -> Iterator[None]:
        """Plan within: from pinned memory of which nothing is on its way any more. FlashInfer has no call for that.

        keeps_starts: the plan would write once more, from unpinned memory, where each sequence's queries begin.
        """
        copied = self._staged[0][1] if self._staged else None
        is_free = _is_over(copied)
        if not self._staged or not (is_free or len(self._staged) == PLANS_AHEAD * len(self._planned)):
            pinned = torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        else:
            pinned, _ = self._staged.popleft()
            if copied is not None and not is_free:
                copied.synchronize()
        _replace(wrapper, "_pin_memory_int_workspace_buffer", pinned)
        starts = wrapper._qo_indptr_buf if keeps_starts else None
        if starts is not None:
            _replace(wrapper, "_qo_indptr_buf", self._unused[: len(starts)])
        yield
        if starts is not None:
            _replace(wrapper, "_qo_indptr_buf", starts)
        self._staged.append((pinned, self._mark()))

    def hold(self, pinned: Tensor) -> None:
        """A plan's memory on the host that FlashInfer brings itself, until it has been copied: torch would give it to
        the next, as it does not see the copy."""
        while self._held and _is_over(self._held[0][1]):
            self._held.popleft()
        self._held.append((pinned, self._mark()))


def _is_over(copied: torch.cuda.Event | None) -> bool:
    """Whether a copy has been made; None: it was made at once."""
    return copied is None or bool(copied.query())  # type: ignore[no-untyped-call]


def _pin_ranges() -> None:
    """Plans of answers copy 0, 1, 2, ... from FlashInfer's cache: unpinned, the copy might wait for the device."""
    for size in (1 << power for power in range(LARGEST_RANGE.bit_length())):
        flashinfer_utils._get_range_buf(size, "cpu")  # type: ignore[arg-type]
    ranges = flashinfer_utils._cache_buf
    for key, values in ranges.items():
        if key[0].startswith("range_") and not values.is_cuda:
            ranges[key] = torch.arange(len(values), dtype=values.dtype, pin_memory=True)


def _replace(wrapper: object, name: str, buffer: Tensor) -> None:
    """A buffer for which FlashInfer has no call. Under another name it would change nothing, and plans would race."""
    if not hasattr(wrapper, name):
        raise AttributeError(f"this FlashInfer has no {name}: install flashinfer-python {FLASHINFER}")
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
        sinks_kv: torch.dtype | None = None,
        workspace: Workspace | None = None,
        graph: GraphSize | None = None,
    ) -> None:
        """windows: those of all layers; dtype: of queries. Backends that run in turn may share one `workspace`.

        num_processors: multiprocessors of the device. has_fa3: its modules can be used. sinks_kv: the type of
        pages, if layers have sinks. graph: the size of captured steps; None: steps of any size.
        """
        self._own_shape, self._windows, self._dtype, self._device = shape, tuple(windows), dtype, device
        self._shape = shape = replace(shape, head_dim=pad_head(shape.head_dim))  # of pages
        self._padding = shape.head_dim - self._own_shape.head_dim
        self._workspace, self._num_processors = workspace or Workspace(device), num_processors
        self._graph, self._sinks_kv = graph, sinks_kv
        self._no_sinks = None if sinks_kv is None else torch.full([shape.num_heads], -torch.inf, device=device)
        self._num_tokens = 1 if graph is None else graph.num_tokens
        self._workspace.reserve(0 if graph is None else scratch_bytes(shape, *graph[:2], num_processors))
        self._scratch_bytes = self._workspace.scratch.numel()
        self._kinds: tuple[Kernels, ...] = () if graph else ("fa2", "fa3") if has_fa3 else ("fa2",)
        self._is_new = graph is None
        self._has_loaded = False  # every prefill module
        self._planned: list[tuple[slice, Mapping[Window, Wrapper]]] = []  # of which new tokens

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "FlashInferAttention":
        graph = GraphSize(num_sequences, num_tokens, num_pages)
        return FlashInferAttention(
            self._own_shape, self._windows, self._dtype, self._device, self._num_processors,
            sinks_kv=self._sinks_kv, workspace=self._workspace, graph=graph,
        )  # fmt: skip

    @cached_property
    def _decode(self) -> Mapping[Window, Wrapper]:
        """Built by the first plan, as modules with sinks are loaded, or compiled, with their wrapper."""
        return {window: self._workspace.share(self._build_decode(window), window, "decode") for window in self._windows}

    @cached_property
    def _drafts(self) -> Mapping[Window, Wrapper]:
        """Wrappers for answers with drafts beside prompts."""
        return self._build_all("fa2", "drafts")

    @cached_property
    def _prefill(self) -> Mapping[Kernels, Mapping[Window, Wrapper]]:
        return {kind: self._build_all(kind, "prefill") for kind in self._kinds}

    def _build_all(self, kind: Kernels, name: str) -> Mapping[Window, Wrapper]:
        share = self._workspace.share
        return {window: share(self._build_prefill(window, kind), window, name) for window in self._windows}

    def _build_decode(self, window: Window) -> BatchDecodeWithPagedKVCacheWrapper:
        """By tensor cores: the other kernels are at best as fast."""
        graph, buffers = self._graph, {}
        if graph is not None:
            sizes = {
                "indptr": graph.num_sequences + 1, "indices": graph.num_pages, "last_page_len": graph.num_sequences
            }  # fmt: skip
            buffers = {
                f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=self._device)
                for name, size in sizes.items()
            }
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace.scratch, "HND", use_cuda_graph=graph is not None, use_tensor_cores=True,
            backend="fa2", jit_args=self._specify(window), **buffers,
        )  # fmt: skip
        if self._num_tokens > 1:
            wrapper._qo_indptr_buf.mul_(self._num_tokens)  # where each sequence's queries begin, for all plans
        return wrapper

    def _build_prefill(self, window: Window, kind: Kernels) -> BatchPrefillWithPagedKVCacheWrapper:
        return BatchPrefillWithPagedKVCacheWrapper(
            self._workspace.scratch, "HND", backend=kind, jit_args=self._specify(window)
        )

    def _specify(self, window: Window) -> list[Any] | None:
        """None: FlashInfer chooses its own module when it plans."""
        if self._sinks_kv is None:
            return None
        dtypes = self._dtype, self._sinks_kv
        return specify_sinks(self._shape, window, dtypes, torch.int32, attention_sink_decl["fa2"])

    def plan(self, pool: Tensor, batch: Batch) -> None:
        if self._is_new:
            self._is_new = False
            for kind in self._kinds:
                announce(self._shape, self._windows, self._dtype, pool.dtype, kind, self._sinks_kv is not None)
        self._batch = batch
        # [L, 2, num_pages, Hkv, page_tokens, D], a view
        self._layers = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)
        page_tokens, seq_lens = pool.shape[TOKENS], batch.seq_lens_host.astype(np.int64)
        num_pages, starts, indices = join_contexts(batch, page_tokens, self._device)
        last_lens = (seq_lens - (num_pages - 1) * page_tokens).astype(np.int32)
        cu_seqlens_q = find_starts(batch.query_lens_host.astype(np.int64))
        query_lens, size = batch.query_lens_host, len(seq_lens)
        answers = size if cu_seqlens_q[-1] == self._num_tokens * size else int(np.argmax(query_lens != 1))
        prompts = size if np.all(query_lens <= MOST_DRAFTED) else int(np.argmax(query_lens > MOST_DRAFTED))
        ends = sorted({0, answers, prompts if answers < prompts < size else answers, size})
        self._planned = []
        for begin, end in pairwise(ends):
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
            if is_answer or end < size:
                planned = [self._decode if is_answer else self._drafts]
            else:
                planned = self._choose_prefill(tokens.stop - tokens.start, end - begin)
            starts_of_queries = () if is_answer else (host_query_starts,)
            mask = {"q_len_per_req": self._num_tokens} if is_answer else {"causal": True}
            part = self._choose_part(num_pages[begin:end], page_tokens) if is_answer else None
            for window, wrapper in (pair for wrappers in planned for pair in wrappers.items()):
                with self._workspace.stage(wrapper, is_answer and self._num_tokens > 1):
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
        if sinks is not None and self._sinks_kv is None:
            raise ValueError("a layer has sinks: build its backend with `sinks_kv`")
        extra = () if self._sinks_kv is None else (self._no_sinks if sinks is None else sinks, self._shape.scale)
        keys, values = self._layers[layer]  # each [num_pages, Hkv, page_tokens, D]
        limit = FP8_LIMIT if keys.dtype is torch.float8_e4m3fn else 0.0
        batch, rope = self._batch, heads.rope or NO_ROPE
        query = rope_and_write(
            heads.query_key, heads.value, *rope, keys, values, batch.slot_mapping, limit,
        )  # fmt: skip
        if self._padding:
            query = functional.pad(query, (0, self._padding))
        out = query.new_empty(query.shape)  # without it, FlashInfer's prefill fills its own with zeros first
        for tokens, wrappers in self._planned:
            wrappers[window].run(query[tokens], (keys, values), *extra, out=out[tokens])
        return out[..., : self._own_shape.head_dim].contiguous() if self._padding else out


def join_contexts(batch: Batch, page_tokens: int, device: torch.device) -> tuple[Ints, NDArray[np.int32], Tensor]:
    """[B] pages of each context, [B + 1] where they start among all, and [M] all, on the device."""
    num_pages: Ints = -(-batch.seq_lens_host.astype(np.int64) // page_tokens)
    starts = find_starts(num_pages)
    indices = torch.empty(int(starts[-1]), dtype=torch.int32, device=device)
    (host_starts,) = pin([starts], device)
    join_pages(batch.page_table, host_starts.to(device, non_blocking=True), indices)
    return num_pages, starts, indices


def announce(
    shape: AttentionShape, windows: Collection[Window], dtype: torch.dtype, kv_dtype: torch.dtype, kind: Kernels,
    has_sinks: bool = False,
) -> None:  # fmt: skip
    """Says what FlashInfer will compile, unless it comes from FlashInfer's own package of modules."""
    own, kv = (str(one).removeprefix("torch.") for one in (dtype, kv_dtype))
    folder, built = jit_environment.FLASHINFER_JIT_DIR, find_built().modules
    names = sorted(name_modules(shape, windows, own, kv, kind, has_sinks) - built)
    missing = [describe(name) for name in names if not (folder / name / f"{name}.so").exists()]
    if missing and not find_spec(JIT_CACHE):
        log.info("FlashInfer compiles kernels, once on this machine, which takes minutes", kernels=missing)


def choose_prefill(num_tokens: int, num_sequences: int, has_fa3: bool) -> Kernels:
    """The faster kernels for prompts with so many new tokens. Short ones want fa2."""
    return "fa3" if has_fa3 and num_tokens >= FA3_TOKENS * num_sequences else "fa2"


def find_obstacle(shape: AttentionShape, dtype: torch.dtype, has_sinks: bool = False) -> str | None:
    """Why FlashInfer does not support such a model; None if it does."""
    if has_sinks and shape.softcap:
        return "FlashInfer has no module for both sinks and a soft cap"
    if dtype not in DTYPES:
        return f"FlashInfer has no {dtype}"
    if shape.head_dim not in (dims := {*HEAD_DIMS, *PADDED_HEAD_DIMS}):
        return f"FlashInfer has no heads of {shape.head_dim} dimensions, only of {', '.join(map(str, sorted(dims)))}"
    return None
