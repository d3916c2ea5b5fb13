"""What the facts about a machine mean for `baton serve`: a row for each part. Pure: facts and settings in, rows out.

ok: as it should be · warning: it works, but slower, or not for all · missing: what the settings ask for cannot be had.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from cli.doctor_facts import Machine, Model
from cli.plan import WorkerPlan, choose_prefill_workers, plan_workers
from engine.attention.modules import BuiltAhead, find_gap, runs_on
from kvtransfer.nixl_agent import NOT_INSTALLED
from kvtransfer.reader import choose_transport
from protos import kv_pb2
from runtime.cards import find_card
from runtime.config import DecodeConfig, PrefillConfig, ServeConfig
from runtime.config_parts import GPU_SHARE
from runtime.gpus import VISIBLE
from runtime.hardware import GpuRoom, resolve_pool
from runtime.settings import ConfigError
from wire.kv_layout import page_bytes_of
from worker.limits import complete, estimate_room, limits_of, with_context

GIB = 1 << 30
OTHER_MEMORY_BYTES = 4 * GIB  # KV and processes
SIZES = (0.135, 0.35, 0.6, 1, 1.7, 3, 4, 8, 14, 24, 32, 70, 120)  # of models that people use, in billions of weights
WEIGHT_BYTES = {"bf16": 2, "int8": 1, "int4": 0.57}
PLEASANT_RATE = 10  # tokens a second: faster than most people read
FP8_SINCE = (8, 9)  # the first compute capability that converts and multiplies e4m3
DRIVERS = {12: 525, 13: 580}  # CUDA's major version |-> the first branch of NVIDIA's Linux driver that runs it
CUDA_12 = "pip install 'torch==2.11.*' --index-url https://download.pytorch.org/whl/cu128"

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `part` is a stable key."""

    part: str
    status: Status
    found: str
    advice: str = ""  # one line: the setting or package that changes it


def judge(config: ServeConfig, machine: Machine, model: Model | Exception) -> list[Row]:
    """All rows, without those that only a GPU needs where none is used. `model`: or why it cannot be examined."""
    is_on_gpu = config.device != "cpu" and bool(machine.gpus)
    memory = f"{machine.memory_bytes / GIB:.1f} GiB may be taken, within the container's limit if it has one"
    instructions = " ".join(machine.instruction_sets) or "none that the kernels are written for"
    return [
        Row("cores", "ok", f"{machine.num_cores} of {machine.num_host_cores} may be used"),
        Row("memory", "ok", memory),
        Row("cpu instructions", "ok", instructions),
        judge_kernels(machine, is_on_gpu),
        *([suggest_models(machine)] if machine.reading_rate else []),
        Row("torch", "ok", f"{machine.torch}, {f'CUDA {machine.torch_cuda}' if machine.torch_cuda else 'no CUDA'}"),
        *(judge_gpus(config, machine) if machine.gpus else [explain_no_gpu(config, machine)]),
        *([judge_triton(machine), judge_flashinfer(machine, model)] if is_on_gpu else []),
        *([judge_peers(machine)] if is_on_gpu and len(machine.gpus) > 1 else []),
        judge_namespaces(machine),
        judge_shared_memory(machine),
        judge_nixl(config, machine),
        *judge_service(config, machine, model),
    ]


def judge_kernels(machine: Machine, is_on_gpu: bool) -> Row:
    """The C++ kernels, without which a CPU attends and samples by torch."""
    if not machine.kernel_error:
        return judge_products(machine)
    if is_on_gpu:
        return Row("cpu kernels", "ok", "not built, and not needed on a GPU")
    advice = "set CXX to a compiler that works" if machine.cpp_compiler else "install g++"
    return Row("cpu kernels", "warning", machine.kernel_error, f"{advice}; until then attention is slow")


def judge_products(machine: Machine) -> Row:
    """What they reach of the machine's ceilings, where they were measured."""
    found = f"built by {machine.cpp_compiler}" + (f"; {machine.products}" if machine.products else "")
    if not machine.are_products_slow:
        return Row("cpu kernels", "ok", found)
    return Row(
        "cpu kernels", "warning", f"slow: {found}", "end other programs and look again, or set CXX to a newer g++"
    )


def suggest_models(machine: Machine) -> Row:
    """The largest models whose weights fit, and the largest that are pleasant to read from, by format."""
    room = machine.memory_bytes - OTHER_MEMORY_BYTES

    def largest(most_bytes: float, weight_bytes: float) -> str:
        fitting = [size for size in SIZES if size * 1e9 * weight_bytes <= most_bytes]
        if not fitting:
            return "none"
        return f"{fitting[-1]:g}B ({machine.reading_rate / (fitting[-1] * 1e9 * weight_bytes):.2g} tokens/s)"

    fits = ", ".join(f"{name} {largest(room, num_bytes)}" for name, num_bytes in WEIGHT_BYTES.items())
    pleasant = min(room, machine.reading_rate / PLEASANT_RATE)
    quick = ", ".join(f"{name} {largest(pleasant, num_bytes)}" for name, num_bytes in WEIGHT_BYTES.items())
    return Row(
        "what fits", "ok", f"models up to {fits}; at {PLEASANT_RATE} tokens/s and more up to {quick}",
        "of one stream, if a token reads all weights once; more streams share the reading, and of a mixture of experts "
        "only the active weights count",
    )  # fmt: skip


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


def judge_namespaces(machine: Machine) -> Row:
    """Workers of one `baton serve` share theirs; other workers must share them to read each other's pools."""
    has = {"PID": machine.has_own_pid_namespace, "IPC": machine.has_own_ipc_namespace}
    own = [name for name, is_own in has.items() if is_own]
    if not own:
        return Row("namespaces", "ok", "PID and IPC are the host's")
    advice = "workers in other containers must share the PID namespace, and IPC for CUDA: docker run --pid, --ipc"
    return Row("namespaces", "ok", f"{' and '.join(own)} of a container's own", advice)


def judge_shared_memory(machine: Machine) -> Row:
    """Pools on a CPU are memory files. Only RDMA needs locked memory."""
    locked = "unlimited" if machine.locked_bytes == -1 else f"{machine.locked_bytes >> 20} MiB"
    if not machine.memory_file_error:
        return Row("shared memory", "ok", f"memory files work; locked memory {locked}")
    found = f"no memory file ({machine.memory_file_error}); locked memory {locked}"
    return Row("shared memory", "warning", found, "allow memfd_create, or pages go over gRPC even on this host")


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


def judge_service(config: ServeConfig, machine: Machine, model: Model | Exception) -> Iterator[Row]:
    """What `baton serve` would start."""
    if config.device == "cuda" and not machine.gpus:
        return  # the row of the GPU says it
    if isinstance(model, OSError):
        advice = "workers fetch it when they start; or set --model to a folder"
        yield Row("model", "warning", f"{config.model} is not on this machine", advice)
        return
    if isinstance(model, Exception):
        yield split_advice("model", str(model))
        return
    weights = f"weights {model.weight_bytes / GIB:.2f} GiB"
    code = "" if model.has_native_code else "; transformers' code, which is slower, on one rank"
    yield Row("model", "ok", f"{config.model} in {model.dtype}, {weights}, context {model.context_tokens}{code}")
    gpus = machine.visible_gpus[: len(machine.gpus)]
    try:
        plans = plan_workers(config, gpus)
    except ConfigError as error:
        yield split_advice("workers", str(error))
        return
    num_prefill, why = choose_prefill_workers(config, len(gpus))
    yield Row("workers", "ok", f"{num_prefill} prefill, {config.decode_workers} decode: {why}")
    for plan in plans:
        yield judge_worker(plan, machine, model)
    yield judge_hand_off(config, plans, machine, model)


def judge_worker(plan: WorkerPlan, machine: Machine, model: Model) -> Row:
    """Where one worker computes, by what, its limits, and how large its pool becomes."""
    tp = plan.settings.tp
    gpu = machine.gpus[plan.gpus[0]] if model.device == "cuda" else None
    page_bytes = page_bytes_of(model.parts, 0, tp)
    try:
        settings, room = complete(plan.settings, None, None), None
        if gpu:
            card = find_card(gpu.name, gpu.total_bytes)
            settings = complete(plan.settings, model.shape, card, gpu.total_bytes)
            shape = with_context(model.shape, settings)
            room = estimate_room(shape, limits_of(settings, shape.vocab_size), gpu.total_bytes, tp)
        pages = resolve_pool(settings, model.context_tokens, page_bytes, tp, room, machine.memory_bytes)
    except ConfigError as error:
        return split_advice(plan.name, str(error))
    tokens, pool_bytes = pages * settings.page_tokens, pages * tp * page_bytes
    where = f"gpu {', '.join(map(str, plan.gpus))}" if gpu else "cpu" if tp == 1 else f"cpu, {tp} ranks"
    limits = limits_of(settings, model.shape.vocab_size)
    found = (
        f"{where}; attention {model.attention} ({model.attention_reason}); {limits.chunk_tokens} prompt tokens in a "
        f"step; KV pool of {tokens} tokens in {pool_bytes / GIB:.2f} GiB: {explain_pool(settings, room)}"
    )
    return Row(plan.name, "warning" if model.is_fallback else "ok", found)


def explain_pool(settings: PrefillConfig | DecodeConfig, room: GpuRoom | None) -> str:
    """The rule by which a pool gets its size. `room`: of the GPU, if there is one."""
    if settings.kv_memory_mib:
        return "--kv-memory-mib"
    if room is not None:
        share = settings.gpu_memory_share or GPU_SHARE
        within = f"{share:.3g} of the GPU beside weights and about {room.reserve_bytes / GIB:.1f} GiB for computing"
    else:
        within = f"{settings.kv_memory_share:.3g} of free memory"
    return f"room for {settings.max_running} contexts, within {within}"


def judge_hand_off(config: ServeConfig, plans: Sequence[WorkerPlan], machine: Machine, model: Model) -> Row:
    """How decode workers would read pages of prefill workers, by the choice that they make themselves."""
    if plans[0].role == "decode":
        return Row("hand-off", "ok", "none: decode workers prefill by themselves")
    ours, theirs = (describe_peer(config, machine, model, plan) for plan in (plans[-1], plans[0]))
    try:
        obstacle = None if machine.nixl else NOT_INSTALLED
        transport, why = choose_transport(ours, theirs, config.transport, config.require_transport, obstacle)
    except ValueError as error:
        return Row("hand-off", "missing", str(error), "drop --require-transport")
    if config.transport not in ("auto", transport):
        return Row("hand-off", "missing", f"{transport}, not {config.transport}: {why}", "set --transport auto")
    is_slow = transport == "grpc" and config.transport == "auto"
    return Row("hand-off", "warning" if is_slow else "ok", f"{transport}: {why}")


def describe_peer(config: ServeConfig, machine: Machine, model: Model, plan: WorkerPlan) -> kv_pb2.Peer:
    """A worker of `baton serve` on this machine, as far as the choice of a transport looks at it."""
    gpus = [describe_gpu(machine, gpu) if model.device == "cuda" else None for gpu in plan.gpus]
    nixl = kv_pb2.Nixl() if config.transport == "nixl" and machine.nixl else None
    pid = 1 if plan.role == "prefill" else 2  # two processes
    pool_fd = None if machine.memory_file_error else 0
    ranks = [kv_pb2.Rank(gpu=gpu, nixl=nixl) for gpu in gpus]
    return kv_pb2.Peer(address="another worker", pid=pid, pool_fd=pool_fd, ranks=ranks)


def describe_gpu(machine: Machine, gpu: int) -> kv_pb2.Gpu:
    """The GPU of a pool whose memory can be exported."""
    others = (other for other in range(len(machine.gpus)) if (gpu, other) not in machine.strangers)
    readable = [machine.gpus[other].uuid for other in others]
    return kv_pb2.Gpu(uuid=machine.gpus[gpu].uuid, ipc_handle=b"a handle", readable=readable)


def split_advice(part: str, error: str) -> Row:
    """One of Baton's own errors as a row: it ends in what to set."""
    found, _, advice = error.rpartition(": ")
    return Row(part, "missing", found or error, advice if found else "")
