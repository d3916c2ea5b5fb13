"""The GPUs that this process may use, without a CUDA context or torch.

Asks NVML, or /proc if NVML is not installed. `CUDA_VISIBLE_DEVICES` limits the result as it does for CUDA.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NVML = "libnvidia-ml.so.1"  # comes with the driver
PROC = Path("/proc/driver/nvidia/gpus")  # a folder per GPU; absent under WSL
VISIBLE = "CUDA_VISIBLE_DEVICES"
VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


class Driver(NamedTuple):
    """What NVIDIA's driver reports about this machine."""

    num_gpus: int
    version: str  # empty if unknown


def ask_driver() -> Driver:
    """All GPUs of the driver; none without a driver."""
    nvml = None
    with suppress(OSError):
        nvml = ctypes.CDLL(NVML)
    if nvml is None or nvml.nvmlInit_v2():
        return Driver(len(list(PROC.iterdir())) if PROC.is_dir() else 0, "")
    count, version = ctypes.c_uint(0), ctypes.create_string_buffer(VERSION_BYTES)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))  # stays 0 if the call fails
    nvml.nvmlSystemGetDriverVersion(version, VERSION_BYTES)
    nvml.nvmlShutdown()
    return Driver(count.value, version.value.decode(errors="replace"))


def list_visible(visible: str | None, num_gpus: int) -> tuple[str, ...]:
    """The entries of `CUDA_VISIBLE_DEVICES` that CUDA accepts, or all indices if it is not set. Pure.

    An entry is an index or a UUID ("GPU-…", "MIG-…"). As in CUDA, the list ends at the first invalid entry.
    """
    if visible is None or not num_gpus:
        return tuple(map(str, range(num_gpus)))
    found: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        is_gpu = int(entry) < num_gpus if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))
        if not is_gpu or entry in found:
            break
        found.append(entry)
    return tuple(found)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs visible to processes started from here, as entries of `CUDA_VISIBLE_DEVICES`, in order."""
    return list_visible(os.environ.get(VISIBLE), ask_driver().num_gpus)
