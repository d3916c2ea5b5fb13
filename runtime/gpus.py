"""GPUs: those that this process may use, without a CUDA context or torch, and figures of data sheets.

Asks NVML, or /proc if NVML is not installed. `CUDA_VISIBLE_DEVICES` limits the result as it does for CUDA.
"""

import ctypes
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

NVML = "libnvidia-ml.so.1"  # comes with the driver
PROC = Path("/proc/driver/nvidia/gpus")  # a folder per GPU; absent under WSL
VISIBLE = "CUDA_VISIBLE_DEVICES"
VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


class Driver(NamedTuple):
    """Facts that NVIDIA's driver reports about this machine."""

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


CardName = Literal["b200", "h200", "h100", "a100", "a100-40gb", "l40s", "l4", "rtx-5090", "rtx-4090", "cpu"]
NEARLY = 0.85  # of the table's memory: what a driver shows is up to 10 % less or more


@dataclass(frozen=True, slots=True)
class Card:
    """Peaks of one GPU, or of a CPU socket."""

    memory_bytes: float
    bytes_per_s: float  # of its memory
    flops: float  # dense bfloat16, sums in float32
    num_sms: int  # multiprocessors; 0 of a CPU
    link_bytes_per_s: float  # to the other GPUs of its host, one way: NVLink, else PCIe
    handoff_bytes_per_s: float  # of KV from a prefill to a decode worker


CARDS: dict[CardName, Card] = {
    "b200": Card(180e9, 8.0e12, 2250e12, 148, 900e9, 45e9),
    "h200": Card(141e9, 4.8e12, 989e12, 132, 450e9, 45e9),
    "h100": Card(80e9, 3.35e12, 989e12, 132, 450e9, 45e9),  # SXM
    "a100": Card(80e9, 2.04e12, 312e12, 108, 300e9, 22e9),  # SXM, 80 GB
    "a100-40gb": Card(40e9, 1.555e12, 312e12, 108, 300e9, 22e9),  # SXM
    "l40s": Card(48e9, 0.864e12, 362e12, 142, 32e9, 22e9),
    "l4": Card(24e9, 0.3e12, 121e12, 58, 32e9, 22e9),
    "rtx-5090": Card(32e9, 1.792e12, 209e12, 170, 64e9, 22e9),
    "rtx-4090": Card(24e9, 1.008e12, 165e12, 128, 32e9, 22e9),
    "cpu": Card(64e9, 100e9, 4e12, 0, 20e9, 5e9),  # a server socket with AMX, roughly
}


def find_card(device_name: str, memory_bytes: int) -> Card:
    """The card of a CUDA device such as "NVIDIA A100-SXM4-40GB": the one named so with at most this much memory.

    For an unknown name: of all with at most this much memory the largest, and of these the slowest. Where even the
    smallest has more memory, as beside a part of a GPU (MIG), it is that one.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    gpus = {name: card for name, card in CARDS.items() if card.num_sms}
    named = [card for name, card in gpus.items() if name.removeprefix("rtx-").split("-")[0] in words]
    known = named or list(gpus.values())
    fitting = [card for card in known if NEARLY * card.memory_bytes <= memory_bytes]
    size = max(card.memory_bytes for card in fitting) if fitting else min(card.memory_bytes for card in known)
    return min((card for card in known if card.memory_bytes == size), key=lambda card: card.flops)
