"""What `baton doctor` knows of a machine and of the model on it. Values: doctor_probe finds, doctor_rules judges.

A row is ok: as it should be · warning: it works, but slower, or not for all · missing: what the settings ask for cannot
be had.
"""

from dataclasses import dataclass
from typing import Literal

from wire.kv_layout import PagePart
from worker.limits import ModelShape

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]  # compute capability, such as (9, 0)
    uuid: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not depend on a model. Empty strings: not there."""

    num_cores: int  # within the container's quota
    num_host_cores: int
    memory_bytes: int  # available, within the container's limit
    instruction_sets: tuple[str, ...]  # avx2, avx512, ... that the CPU has and kernels know
    cpp_compiler: str
    kernel_error: str  # why the CPU kernels cannot be built or loaded
    products: str  # what products reach of the machine's ceilings; empty: not measured
    are_products_slow: bool  # below half of both
    reading_rate: float  # bytes a second of memory; 0: not measured
    c_compiler: str  # what Triton builds its launchers with
    has_python_header: bool  # Python.h, which these include
    has_own_pid_namespace: bool  # not the host's
    has_own_ipc_namespace: bool
    memory_file_error: str  # why there is no memory file (memfd)
    locked_bytes: int  # limit of locked memory; -1: none
    torch: str
    torch_cuda: str  # the CUDA version torch is built with
    torch_architectures: tuple[str, ...]  # that torch has kernels for: "8.0", "12.0+PTX"; empty: unknown
    driver: str
    num_driver_gpus: int
    visible_gpus: tuple[str, ...]  # as `baton serve` deals them out
    visible_setting: str  # CUDA_VISIBLE_DEVICES
    gpus: tuple[Gpu, ...]  # as torch numbers them
    strangers: tuple[tuple[int, int], ...]  # pairs of which the first cannot read the second's memory
    linked: tuple[tuple[int, int], ...]  # pairs that NVLink joins, the smaller number first
    triton: str
    flashinfer: str
    flashinfer_error: str  # why it cannot be imported
    flashinfer_modules: tuple[str, ...]  # built ahead
    flashinfer_architectures: tuple[str, ...]  # that they are built for; empty: not listed beside them
    no_compiler: str  # why FlashInfer cannot compile others
    nixl: str
    rdma_devices: tuple[str, ...]  # that the kernel has, such as mlx5_0


@dataclass(frozen=True, slots=True)
class Model:
    """The model, in the dtype and on the device that the settings lead to."""

    device: str
    dtype: str
    kv_dtype: str
    head_dim: int
    modules: tuple[str, ...]  # of FlashInfer, that it needs; empty on a CPU
    has_native_code: bool  # False: transformers' own code runs
    context_tokens: int
    parts: tuple[PagePart, ...]  # of a page: the model's and the draft model's
    weight_bytes: int  # of both models' files
    attention: str
    attention_reason: str
    is_fallback: bool  # a faster attention exists but cannot be used
    shape: ModelShape


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `part` is a stable key."""

    part: str
    status: Status
    found: str
    advice: str = ""  # one line: the setting or package that changes it
