"""Recognises failures from lack of memory, and words the messages for failed steps."""

import os
import sys
from collections.abc import Sequence

import structlog
import torch

log = structlog.get_logger()

_SIGNS = ("can't allocate memory", "out of memory", "Cannot allocate memory")  # of torch's allocators and the system


class StepFailedError(Exception):
    """Why a step could not be computed, in one line for users.

    A new exception: the original's traceback would keep the memory of the failed step alive.
    """


class NotNumbersError(Exception):
    """The model computed NaN."""

    def __init__(self) -> None:
        super().__init__("the model's logits are NaN: its weights are damaged, or too large for its --dtype")


def is_out_of_memory(error: Exception) -> bool:
    """Whether the step would have worked with more memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def is_device_lost(error: Exception) -> bool:
    """Whether the GPU is lost to this process: such an error repeats whatever is tried."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def explain_failure(error: Exception, setting: str, value: int) -> StepFailedError:
    """If memory ran out, the message names the one `setting` to lower and its current `value`."""
    if is_out_of_memory(error):
        return StepFailedError(f"out of memory in an engine step: lower {setting} (now {value})")
    return StepFailedError(f"the engine step failed: {error}")


def end_process() -> None:
    """End at once: the supervisor restarts the process, and its sequences continue elsewhere."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def report_failure(error: Exception, setting: str, value: int, request_ids: Sequence[str]) -> StepFailedError:
    """Log a failed step. If memory ran out, the message names the one `setting` to lower and its current `value`."""
    failure = explain_failure(error, setting, value)
    trace = None if is_out_of_memory(error) else error
    log.error("step not computed", reason=str(failure), request_ids=request_ids, exc_info=trace)
    return failure
