"""Peak figures of GPUs from data sheets; links between hosts are assumptions."""

from dataclasses import dataclass
from typing import Literal

GpuName = Literal["h200", "h100", "a100", "l40s", "cpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks of one GPU, or of a CPU socket, from the data sheet."""

    memory_bytes: float
    bytes_per_s: float  # of its memory
    flops: float  # dense bfloat16
    link_bytes_per_s: float  # to the other GPUs of its host, one way
    handoff_bytes_per_s: float  # of KV from a prefill to a decode worker


GPUS: dict[GpuName, Gpu] = {
    "h200": Gpu(141e9, 4.8e12, 989e12, 450e9, 45e9),
    "h100": Gpu(80e9, 3.35e12, 989e12, 450e9, 45e9),  # SXM
    "a100": Gpu(80e9, 2.04e12, 312e12, 300e9, 22e9),  # SXM, 80 GB
    "l40s": Gpu(48e9, 0.864e12, 362e12, 32e9, 22e9),
    "cpu": Gpu(64e9, 100e9, 4e12, 20e9, 5e9),  # a server socket with AMX, roughly
}
