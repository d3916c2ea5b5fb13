"""Facts that `baton doctor` judges: of the machine, of each GPU and of the models."""

from dataclasses import dataclass

from wire.kv_layout import PagePart
from worker.startup.limits import ModelShape


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU that torch can use."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]  # compute capability, such as (9, 0)
    uuid: str
    readable: tuple[str, ...]  # UUIDs of the GPUs whose memory it can read, itself included


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the machine that need no model. An empty string: there is none."""

    num_cores: int  # within the container's quota
    num_host_cores: int
    memory_bytes: int  # available, within the container's limit
    unknown_limits: dict[str, str]  # see find_unknown_limits
    instruction_sets: tuple[str, ...]  # avx2, avx512, ... that the CPU has and kernels know
    cpp_compiler: str
    kernel_error: str  # why the CPU kernels cannot be built or loaded
    products: str  # the machine's ceilings, and what matrix products reach of them; empty: not measured
    are_products_slow: bool  # below half of both ceilings
    c_compiler: str  # what Triton builds its launchers with
    has_python_header: bool  # Python.h, which these include
    own_namespaces: tuple[str, ...]  # of PID and IPC, those that are not the host's
    memory_file_error: str  # why there is no memory file (memfd)
    locked_bytes: int  # limit of locked memory; -1: none
    torch: str
    torch_cuda: str  # the CUDA version torch is built with
    driver: str
    num_driver_gpus: int
    visible_gpus: tuple[str, ...]  # as `baton serve` deals them out
    visible_setting: str  # CUDA_VISIBLE_DEVICES
    gpus: tuple[GpuFacts, ...]  # as torch numbers them
    triton: str
    flashinfer: str
    no_cuda_compiler: str  # why FlashInfer could compile no module
    nixl: str
    rdma_devices: tuple[str, ...]  # that the kernel has, such as mlx5_0


@dataclass(frozen=True, slots=True)
class Model:
    """The model, in the dtype and on the device that the settings lead to."""

    device: str
    dtype: str
    kv_dtype: str
    head_dim: int
    has_native_code: bool  # False: transformers' own code runs
    context_tokens: int
    parts: tuple[PagePart, ...]  # of a page: the model's and the draft model's
    weight_bytes: int  # of both models' files
    attention: str
    attention_reason: str
    is_fallback: bool  # a faster attention exists but cannot be used
    shape: ModelShape
    tools: str  # how it writes calls, and why that is believed
    embeds: bool = False  # it makes vectors of texts, on prefill workers alone
