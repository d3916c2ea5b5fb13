"""Which GPUs this process may use, as the driver tells: no CUDA context, no torch.

NVML is asked, or /proc where it is not installed. `CUDA_VISIBLE_DEVICES` narrows the answer as it does for CUDA.
"""

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

NVML = "libnvidia-ml.so.1"  # comes with the driver
PROC = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU; absent under WSL
VISIBLE = "CUDA_VISIBLE_DEVICES"
VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


class Driver(NamedTuple):
    """What NVIDIA's driver says of this machine."""

    num_gpus: int
    version: str  # empty when unknown


def ask_driver() -> Driver:
    """The driver's GPUs, all of them; none without a driver."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return Driver(_count_in_proc(), "")
    if nvml.nvmlInit_v2():
        return Driver(_count_in_proc(), "")
    count, version = ctypes.c_uint(0), ctypes.create_string_buffer(VERSION_BYTES)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))  # a call that fails leaves its zero
    nvml.nvmlSystemGetDriverVersion(version, VERSION_BYTES)
    nvml.nvmlShutdown()
    return Driver(count.value, version.value.decode(errors="replace"))


def list_visible(visible: str | None, num_gpus: int) -> tuple[str, ...]:
    """The entries of `CUDA_VISIBLE_DEVICES` that CUDA takes, or all indices where it is not set. Pure.

    An entry is an index or a UUID ("GPU-…", "MIG-…"); like CUDA, the list ends at the first that cannot be.
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
    """The GPUs that processes started from here see, as `CUDA_VISIBLE_DEVICES` names them, in their order."""
    return list_visible(os.environ.get(VISIBLE), ask_driver().num_gpus)


def _count_in_proc() -> int:
    return len(list(PROC.iterdir())) if PROC.is_dir() else 0
