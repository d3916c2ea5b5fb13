"""Words the messages for a GPU that has no room at the start, and what to change."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.out_of_memory import is_out_of_memory

FULL = 0.9  # of a GPU, by weights alone: nothing else fits beside them


@contextmanager
def explain_full_gpu(device: torch.device, folder: Path) -> Iterator[None]:
    """Around loading weights from `folder`: a full GPU becomes a ValueError with numbers and what to change."""
    free_bytes = total_bytes = 0
    try:
        if device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        yield
    except RuntimeError as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
        checkpoint_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        raise ValueError(describe_full_gpu(checkpoint_bytes, free_bytes, total_bytes)) from error


def describe_full_gpu(checkpoint_bytes: int, free_bytes: int, total_bytes: int) -> str:
    """Why weights find no room, and the setting that helps: another worker may have taken what is not free."""
    is_shared = checkpoint_bytes < FULL * total_bytes
    advice = (
        "--prefill-workers 0 if `baton serve` started two workers on it; else end what uses it"
        if is_shared
        else "--model to a smaller one"
    )
    return (
        f"no room on the GPU for the weights: their files have {checkpoint_bytes >> 20} MiB, and {free_bytes >> 20} of "
        f"the GPU's {total_bytes >> 20} MiB were free at the start: set {advice}"
    )


def explain_failed_warm_up(error: Exception) -> ValueError:
    """For a GPU whose kernels could not be built or run, or whose graphs could not be captured, at start."""
    if is_out_of_memory(error):
        return ValueError(f"no room on the GPU for the first steps and graphs: lower --gpu-memory-share ({error})")
    return ValueError(
        f"the GPU's kernels cannot be built or run: {type(error).__name__}: {error}. FlashInfer compiles its own on "
        "first use, which needs nvcc, unless they are built ahead (deploy/Dockerfile); see `baton doctor`"
    )


def explain_failed_step(error: Exception, setting: str, num_tokens: int) -> ValueError:
    """For the largest step, which is run at start before the pool takes memory. `setting`: of its tokens."""
    if is_out_of_memory(error):
        return ValueError(f"no room on the GPU for a step of {num_tokens} prompt tokens ({error}): lower {setting}")
    return explain_failed_warm_up(error)
