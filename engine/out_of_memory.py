"""How a step that ran out of memory is recognised, and what people are told of a step that failed."""

import torch

_SIGNS = ("can't allocate memory", "out of memory", "Cannot allocate memory")  # of torch's allocators and the system's


class StepFailedError(Exception):
    """Why a step could not be computed, in a line for people.

    Made anew rather than kept: the original's traceback holds the memory of all that was half computed.
    """


def is_out_of_memory(error: Exception) -> bool:
    """Whether the step would have worked with more memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def is_device_lost(error: Exception) -> bool:
    """Whether the GPU will compute nothing more for this process: such an error comes again whatever is tried."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def explain_failure(error: Exception, setting: str, value: int) -> StepFailedError:
    """When memory ran out, it names the one `setting` to lower and its `value` now."""
    if is_out_of_memory(error):
        return StepFailedError(f"out of memory in an engine step: lower {setting} (now {value})")
    return StepFailedError(f"the engine step failed: {error}")
