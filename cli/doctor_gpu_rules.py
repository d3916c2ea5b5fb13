"""What the facts about GPUs, their drivers and packages mean for `baton serve`: rows of cli/doctor_rules.py. Pure."""

from collections.abc import Iterable, Iterator
from itertools import combinations

from cli.doctor_facts import Machine, Model, Row, Status
from engine.attention.modules import BuiltAhead, find_gap, runs_on
from runtime.config import ServeConfig
from runtime.config_parts import GPU_SHARE
from runtime.gpus import VISIBLE

GIB = 1 << 30
FP8_SINCE = (8, 9)  # the first compute capability that converts and multiplies e4m3
DRIVERS = {12: 525, 13: 580}  # CUDA's major version |-> the first branch of NVIDIA's Linux driver that runs it
CUDA_12 = "pip install 'torch==2.11.*' --index-url ADDRESS_OF_THE_CU128_WHEEL_INDEX (on PyTorch's installation page)"


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


def judge_flashinfer(machine: Machine, model: Model | Exception) -> Row:
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
    needed = built.modules if isinstance(model, Exception) else frozenset(model.modules)
    gaps = [find_gap(needed, built, gpu.capability, machine.no_compiler) for gpu in machine.gpus]
    for index, gap in enumerate(gaps):
        if gap:
            gap, _, advice = gap.rpartition(": ")
            return Row(
                "flashinfer", "warning", f"{found}; gpu {index}: {gap}", f"{advice}; until then attention is slow"
            )
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
