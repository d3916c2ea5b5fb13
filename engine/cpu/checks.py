"""Checks of a step's batch and heads, which the CPU's kernels trust: see sampling_checks.py."""

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cpu.sampling_checks import ARE_ON as ARE_ON
from engine.cpu.sampling_checks import check_range


def check_batch(batch: Batch, num_pages: int, page_tokens: int) -> None:
    """ValueError names the first value of a batch on the CPU that would reach outside a pool of that size."""
    num_tokens, num_sequences = batch.token_ids.shape[0], len(batch.query_lens_host)
    width = batch.page_table.shape[-1]
    check_tensor("cu_seqlens_q", batch.cu_seqlens_q, torch.int32, num_sequences + 1)
    check_tensor("seq_lens", batch.seq_lens, torch.int32, num_sequences)
    check_tensor("page_table", batch.page_table, torch.int32, num_sequences, width)
    check_tensor("slot_mapping", batch.slot_mapping, torch.int64, num_tokens)
    query_lens, seq_lens = batch.query_lens_host, batch.seq_lens_host
    if (batch.seq_lens.numpy() != seq_lens).any():
        raise ValueError(f"seq_lens {batch.seq_lens.tolist()} differ from the host's {seq_lens}")
    wrong = (query_lens < 0) | (query_lens > seq_lens)
    if wrong.any():
        raise ValueError(f"{query_lens[wrong][0]} new tokens in a context of {seq_lens[wrong][0]}")
    if (seq_lens > width * page_tokens).any():
        raise ValueError(f"context of {seq_lens.max()} tokens in a page table of {width} pages of {page_tokens}")
    starts = batch.cu_seqlens_q.numpy()
    if starts[0] != 0 or starts[-1] != num_tokens or (starts[1:] != query_lens.cumsum()).any():
        raise ValueError(f"cu_seqlens_q {starts.tolist()} do not match {num_tokens} tokens in {query_lens} a sequence")
    check_range("page_table", batch.page_table.numpy(), 0, num_pages)
    check_range("slot_mapping", batch.slot_mapping.numpy(), 0, num_pages * page_tokens)
    if batch.ancestors is not None:
        check_tensor("ancestors", batch.ancestors, torch.int32, num_tokens)
    if batch.states is not None:
        (part, *_), sources, targets = batch.states
        check_range("state_from", sources.numpy(), -1, len(part))
        check_range("state_to", targets.numpy(), 0, len(part))


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
            f"expected contiguous {dtype} {shape} on cpu"
        )


def check_heads(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Each head is contiguous."""
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected {dtype} {shape} on cpu"
        )
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous last dimension")
