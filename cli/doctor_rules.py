"""What the facts about a machine mean for `baton serve`: a row for each part. Pure: facts and settings in, rows out."""

from collections.abc import Iterator, Sequence

from cli.doctor_facts import Machine, Model, Row
from cli.doctor_gpu_rules import explain_no_gpu, judge_flashinfer, judge_gpus, judge_peers, judge_triton
from cli.plan import WorkerPlan, choose_prefill_workers, plan_workers
from kvtransfer.cuda_ipc import GpuMemory
from kvtransfer.transports import choose_transport
from protos import kv_pb2
from runtime.cards import find_card
from runtime.config import DecodeConfig, PrefillConfig, ServeConfig
from runtime.config_parts import GPU_SHARE
from runtime.hardware import GpuRoom, resolve_pools
from runtime.settings import ConfigError
from wire.kv_layout import page_bytes_of
from worker.limits import complete, estimate_room, limits_of, with_context

GIB = 1 << 30
OTHER_MEMORY_BYTES = 4 * GIB  # KV and processes
SIZES = (0.135, 0.35, 0.6, 1, 1.7, 3, 4, 8, 14, 24, 32, 70, 120)  # of models that people use, in billions of weights
WEIGHT_BYTES = {"bf16": 2, "int8": 1, "int4": 0.57}
PLEASANT_RATE = 10  # tokens a second: faster than most people read


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
        slot_bytes = model.shape.slot_bytes_of(tp)
        pages, slots = resolve_pools(
            settings, model.context_tokens, page_bytes, tp, room, machine.memory_bytes, slot_bytes
        )
    except ConfigError as error:
        return split_advice(plan.name, str(error))
    tokens, pool_bytes = pages * settings.page_tokens, pages * tp * page_bytes
    where = f"gpu {', '.join(map(str, plan.gpus))}" if gpu else "cpu" if tp == 1 else f"cpu, {tp} ranks"
    limits = limits_of(settings, model.shape.vocab_size)
    found = (
        f"{where}; attention {model.attention} ({model.attention_reason}); {limits.chunk_tokens} prompt tokens in a "
        f"step; KV pool of {tokens} tokens in {pool_bytes / GIB:.2f} GiB: {explain_pool(settings, room)}"
    )
    if slots:
        found += f"; {slots} slots of states in {slots * tp * slot_bytes / GIB:.2f} GiB"
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
        transport, why = choose_transport(ours, theirs, config.transport, config.require_transport)
    except ValueError as error:
        return Row("hand-off", "missing", str(error), "drop --require-transport")
    if config.transport not in ("auto", transport):
        return Row("hand-off", "missing", f"{transport}, not {config.transport}: {why}", "set --transport auto")
    is_slow = transport == "grpc" and config.transport == "auto"
    return Row("hand-off", "warning" if is_slow else "ok", f"{transport}: {why}")


def describe_peer(config: ServeConfig, machine: Machine, model: Model, plan: WorkerPlan) -> kv_pb2.Peer:
    """A worker of `baton serve` on this machine, as far as the choice of a transport looks at it."""
    ranks, pool_fd = [], None if machine.memory_file_error else 0
    for gpu in plan.gpus:
        entries = {"nixl": b"registered"} if config.transport == "nixl" and machine.nixl else {}
        if model.device == "cuda":
            entries["cuda_ipc"] = describe_gpu(machine, gpu).pack()
        elif pool_fd is not None:
            entries["shm"] = b""
        ranks.append(kv_pb2.Rank(transports=entries))
    pid = 1 if plan.role == "prefill" else 2  # two processes
    return kv_pb2.Peer(address="another worker", pid=pid, pool_fd=pool_fd, ranks=ranks)


def describe_gpu(machine: Machine, gpu: int) -> GpuMemory:
    """The GPU of a pool whose memory can be exported."""
    others = (other for other in range(len(machine.gpus)) if (gpu, other) not in machine.strangers)
    readable = tuple(machine.gpus[other].uuid for other in others)
    return GpuMemory(machine.gpus[gpu].uuid, readable, b"a handle")


def split_advice(part: str, error: str) -> Row:
    """One of Baton's own errors as a row: it ends in what to set."""
    found, _, advice = error.rpartition(": ")
    return Row(part, "missing", found or error, advice if found else "")
