"""FlashInfer's wrappers, computed densely. They accept and reject the same arguments as the real ones."""

import inspect
from collections.abc import Sequence
from typing import Any

import flashinfer
import pytest
import torch
from flashinfer.jit.attention import gen_customize_batch_prefill_module
from flashinfer.jit.attention.variants import attention_sink_decl
from torch import Tensor

from engine.attention.torch_sdpa import attend_by_hand, visible_keys


def bind(method: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(method).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


class Wrapper:
    """Base of both doubles."""

    real: Any
    planner = "plan"  # the method with the real signature of `plan`
    layout = "HND"
    backends: tuple[str, ...] = ("fa2",)
    plans: list[dict[str, Any]] = []  # noqa: RUF012  of all wrappers of a test

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made = bind(self.real.__init__, *args, **kwargs)
        workspace = self.made["float_workspace_buffer"]
        assert workspace.dtype is torch.uint8 and (workspace.is_cuda or not workspace.any())
        assert self.made["kv_layout"] == self.layout and self.made["backend"] in self.backends
        self.module = self._load(self.made["jit_args"])
        self.planned: dict[str, Any] = {}
        source = inspect.getsource(self.real.__init__)
        for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
            if f"self.{name} = " in source:
                setattr(self, name, None)
        if self.made["use_cuda_graph"] and "self._qo_indptr_buf = torch.arange(" in source:
            count = len(self.made["paged_kv_indptr_buffer"])
            self._qo_indptr_buf = torch.arange(count, dtype=torch.int32, device=workspace.device)

    def _load(self, jit_args: list[Any] | None) -> dict[str, Any]:
        """The arguments of a module with sinks by name; empty: the wrapper has none of its own."""
        if jit_args is None:
            return {}
        assert self.made["backend"] == "fa2"
        module = inspect.signature(gen_customize_batch_prefill_module).bind("fa2", *jit_args).arguments
        assert module["variant_decl"] == attention_sink_decl["fa2"] and module["variant_name"] == "AttentionSink"
        assert (module["additional_tensor_names"], module["additional_scalar_names"]) == (["sink"], ["sm_scale"])
        assert (module["paged_kv_stride_mode"], module["module_surface"]) == ("equal", "full")
        return module

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = bind(getattr(self.real, self.planner), *args, **kwargs)
        self.planned = {name.removeprefix("paged_kv_"): value for name, value in given.items()}
        self.planned["backend"] = self.made["backend"]
        for name in ("indptr", "last_page_len", "indices", "seq_lens"):
            assert self.planned[name].dtype is torch.int32, name
        lens = (self.planned["indptr"].diff() - 1) * self.planned["page_size"] + self.planned["last_page_len"]
        assert (
            torch.equal(lens, self.planned["seq_lens"]) and len(self.planned["indices"]) == self.planned["indptr"][-1]
        )
        lasts = self.planned["last_page_len"]
        device = self.made["float_workspace_buffer"].device
        self._paged_kv_last_page_len_buf = lasts.to(device, non_blocking=True, copy=True)
        self.plans.append(self.planned)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bind(self.real.run, *args, **kwargs)
        query, (keys, values) = given["q"], given["paged_kv_cache"]
        planned, module = self.planned, self.module
        if module:
            sinks, scale = given["args"]
            assert sinks.dtype is torch.float32 and sinks.shape == query.shape[1:2] and scale == planned["sm_scale"]
            assert (module["dtype_q"], module["dtype_kv"]) == (query.dtype, keys.dtype)
            assert module["use_sliding_window"] == (planned["window_left"] >= 0)
        assert keys.stride() == values.stride() and keys.stride(-1) == query.stride(-1) == 1
        assert keys.stride(0) < 1 << 32  # FlashInfer's strides are 32-bit
        assert query.dtype is planned["q_data_type"] and keys.dtype is planned["kv_data_type"]
        assert query.shape[1:] == (planned["num_qo_heads"], self.head_dim)
        out: Tensor = given["out"]  # without one, the real prefill fills one with zeros
        assert out.shape == query.shape and out.dtype is query.dtype and out.is_contiguous()
        return out.copy_(self.attend(query, keys, values, *given.get("args", ())[:1]))

    @property
    def head_dim(self) -> int:
        raise NotImplementedError

    @property
    def cu_seqlens_q(self) -> Sequence[int]:
        raise NotImplementedError

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        planned, starts, out = self.planned, self.cu_seqlens_q, []
        lens = (planned["indptr"].diff() - 1) * planned["page_size"] + self._paged_kv_last_page_len_buf
        for i, length in enumerate(lens.tolist()):
            pages = planned["indices"][planned["indptr"][i] : planned["indptr"][i + 1]]
            own = query[starts[i] : starts[i + 1]].transpose(0, 1)  # [Hq, L, D]
            group = own.shape[0] // keys.shape[1]
            k, v = (
                rows[pages].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0).to(query.dtype)
                for rows in (keys, values)
            )
            window = None if planned["window_left"] == -1 else planned["window_left"] + 1
            mask = visible_keys(own.shape[1], length, window, query.device)
            scale, softcap = planned["sm_scale"], planned["logits_soft_cap"]
            heads_sinks = None if sinks is None else sinks.view(-1, 1, 1).expand(-1, own.shape[1], 1)
            out.append(attend_by_hand(own, k, v, mask, scale, softcap, heads_sinks).transpose(0, 1))
        return torch.cat(out)


class Decode(Wrapper):
    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    planner = "_plan_impl"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        group = self.planned["num_qo_heads"] // self.planned["num_kv_heads"]
        assert self.made["use_tensor_cores"] or group in (1, 2, 3, 4, 6, 8, 16)
        if self.made["use_cuda_graph"]:
            buffers = [self.made[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
            assert {buffer.dtype for buffer in buffers} == {torch.int32}
            assert len(self.planned["last_page_len"]) == len(buffers[2]) == len(buffers[0]) - 1
            assert len(self.planned["indices"]) <= len(buffers[1])

    @property
    def head_dim(self) -> int:
        dim: int = self.planned["head_dim"]
        return dim

    @property
    def cu_seqlens_q(self) -> Sequence[int]:
        length = self.planned["q_len_per_req"]
        assert length == 1 or self.made["use_tensor_cores"]
        return range(0, length * len(self.planned["indptr"]), length)


class Prefill(Wrapper):
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    backends = ("fa2", "fa3")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        if self.made["backend"] == "fa3":
            assert self.planned["kv_data_type"] is self.planned["q_data_type"]

    @property
    def head_dim(self) -> int:
        dim: int = self.planned["head_dim_qk"]
        return dim

    @property
    def cu_seqlens_q(self) -> Sequence[int]:
        assert self.planned["causal"]
        starts: list[int] = self.planned["qo_indptr"].tolist()
        return starts


class Ragged(Wrapper):
    """Heads with keys and values of their own, one token after the other."""

    real = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
    layout = "NHD"
    backends = ("fa2", "fa3")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.planned = bind(self.real.plan, *args, **kwargs) | {"backend": self.made["backend"]}
        assert self.planned["causal"] and self.planned["qo_indptr"].dtype is torch.int32
        assert self.planned["kv_indptr"].dtype is torch.int32 and not self.planned["kv_indptr"].is_cuda
        assert (self.planned["head_dim_qk"], self.planned["head_dim_vo"]) in ((192, 128), (128, 128), (256, 256))
        self.plans.append(self.planned)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given, planned = bind(self.real.run, *args, **kwargs), self.planned
        query, keys, values = (given[name] for name in ("q", "k", "v"))
        out: Tensor = given["out"]
        num_heads, starts, ends = planned["num_qo_heads"], planned["qo_indptr"].tolist(), planned["kv_indptr"].tolist()
        assert query.shape == (starts[-1], num_heads, planned["head_dim_qk"])
        assert keys.shape == (ends[-1], num_heads, planned["head_dim_qk"])
        assert values.shape == (ends[-1], num_heads, planned["head_dim_vo"])
        for rows in (query, keys, values):  # what TMA can copy
            assert rows.stride(-1) == 1 and not any(step * rows.itemsize % 16 for step in rows.stride()[:2])
        assert {query.dtype, keys.dtype, values.dtype} == {planned["q_data_type"], planned["kv_data_type"]}
        assert out.shape == (*query.shape[:2], planned["head_dim_vo"]) and out.dtype is query.dtype
        return out.copy_(self.attend(query, keys, values))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        planned, found = self.planned, []
        sizes = [planned[name].diff().tolist() for name in ("qo_indptr", "kv_indptr")]
        parts = torch.split(query, sizes[0]), torch.split(keys, sizes[1]), torch.split(values, sizes[1])
        for own, k, v in zip(*parts, strict=True):
            q, k, v = own.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            mask = visible_keys(q.shape[1], k.shape[1], None, query.device)
            found.append(attend_by_hand(q, k, v, mask, planned["sm_scale"], 0.0, None).transpose(0, 1))
        return torch.cat(found)


class LatentModule:
    """What FlashInfer's own wrapper for latents loads: its plan and its kernel, densely. See `use_latent_module`.

    A plan lies in the device's memory that it was given: a kernel finds the last one there, as a graph's does.
    """

    made: list[tuple[Any, ...]] = []  # noqa: RUF012  arguments of all that were loaded in a test
    plans: dict[int, tuple[Tensor, Tensor, Tensor, bool]] = {}  # noqa: RUF012
    used_bytes: set[int] = set()  # noqa: RUF012  of scratch memory

    def __init__(self, *arguments: Any) -> None:
        self.made.append(arguments)

    def plan_with_staged_workspace_bytes(
        self, scratch: Tensor, memory: Tensor, staged: Tensor, query_starts: Tensor, starts: Tensor, lens: Tensor,
        num_heads: int, latent_dim: int, causal: bool,
    ) -> tuple[list[int], int]:  # fmt: skip
        """scheduler.cuh, MLAPlan."""
        cluster = 2 if int(query_starts[-1]) * num_heads // len(lens) > 64 else 1
        tiles = 2 * (NUM_PROCESSORS // cluster) * 64 * cluster
        used = -(-tiles * 2 * latent_dim // 16) * 16 + -(-tiles * 4 // 16) * 16
        assert scratch.numel() >= used and memory.numel() == staged.numel() == 8 << 20
        self.used_bytes.add(used)
        self.plans[memory.data_ptr()] = query_starts.clone(), starts.clone(), lens.clone(), causal
        return [], 0

    def run(
        self, scratch: Tensor, memory: Tensor, planned: list[int], query: Tensor, query_turned: Tensor, latents: Tensor,
        turned: Tensor, indices: Tensor, out: Tensor, lse: None, mask: int, num_heads: int, page_tokens: int,
        scale: float, in_base_e: bool, latent_scale: float, turned_scale: float, scales: None,
    ) -> None:  # fmt: skip
        assert indices.dtype is torch.int32 and latents.stride()[:2] == turned.stride()[:2]
        assert turned.data_ptr() - latents.data_ptr() == latents.shape[2] * latents.itemsize, "one row in our pages"
        assert latents.stride(0) < 1 << 32 and latents.stride(2) == 1 and latents.shape[1] == page_tokens
        assert query.shape[1] == num_heads and (64 % num_heads == 0 or num_heads == 128)
        assert (latent_scale, turned_scale, mask) == (1.0, 1.0, 1) and out.is_contiguous()
        query_starts, starts, lens, causal = self.plans[memory.data_ptr()]
        assert causal
        for i, length in enumerate(lens.tolist()):
            pages = indices[int(starts[i]) : int(starts[i + 1])]
            own = slice(int(query_starts[i]), int(query_starts[i + 1]))
            q = torch.cat((query[own], query_turned[own]), -1).transpose(0, 1)
            values = latents[pages].flatten(0, 1)[:length].to(q.dtype)
            keys = torch.cat((values, turned[pages].flatten(0, 1)[:length].to(q.dtype)), -1)
            visible = visible_keys(q.shape[1], length, None, q.device)
            found = attend_by_hand(q, keys[None], values[None], visible, scale, 0.0, None)
            out[own] = found.transpose(0, 1)


NUM_PROCESSORS = 132  # of an H100


def use_latent_module(monkeypatch: pytest.MonkeyPatch, latent_module: type[LatentModule] = LatentModule) -> None:
    """FlashInfer's wrapper for latents runs as it is, on a made-up H100: its checks are the real ones."""
    from flashinfer.mla._batch_mla import _wrapper
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    class Unpinned:
        """torch, which pins no memory on a machine without a GPU."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            return torch.empty(*sizes, **options)

    for module in (fa2_backend, fa3_backend):
        monkeypatch.setattr(module, "get_batch_mla_module", latent_module)
    for module in (_fa_common, _wrapper):
        monkeypatch.setattr(module, "get_compute_capability", lambda _device: (9, 0))
    monkeypatch.setattr(_fa_common, "is_sm90a_supported", lambda _device: True)
    monkeypatch.setattr(_fa_common, "get_device_sm_count", lambda _device: NUM_PROCESSORS)
    monkeypatch.setattr(_fa_common, "_get_fa_shared_memory_limits", lambda _device: (228 << 10, 227 << 10))
    if latent_module is LatentModule:
        monkeypatch.setattr(_fa_common, "torch", Unpinned())
    else:  # tensors without memory
        mechanics = _fa_common._BatchMLAGeneratedFaMechanics
        monkeypatch.setattr(mechanics, "_storage_interval", staticmethod(lambda one: (id(one), 0, one.numel())))
    for name, empty in (("made", []), ("plans", {}), ("used_bytes", set())):
        monkeypatch.setattr(LatentModule, name, empty)
