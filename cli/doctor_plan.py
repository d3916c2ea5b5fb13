"""The whole report of `baton doctor`: the machine, and what the planner of `baton serve` makes of it. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from cli.doctor_rules import GIB, Machine, Model, Row, judge_machine
from cli.plan import WorkerPlan, choose_prefill_workers, plan_workers
from kvtransfer.cuda_ipc import GpuMemory
from kvtransfer.transports import choose_transport
from protos import kv_pb2
from runtime.config import ServeConfig
from runtime.config_parts import GPU_SHARE
from runtime.gpus import find_card
from runtime.settings import ConfigError
from wire.kv_layout import page_bytes_of
from worker.startup.limits import limits_of
from worker.startup.pool_size import PoolPlan, plan_pools


def judge(config: ServeConfig, machine: Machine, *models: Model | Exception) -> list[Row]:
    """All rows. `models`: those of `config`, or why one cannot be examined."""
    known = [frozenset(model.modules) for model in models if not isinstance(model, Exception)]
    needed = frozenset[str]().union(*known) if known else None
    rows = [*judge_machine(config, machine, needed)]
    for text, model in zip(config.model, models, strict=True):
        name, _, source = text.partition("=") if len(models) > 1 else ("", "", text)
        own = judge_service(config, machine, model, name, source)
        rows += [replace(row, part=f"{name} {row.part.removeprefix(f'{name} ')}".strip()) for row in own]
    return rows


def judge_service(
    config: ServeConfig, machine: Machine, model: Model | Exception, name: str, source: str
) -> Iterator[Row]:
    """What `baton serve` would start for one model. `name`: where there are several."""
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
    yield Row("model", "ok", f"{source} in {model.dtype}, {weights}, context {model.context_tokens}{code}")
    yield Row("tools", "ok", model.tools)
    gpus = machine.visible_gpus[: len(machine.gpus)]
    try:
        workers = [worker for worker in plan_workers(config, gpus) if worker.settings.model_name == name]
    except ConfigError as error:
        yield split_advice("workers", error)
        return
    num_prefill, why = choose_prefill_workers(config, len(gpus))
    yield Row("workers", "ok", f"{num_prefill} prefill, {config.decode_workers} decode: {why}")
    for worker in workers:
        try:
            yield judge_worker(worker, machine, model)
        except ConfigError as error:
            yield split_advice(worker.name, error)
    if workers[0].role == "decode":
        yield Row("hand-off", "ok", "none: decode workers prefill by themselves")
    else:
        yield judge_hand_off(config, workers[0], workers[-1], machine, model)


def judge_worker(worker: WorkerPlan, machine: Machine, model: Model) -> Row:
    """Where one worker computes, by what, its limits, and how large its pool becomes. Raises ConfigError."""
    tp = worker.settings.tp
    page_bytes = page_bytes_of(model.parts, 0, tp)
    card, memory_bytes, where = None, 0, "cpu" if tp == 1 else f"cpu, {tp} ranks"
    if model.device == "cuda":
        gpu, where = machine.gpus[worker.gpus[0]], f"gpu {', '.join(map(str, worker.gpus))}"
        card, memory_bytes = find_card(gpu.name, gpu.total_bytes), gpu.total_bytes
    plan = plan_pools(worker.settings, model.shape, page_bytes, card, memory_bytes, machine.memory_bytes)
    pool_bytes, slots_bytes = (tp * plan.num_pages * page_bytes, tp * plan.num_slots * model.shape.slot_bytes_of(tp))
    chunk_tokens = limits_of(plan.settings, model.shape.vocab_size).chunk_tokens
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
    """A worker of `baton serve` on this machine, as far as the choice of a transport looks at it."""
    ranks, pool_fd = [], None if machine.memory_file_error else 0
    for own in worker.gpus:
        entries = {"nixl": b"registered"} if config.transport == "nixl" and machine.nixl else {}
        if model.device == "cuda":
            others = (other for other in range(len(machine.gpus)) if (own, other) not in machine.strangers)
            readable = tuple(machine.gpus[other].uuid for other in others)
            entries["cuda_ipc"] = GpuMemory(machine.gpus[own].uuid, readable, b"a handle").pack()
        elif pool_fd is not None:
            entries["shm"] = b""
        ranks.append(kv_pb2.Rank(transports=entries))
    pid = 1 if worker.role == "prefill" else 2  # two processes
    return kv_pb2.Peer(address="another worker", pid=pid, pool_fd=pool_fd, ranks=ranks)


def split_advice(part: str, error: Exception) -> Row:
    """One of Baton's own errors as a row: it ends in what to set."""
    found, _, advice = str(error).rpartition(": ")
    return Row(part, "missing", found or str(error), advice if found else "")
