"""FlashInfer's wrappers, computed densely. They accept and reject the same arguments as the real ones."""

import inspect
from collections.abc import Sequence
from typing import Any

import flashinfer
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
    backends: tuple[str, ...] = ("fa2",)
    plans: list[dict[str, Any]] = []  # noqa: RUF012  of all wrappers of a test

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made = bind(self.real.__init__, *args, **kwargs)
        workspace = self.made["float_workspace_buffer"]
        assert workspace.dtype is torch.uint8 and (workspace.is_cuda or not workspace.any())
        assert self.made["kv_layout"] == "HND" and self.made["backend"] in self.backends
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
