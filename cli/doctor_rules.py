"""What `baton doctor` knows of a machine and of the model on it, and what the machine means for `baton serve`. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from engine.cuda.modules import BuiltAhead, find_gap, runs_on
from runtime.config import ServeConfig
from runtime.config_parts import GPU_SHARE
from runtime.gpus import VISIBLE
from wire.kv_layout import PagePart
from worker.startup.limits import ModelShape

GIB = 1 << 30
OTHER_MEMORY_BYTES = 4 * GIB  # KV and processes
SIZES = (0.135, 0.35, 0.6, 1, 1.7, 3, 4, 8, 14, 24, 32, 70, 120)  # of models that people use, in billions of weights
WEIGHT_BYTES = {"bf16": 2, "int8": 1, "int4": 0.57}
PLEASANT_RATE = 10  # tokens a second: faster than most people read
FP8_SINCE = (8, 9)  # the first compute capability that converts and multiplies e4m3
DRIVERS = {12: 525, 13: 580}  # CUDA's major version |-> the first branch of NVIDIA's Linux driver that runs it
CUDA_12 = "pip install 'torch==2.11.*' --index-url ADDRESS_OF_THE_CU128_WHEEL_INDEX (on PyTorch's installation page)"

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class GpuFacts:
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
    multiplying_rate: float  # operations a second of a prompt's products in bfloat16; 0: not measured
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
    gpus: tuple[GpuFacts, ...]  # as torch numbers them
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
    tools: str  # how it writes calls, and why that is believed


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `part` is a stable key.

    ok: as it should be. warning: it works, but slower, or not for all. missing: the settings ask for what is not there.
    """

    part: str
    status: Status
    found: str
    advice: str = ""  # one line: the setting or package that changes it


def judge_machine(config: ServeConfig, machine: Machine, needed: frozenset[str] | None) -> Iterator[Row]:
    """Rows that need no model, without those that only a GPU needs where none is used.

    `needed`: FlashInfer's modules for the model; None: unknown.
    """
    is_on_gpu = config.device != "cpu" and bool(machine.gpus)
    yield Row("cores", "ok", f"{machine.num_cores} of {machine.num_host_cores} may be used")
    memory = f"{machine.memory_bytes / GIB:.1f} GiB may be taken, within the container's limit if it has one"
    yield Row("memory", "ok", memory)
    instructions = " ".join(machine.instruction_sets) or "none that the kernels are written for"
    yield Row("cpu instructions", "ok", instructions)
    yield judge_kernels(machine, is_on_gpu)
    if machine.reading_rate:
        yield suggest_models(machine)
    yield Row("torch", "ok", f"{machine.torch}, {f'CUDA {machine.torch_cuda}' if machine.torch_cuda else 'no CUDA'}")
    yield from judge_gpus(config, machine) if machine.gpus else [explain_no_gpu(config, machine)]
    if is_on_gpu:
        yield judge_triton(machine)
        yield judge_flashinfer(machine, needed)
        if len(machine.gpus) > 1:
            yield judge_peers(machine)
    has = {"PID": machine.has_own_pid_namespace, "IPC": machine.has_own_ipc_namespace}
    if own := [name for name, is_own in has.items() if is_own]:
        advice = "workers in other containers must share the PID namespace, and IPC for CUDA: docker run --pid, --ipc"
        yield Row("namespaces", "ok", f"{' and '.join(own)} of a container's own", advice)
    else:
        yield Row("namespaces", "ok", "PID and IPC are the host's")
    locked = "unlimited" if machine.locked_bytes == -1 else f"{machine.locked_bytes >> 20} MiB"
    if machine.memory_file_error:
        found = f"no memory file ({machine.memory_file_error}); locked memory {locked}"
        yield Row("shared memory", "warning", found, "allow memfd_create, or pages go over gRPC even on this host")
    else:
        yield Row("shared memory", "ok", f"memory files work; locked memory {locked}")
    yield judge_nixl(config, machine)


def judge_kernels(machine: Machine, is_on_gpu: bool) -> Row:
    """The C++ kernels, without which a CPU attends and samples by torch, and what they reach of its ceilings."""
    if not machine.kernel_error:
        found = f"built by {machine.cpp_compiler}" + (f"; {machine.products}" if machine.products else "")
        if not machine.are_products_slow:
            return Row("cpu kernels", "ok", found)
        advice = "end other programs and look again, or set CXX to a newer g++"
        return Row("cpu kernels", "warning", f"slow: {found}", advice)
    if is_on_gpu:
        return Row("cpu kernels", "ok", "not built, and not needed on a GPU")
    advice = "set CXX to a compiler that works" if machine.cpp_compiler else "install g++"
    return Row("cpu kernels", "warning", machine.kernel_error, f"{advice}; until then attention is slow")


def suggest_models(machine: Machine) -> Row:
    """The largest models whose weights fit, and the largest that are pleasant to read from, by format."""
    room = machine.memory_bytes - OTHER_MEMORY_BYTES

    def list_largest(most_bytes: float) -> str:
        found = []
        for name, weight_bytes in WEIGHT_BYTES.items():
            size = max((size for size in SIZES if size * 1e9 * weight_bytes <= most_bytes), default=None)
            rate = f"{size:g}B ({machine.reading_rate / (size * 1e9 * weight_bytes):.2g} tokens/s)" if size else "none"
            found.append(f"{name} {rate}")
        return ", ".join(found)

    quick = list_largest(min(room, machine.reading_rate / PLEASANT_RATE))
    return Row(
        "what fits", "ok", f"models up to {list_largest(room)}; at {PLEASANT_RATE} tokens/s and more up to {quick}; "
        f"a model of 1B reads prompts at {machine.multiplying_rate / 2e9:,.0f} tokens/s, others in proportion",
        "of one stream, if a token reads all weights once; more streams share the reading, and of a mixture of experts "
        "only the active weights count; prompts without their attention, which grows with the context",
    )  # fmt: skip


def judge_nixl(config: ServeConfig, machine: Machine) -> Row:
    """What --transport nixl needs on this host. Only a hand-off shows whether UCX can use a device."""
    is_wanted, devices = config.transport == "nixl", ", ".join(machine.rdma_devices)
    if not machine.nixl:
        extra = "nixl-cu12" if machine.torch_cuda.startswith("12.") else "nixl"
        advice = f"pip install 'baton[{extra}]'" if is_wanted else ""
        return Row("nixl", "missing" if is_wanted else "ok", "not installed", advice)
    found = f"{machine.nixl}, {f'RDMA by {devices}' if devices else 'no RDMA device'}"
    if is_wanted and not devices and not config.nixl_allow_tcp:
        return Row("nixl", "warning", found, "between hosts it would read by TCP, which takes --nixl-allow-tcp")
    return Row("nixl", "ok", found)


def judge_gpus(config: ServeConfig, machine: Machine) -> Iterator[Row]:
    """A row for each GPU."""
    for index, gpu in enumerate(machine.gpus):
        major, minor = gpu.capability
        found = (
            f"{gpu.name}, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, compute capability "
            f"{major}.{minor} ({'fp8' if gpu.capability >= FP8_SINCE else 'no fp8'} for weights and KV), "
            f"driver {machine.driver or 'unknown'}"
        )
        advice = ""
        status: Status = "warning"
        if machine.torch_architectures and not any(runs_on(one, gpu.capability) for one in machine.torch_architectures):
            has = " ".join(machine.torch_architectures)
            found = f"{found}; torch {machine.torch} has kernels for {has}, none for this GPU"
            advice, status = suggest_torch(machine.driver), "missing"
        elif major < 8 and config.dtype != "float16":
            advice = "it computes bfloat16 slowly: set --dtype float16"
        elif gpu.free_bytes < GPU_SHARE * gpu.total_bytes and not config.gpu_memory_share:
            advice = f"workers count on {GPU_SHARE:g} of it: end other programs, or set --gpu-memory-share"
        yield Row(f"gpu {index}", status if advice and config.device != "cpu" else "ok", found, advice)


def explain_no_gpu(config: ServeConfig, machine: Machine) -> Row:
    """Why torch sees none, which matters unless --device is cpu."""
    if not machine.num_driver_gpus:
        found, advice = "the driver shows none", "install NVIDIA's driver, or start the container with --gpus all"
    elif not machine.torch_cuda:
        found = f"the driver shows {machine.num_driver_gpus}, but torch {machine.torch} is built without CUDA"
        advice = suggest_torch(machine.driver)
    elif not machine.visible_gpus:
        found = f"the driver shows {machine.num_driver_gpus}, {VISIBLE}={machine.visible_setting!r} none"
        advice = f"unset {VISIBLE}"
    else:
        found, advice = explain_driver(machine)
    if config.device == "cuda":
        return Row("gpu", "missing", found, f"{advice}, or set --device cpu")
    is_wasted = bool(machine.num_driver_gpus) and config.device == "auto"
    return Row("gpu", "warning" if is_wasted else "ok", found, advice if is_wasted else "")


def suggest_torch(driver: str) -> str:
    """The wheel for a driver; an unknown driver counts as new."""
    branch = int(driver.partition(".")[0] or DRIVERS[13])
    if branch >= DRIVERS[13]:
        return "install torch's CUDA wheel, PyPI's is for CUDA 13"
    if branch >= DRIVERS[12]:
        return f"install torch's CUDA wheel for CUDA 12, which driver {driver} runs: {CUDA_12}"
    return f"update NVIDIA's driver to {DRIVERS[13]} or newer; torch's CUDA wheels need {DRIVERS[12]} at least"


def explain_driver(machine: Machine) -> tuple[str, str]:
    """Why a driver that shows GPUs does not start torch's CUDA, and what to do."""
    found = f"driver {machine.driver or 'unknown'} does not start torch's CUDA {machine.torch_cuda}"
    branch, needed = machine.driver.partition(".")[0], DRIVERS.get(int(machine.torch_cuda.partition(".")[0]))
    if not branch or not needed or int(branch) >= needed:
        return found, "see what nvidia-smi says: after an update of NVIDIA's driver the machine must start again"
    advice = f"update NVIDIA's driver to {needed} or newer"
    if int(branch) >= DRIVERS[12]:
        advice = f"{advice}, or install torch for CUDA 12: {CUDA_12}"
    return f"{found}, which needs {needed} or newer", advice


def judge_triton(machine: Machine) -> Row:
    """Compiles Baton's own GPU kernels when they are first used."""
    if not machine.triton:
        return Row("triton", "warning", "not installed", "pip install triton; until then torch computes more slowly")
    if not machine.c_compiler:
        return Row("triton", "warning", f"{machine.triton}, no C compiler", "install gcc, which its launchers need")
    if not machine.has_python_header:
        advice = "install Python's headers (python3-dev on Debian, python3-devel on Fedora), which its launchers need"
        return Row("triton", "warning", f"{machine.triton}, no Python.h", advice)
    return Row("triton", "ok", f"{machine.triton}, {machine.c_compiler}")


def judge_flashinfer(machine: Machine, needed: frozenset[str] | None) -> Row:
    """Whether it can be imported and has modules for this model: built ahead, or by nvcc on first use."""
    if not machine.flashinfer:
        return Row("flashinfer", "warning", "not installed", "pip install 'baton[cuda]'; until then attention is slow")
    if machine.flashinfer_error:
        found = f"{machine.flashinfer} cannot be imported: {machine.flashinfer_error}"
        return Row("flashinfer", "warning", found, "install what it lacks: pip install 'baton[cuda]'")
    built = BuiltAhead(frozenset(machine.flashinfer_modules), machine.flashinfer_architectures)
    found = machine.flashinfer
    if built.modules:
        found = f"{found}, {len(built.modules)} modules built ahead for {' '.join(built.architectures) or '?'}"
    needed = built.modules if needed is None else needed
    for index, gpu in enumerate(machine.gpus):
        if gap := find_gap(needed, built, gpu.capability, machine.no_compiler):
            gap, _, advice = gap.rpartition(": ")
            found = f"{found}; gpu {index}: {gap}"
            return Row("flashinfer", "warning", found, f"{advice}; until then attention is slow")
    if needed <= built.modules:
        return Row("flashinfer", "ok", found)
    return Row("flashinfer", "ok", f"{found}; nvcc builds what the model needs on first use, which takes minutes")


def judge_peers(machine: Machine) -> Row:
    """Whether GPUs read each other's memory without the host, and over what."""
    pairs = set(combinations(range(len(machine.gpus)), 2))
    apart = {(min(two), max(two)) for two in machine.strangers}
    links = pairs & set(machine.linked) - apart
    over = "NVLink" if links == pairs - apart else f"NVLink between {name_pairs(links)}, else PCIe" if links else "PCIe"
    if not apart:
        return Row("peer access", "ok", f"between all GPUs, over {over}: --transport cuda_ipc can read pages")
    found = f"not between {name_pairs(apart)}" + (f"; the others over {over}" if pairs - apart else "")
    advice = f"set {VISIBLE} to GPUs that have it; pages between others go through the host"
    return Row("peer access", "warning", found, advice)


def name_pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{one} and {other}" for one, other in sorted(pairs))
