"""What a step calls on a GPU, over the tensors of shape_gpu: checks its arguments and waits where the real thing waits.

Knows the contracts of FlashInfer's plan and of the sampling kernel, not their callers.
"""

from typing import Any

import flashinfer
import torch
from torch import Tensor

from engine.cuda import gpu_sampling
from engine.cuda.fields import SamplingTensors
from tests.support.flashinfer_doubles import Decode, LatentModule, Prefill, Ragged, Wrapper
from tests.support.shape_gpu import CUDA, PINNED

launch_choice = gpu_sampling.choose_tokens
ROW_FIELDS = {
    "params": torch.int8, "positions": torch.int64, "counts_line": torch.int32, "mask_line": torch.int32,
}  # one value per row  # fmt: skip
OTHER_FIELDS = {
    "counts": torch.int32, "extra_starts": torch.int32, "extra_ids": torch.int32, "bias_starts": torch.int32,
    "bias_ids": torch.int32, "bias_values": torch.float32, "masks": torch.int32,
}  # fmt: skip


class _Plans(Wrapper):
    """Copies its arguments as FlashInfer does. What FlashInfer's C++ code does besides is not covered."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        for name in {"indptr", "last_page_len", "seq_lens", "qo_indptr"} & self.planned.keys():
            self.planned[name].to("cpu")
            self.planned[name].to(CUDA, non_blocking=True)
        self.planned["indices"].to(CUDA)
        if (length := self.planned.get("q_len_per_req")) is not None:  # of answers
            starts = flashinfer.utils._get_range_buf(len(self.planned["indptr"]), "cpu")  # type: ignore[arg-type]
            if length > 1 and self.made["use_cuda_graph"]:
                self._qo_indptr_buf.copy_(starts * length, non_blocking=True)
            elif not self.made["use_cuda_graph"]:
                starts.to(CUDA, non_blocking=True)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert keys.is_cuda and values.is_cuda
        if self.made.get("use_cuda_graph"):
            assert self._qo_indptr_buf.is_cuda
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)


class PlansDecode(_Plans, Decode):
    """Replaces FlashInfer's decode."""


class PlansPrefill(_Plans, Prefill):
    """Replaces FlashInfer's prefill."""


class PlansRagged(Ragged):
    """Replaces FlashInfer's prefill of heads that lie one token after the other."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        for name in ("qo_indptr", "kv_indptr"):
            self.planned[name].to("cpu")
            self.planned[name].to(CUDA, non_blocking=True)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
        return values.new_empty(*query.shape[:2], values.shape[-1])


class ShapesLatents(LatentModule):
    """Replaces FlashInfer's plan and kernel for latents."""

    def plan_with_staged_workspace_bytes(
        self, scratch: Tensor, memory: Tensor, staged: Tensor, *lens: Any
    ) -> tuple[list[int], int]:  # fmt: skip
        assert scratch.is_cuda and memory.is_cuda and staged.data_ptr() in PINNED
        assert not any(one.is_cuda for one in lens if isinstance(one, Tensor))
        return [], 0

    def run(self, scratch: Tensor, memory: Tensor, planned: list[int], *tensors: Any) -> None:
        assert all(one.is_cuda for one in (scratch, memory, *tensors) if isinstance(one, Tensor))


class Choices:
    """Replaces `choose_tokens`: checks the fields, then launches its kernels."""

    def __init__(self) -> None:
        self.fields: list[SamplingTensors] = []

    def __call__(self, logits: Tensor, fields: SamplingTensors, out: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        dtypes = ROW_FIELDS | OTHER_FIELDS | {"logits": torch.float32, "out": torch.int64}
        given = fields._asdict()
        for name, field in (given | {"logits": logits, "out": out}).items():
            assert field.is_cuda and field.is_contiguous() and field.dtype is dtypes[name], (name, field)
        lengths = {name: len(given[name]) for name in ROW_FIELDS}
        assert lengths | {"out": len(out)} == dict.fromkeys([*ROW_FIELDS, "out"], num_rows)
        assert len(fields.extra_starts) == len(fields.bias_starts) == num_rows + 1
        assert len(fields.bias_ids) == len(fields.bias_values)
        for table, width in ((fields.counts, vocab_size), (fields.masks, -(-vocab_size // 32))):
            assert table.numel() == 1 or table.shape[1] == width
        self.fields.append(fields)
        launch_choice(logits, fields, out)
