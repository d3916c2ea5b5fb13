"""`baton doctor`: facts about a machine and its models |-> rows of the report. Pure.

What workers would do is the planner's own answer, with its reason: plan_workers, plan_pools and choose_transport.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cli.doctor_facts import Machine, Model
from cli.plan import WorkerPlan, choose_prefill_workers, plan_workers
from engine.cuda.modules import find_other_version
from engine.cuda.sizes import most_logits
from kvtransfer.cuda_ipc import GpuMemory
from kvtransfer.transports import choose_transport
from protos import kv_pb2
from runtime.config import ServeConfig
from runtime.config_parts import GPU_SHARE
from runtime.gpus import VISIBLE, find_card
from runtime.settings import ConfigError
from wire.kv_layout import page_bytes_of
from worker.startup.limits import limits_of
from worker.startup.pool_size import PoolPlan, plan_pools

GIB = 1 << 30

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `part` is a stable key.

    ok: as it should be. warning: it works, but slower, or not for all. missing: the settings ask for what is not there.
    """

    part: str
    status: Status
    found: str
    advice: str = ""  # one line: the setting or package that changes it


def judge(config: ServeConfig, machine: Machine, *models: Model | Exception) -> list[Row]:
    """All rows. `models`: those of `config`, or why one cannot be examined."""
    rows = [*judge_machine(config, machine)]
    for text, model in zip(config.model, models, strict=True):
        name, _, source = text.partition("=") if len(models) > 1 else ("", "", text)
        own = judge_service(config, machine, model, name, source)
        rows += [replace(row, part=f"{name} {row.part.removeprefix(f'{name} ')}".strip()) for row in own]
    return rows


# -- the machine -----------------------------------------------------------------------------------------------------


def judge_machine(config: ServeConfig, machine: Machine) -> Iterator[Row]:
    """Rows that need no model, without those that only a GPU needs where none is used."""
    is_on_gpu = config.device != "cpu" and bool(machine.gpus)
    yield Row("cores", "ok", f"{machine.num_cores} of {machine.num_host_cores} may be used")
    memory = f"{machine.memory_bytes / GIB:.1f} GiB may be taken, within the container's limit if it has one"
    yield Row("memory", "ok", memory)
    for part, why in machine.unknown_limits.items():
        found, _, advice = why.partition(": ")
        yield Row(part, "warning", found, advice)
    instructions = " ".join(machine.instruction_sets) or "none that the kernels are written for"
    yield Row("cpu instructions", "ok", instructions)
    yield judge_kernels(machine, is_on_gpu)
    yield Row("torch", "ok", f"{machine.torch}, {f'CUDA {machine.torch_cuda}' if machine.torch_cuda else 'no CUDA'}")
    yield from judge_gpus(config, machine) if machine.gpus else [explain_no_gpu(config, machine)]
    if is_on_gpu:
        lacks = "" if machine.c_compiler else "no C compiler: install gcc"
        lacks = lacks or ("" if machine.has_python_header else "no Python.h: install Python's headers (python3-dev)")
        lacks = lacks if machine.triton else "not installed: pip install triton"
        found, _, advice = lacks.partition(": ")
        advice = advice and f"{advice}; until then torch computes more slowly"
        yield Row("triton", "warning" if lacks else "ok", found or f"{machine.triton}, {machine.c_compiler}", advice)
        yield judge_flashinfer(machine)
    if machine.own_namespaces:
        advice = "workers in other containers must share the PID namespace, and IPC for CUDA: docker run --pid, --ipc"
        yield Row("namespaces", "ok", f"{' and '.join(machine.own_namespaces)} of a container's own", advice)
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


def judge_flashinfer(machine: Machine) -> Row:
    """Whether it is there, and a compiler for modules that are not; what a model needs, its worker's row says."""
    found, lacks = machine.flashinfer, machine.no_cuda_compiler
    if not found:
        return Row("flashinfer", "warning", "not installed", "pip install 'baton[cuda]'; until then attention is slow")
    if other := find_other_version(found):
        return Row("flashinfer", "warning", *other.split(": ", 1))
    if not lacks:
        return Row("flashinfer", "ok", found)
    found = f"{found}, compiles nothing: {lacks}"
    if lacks.endswith(" is set"):  # on purpose, as in our images
        return Row("flashinfer", "ok", found)
    package = "g++" if "g++" in lacks else "'baton[cuda]' by pip"
    return Row("flashinfer", "warning", found, f"install {package}; until then modules not built ahead are slow")


def judge_nixl(config: ServeConfig, machine: Machine) -> Row:
    """Whether this host has what --transport nixl needs. Only a hand-off shows whether UCX can use a device."""
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
            f"{major}.{minor}, driver {machine.driver or 'unknown'}"
        )
        advice = ""
        if major < 8 and config.dtype != "float16":
            advice = "it computes bfloat16 slowly: set --dtype float16"
        elif gpu.free_bytes < GPU_SHARE * gpu.total_bytes and not config.gpu_memory_share:
            advice = f"workers count on {GPU_SHARE:g} of it: end other programs, or set --gpu-memory-share"
        yield Row(f"gpu {index}", "warning" if advice and config.device != "cpu" else "ok", found, advice)


def explain_no_gpu(config: ServeConfig, machine: Machine) -> Row:
    """Why torch sees none, which matters unless --device is cpu."""
    found = f"the driver shows {machine.num_driver_gpus}"
    if not machine.num_driver_gpus:
        found, advice = "the driver shows none", "install NVIDIA's driver, or start the container with --gpus all"
    elif not machine.torch_cuda:
        found, advice = f"{found}, but torch {machine.torch} is built without CUDA", "install torch's CUDA wheel"
    elif not machine.visible_gpus:
        found, advice = f"{found}, {VISIBLE}={machine.visible_setting!r} none", f"unset {VISIBLE}"
    else:
        found = f"driver {machine.driver or 'unknown'} does not start torch's CUDA {machine.torch_cuda}"
        advice = "see what nvidia-smi says: update NVIDIA's driver, or install torch for an older CUDA"
    if config.device == "cuda":
        return Row("gpu", "missing", found, f"{advice}, or set --device cpu")
    is_wasted = bool(machine.num_driver_gpus) and config.device == "auto"
    return Row("gpu", "warning" if is_wasted else "ok", found, advice if is_wasted else "")


# -- the service -----------------------------------------------------------------------------------------------------


def judge_service(
    config: ServeConfig, machine: Machine, model: Model | Exception, name: str, source: str
) -> Iterator[Row]:
    """Rows on what `baton serve` would start for one model. `name`: where there are several."""
    if config.device == "cuda" and not machine.gpus:
        return  # the row of the GPU says it
    if isinstance(model, OSError):
        advice = "workers fetch it when they start; or set --model to a folder"
        yield Row("model", "warning", f"{source} is not on this machine", advice)
        return
    if isinstance(model, Exception):
        yield split_advice("model", model)
        return
    weights = f"weights {model.weight_bytes / GIB:.2f} GiB"
    code = "" if model.has_native_code else "; transformers' code, which is slower, on one rank"
    sizes = f"{weights}, context {model.context_tokens}, {model.shape.describe_kv()}"
    yield Row("model", "ok", f"{source} in {model.dtype}, {sizes}{code}")
    yield Row("tools", "ok", model.tools)
    gpus = machine.visible_gpus[: len(machine.gpus)]
    try:
        planned = plan_workers(config, gpus, embedding=(name,) if model.embeds else ())
        workers = [worker for worker in planned if worker.settings.model_name == name]
    except ConfigError as error:
        yield split_advice("workers", error)
        return
    num_prefill, why = choose_prefill_workers(config, len(gpus))
    if model.embeds:
        yield Row("workers", "ok", f"{len(workers)} prefill: it makes vectors of texts, and has no answers")
    else:
        yield Row("workers", "ok", f"{num_prefill} prefill, {config.decode_workers} decode: {why}")
    for worker in workers:
        try:
            yield judge_worker(worker, machine, model)
        except ConfigError as error:
            yield split_advice(worker.name, error)
    if model.embeds:
        return
    if workers[0].role == "decode":
        yield Row("hand-off", "ok", "none: decode workers prefill by themselves")
    else:
        yield judge_hand_off(config, workers[0], workers[-1], machine, model)


def judge_worker(worker: WorkerPlan, machine: Machine, model: Model) -> Row:
    """Where one worker computes, by what, its limits, and how large its pool becomes. Raises ConfigError."""
    tp, num_ranks = worker.settings.tp, worker.settings.num_ranks
    page_bytes = page_bytes_of(model.parts, 0, num_ranks, worker.settings.pp)
    card, memory_bytes, where = None, 0, "cpu" if num_ranks == 1 else f"cpu, {num_ranks} ranks"
    if model.device == "cuda":
        gpu, where = machine.gpus[worker.gpus[0]], f"gpu {', '.join(map(str, worker.gpus))}"
        card, memory_bytes = find_card(gpu.name, gpu.total_bytes), gpu.total_bytes
    plan = plan_pools(worker.settings, model.shape, page_bytes, card, memory_bytes, machine.memory_bytes)
    pool_bytes, slots_bytes = (
        num_ranks * plan.num_pages * page_bytes,
        tp * plan.num_slots * model.shape.slot_bytes_of(tp),
    )
    chunk_tokens = limits_of(plan.settings, model.shape.vocab_size, most_logits(memory_bytes)).chunk_tokens
    found = (
        f"{where}; attention {model.attention} ({model.attention_reason}); {chunk_tokens} prompt tokens in a step; KV "
        f"pool of {plan.num_pages * plan.settings.page_tokens} tokens in {pool_bytes / GIB:.2f} GiB: "
        f"{explain_pool(plan)}"
    )
    if plan.num_slots:
        found += f"; {plan.num_slots} slots of recurrent state in {slots_bytes / GIB:.2f} GiB"
    return Row(worker.name, "warning" if model.is_fallback else "ok", found)


def explain_pool(plan: PoolPlan) -> str:
    """The rule by which a pool gets its size."""
    settings, room = plan.settings, plan.room
    if settings.kv_memory_mib:
        return "--kv-memory-mib"
    within = f"{settings.kv_memory_share:.3g} of free memory"
    if room is not None:
        share = settings.gpu_memory_share or GPU_SHARE
        within = f"{share:.3g} of the GPU beside weights and about {room.reserve_bytes / GIB:.1f} GiB for computing"
    return f"room for {settings.max_running} contexts, within {within}"


def judge_hand_off(config: ServeConfig, prefill: WorkerPlan, decode: WorkerPlan, machine: Machine, model: Model) -> Row:
    """How decode workers would read pages of prefill workers, by the choice that they make themselves."""
    ours, theirs = (describe_peer(config, machine, model, worker) for worker in (decode, prefill))
    try:
        transport, why = choose_transport(ours, theirs, config.transport, config.require_transport)
    except ValueError as error:
        return Row("hand-off", "missing", str(error), "drop --require-transport")
    if config.transport not in ("auto", transport):
        return Row("hand-off", "missing", f"{transport}, not {config.transport}: {why}", "set --transport auto")
    is_slow = transport == "grpc" and config.transport == "auto"
    return Row("hand-off", "warning" if is_slow else "ok", f"{transport}: {why}")


def describe_peer(config: ServeConfig, machine: Machine, model: Model, worker: WorkerPlan) -> kv_pb2.Peer:
    """The part of a worker's identity that the choice of a transport needs."""
    pool_fd = None if machine.memory_file_error else 0
    peer = kv_pb2.Peer(address=worker.name, pid=sum(worker.name.encode()), pool_fd=pool_fd)  # of each its own
    for index in worker.gpus:
        transports = peer.ranks.add().transports
        if config.transport == "nixl" and machine.nixl:
            transports["nixl"] = b"registered"
        if model.device == "cuda":
            gpu = machine.gpus[index]
            transports["cuda_ipc"] = GpuMemory(gpu.uuid, gpu.readable, b"a handle").pack()
        elif pool_fd is not None:
            transports["shm"] = b""
    return peer


def split_advice(part: str, error: Exception) -> Row:
    """One of Baton's own errors as a row: it ends in what to set."""
    found, _, advice = str(error).rpartition(": ")
    return Row(part, "missing", found or str(error), advice if found else "")
