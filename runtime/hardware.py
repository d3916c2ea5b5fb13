"""What this machine has, and the pure choices that follow from it.

Knows cores and memory within container limits, nothing of torch: the caller passes GPU memory.
"""

import math
import os
import re
from pathlib import Path
from typing import NamedTuple

from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import GPU_SHARE
from runtime.settings import ConfigError

CPU_ISA = "BATON_CPU_ISA"  # what CPU kernels are built for, see engine/kernels/build.py
CGROUP = Path("/sys/fs/cgroup")
MIB = 1 << 20
USEFUL_TOKENS = 1024  # a context below this is no advice
SLOTS_EACH, LEAST_SLOTS = 4, 4  # slots of state for a sequence: worker/states.py needs 3, the rest are checkpoints
SLOTS_SHARE = 0.5  # of the memory for KV and states, at most


class GpuRoom(NamedTuple):
    """The GPU of a rank. What other processes use of it does not count: shares that fit fit in any order of start."""

    total_bytes: int
    taken_bytes: int  # by what the rank holds already: weights, rows, workspaces
    reserve_bytes: int  # for computing and graphs (worker/limits.py)

    def left_bytes(self, share: float) -> int:
        """For pages, within a share of the GPU."""
        return max(0, int(self.total_bytes * share) - self.taken_bytes - self.reserve_bytes)


def num_cores() -> int:
    """Cores this process may use, within its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    return min(cores, max(1, round(int(quota) / int(period)))) if quota.isdecimal() else cores


def available_memory_bytes() -> int:
    """Main memory available without swapping, within the container's limit."""
    available = _meminfo_available_bytes()
    limit = _read(CGROUP / "memory.max")
    return min(available, max(0, int(limit) - _working_set_bytes())) if limit.isdecimal() else available


def _limit_torch() -> None:
    """Where kernels are to be built for AVX2 (engine/kernels/build.py), torch uses no more either."""
    if os.environ.get(CPU_ISA, "").startswith("avx2"):
        os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


def wait_without_spinning() -> None:
    """Let OpenMP threads sleep while they wait for each other. Call it before importing torch.

    By default they spin. If another process needs the core, each barrier then costs a scheduling quantum (measured: a
    decode step of two workers on two cores takes 10 times as long).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _limit_torch()


def resolve_threads(threads: int, num_cores: int) -> int:
    """`threads`, or all cores if it is 0."""
    return threads or max(1, num_cores)


def resolve_context(max_context_tokens: int, model_tokens: int) -> int:
    """The context limit in tokens: the model's, or the requested smaller one."""
    if max_context_tokens > model_tokens:
        raise ConfigError(
            f"max_context_tokens={max_context_tokens} is more than the model's {model_tokens}: "
            f"set --max-context-tokens {model_tokens} or less, or 0"
        )
    return max_context_tokens or model_tokens


def resolve_slots(
    config: PrefillConfig | DecodeConfig, slot_bytes: int, num_ranks: int, room: GpuRoom | None, host_bytes: int
) -> int:
    """Slots of state: some for each of `max_running` sequences, within half of the memory for KV. See `resolve_pool`.

    Raises ConfigError if one sequence has not enough.
    """
    memory_bytes = _memory_of_rank(config, num_ranks, room, host_bytes)
    num_slots = min(SLOTS_EACH * config.max_running + 1, int(memory_bytes * SLOTS_SHARE) // slot_bytes)
    if num_slots >= LEAST_SLOTS:
        return num_slots
    needed_mib = -(-int(LEAST_SLOTS * slot_bytes * num_ranks / SLOTS_SHARE) // MIB)
    raise ConfigError(
        f"the model's states take {slot_bytes * num_ranks // MIB} MiB a sequence, {LEAST_SLOTS} times for one, and "
        f"{int(memory_bytes * SLOTS_SHARE) * num_ranks // MIB} MiB are left: set --kv-memory-mib {needed_mib} or more"
    )


def resolve_pools(
    config: PrefillConfig | DecodeConfig,
    model_context_tokens: int,
    page_bytes: int,
    num_ranks: int,
    room: GpuRoom | None,
    host_bytes: int,
    slot_bytes: int,
) -> tuple[int, int]:
    """Pages, and slots of a model whose states take `slot_bytes` on a rank: `resolve_pool` and `resolve_slots`."""
    num_slots = resolve_slots(config, slot_bytes, num_ranks, room, host_bytes) if slot_bytes else 0
    states_bytes = num_slots * slot_bytes
    return resolve_pool(config, model_context_tokens, page_bytes, num_ranks, room, host_bytes, states_bytes), num_slots


def resolve_pool(
    config: PrefillConfig | DecodeConfig,
    model_context_tokens: int,
    page_bytes: int,
    num_ranks: int,
    room: GpuRoom | None,
    host_bytes: int,
    states_bytes: int = 0,
) -> int:
    """Pages of a worker's pool: `kv_memory_mib` if set, else `max_running` full contexts within its share of memory.

    `config`: completed by worker/limits.py. `page_bytes`: of one rank. `room`: of a rank's GPU; None on a CPU, where
    `host_bytes` are free for all ranks. `states_bytes`: of one rank's slots, which take their part of the same memory.
    Raises ConfigError if not even one full context fits.
    """
    context_tokens = resolve_context(config.max_context_tokens, model_context_tokens)
    pages_per_context = -(-context_tokens // config.page_tokens)
    memory_bytes = _memory_of_rank(config, num_ranks, room, host_bytes)
    num_pages = max(0, memory_bytes - states_bytes) // page_bytes
    if not config.kv_memory_mib:
        num_pages = min(config.max_running * pages_per_context, num_pages)
    needed_mib = -(-num_ranks * (pages_per_context * page_bytes + states_bytes) // MIB)
    if room is not None:
        room = room._replace(taken_bytes=room.taken_bytes + states_bytes)
        advice = _advise_on_gpu(config, num_pages, pages_per_context, page_bytes, needed_mib, room)
        if advice:
            raise ConfigError(f"{_describe_gpu(config, pages_per_context, page_bytes, room)}: set {advice}")
        return num_pages
    if num_pages >= pages_per_context:
        return num_pages
    raise ConfigError(
        f"kv_memory_mib={config.kv_memory_mib} holds {num_pages * config.page_tokens} tokens, less than one "
        f"context of {context_tokens}: set --kv-memory-mib {needed_mib} or more, or a smaller --max-context-tokens"
    )


def _memory_of_rank(config: PrefillConfig | DecodeConfig, num_ranks: int, room: GpuRoom | None, host_bytes: int) -> int:
    """Bytes for pages and slots. Parameters: see `resolve_pool`."""
    if config.kv_memory_mib:
        return config.kv_memory_mib * MIB // num_ranks
    if room is None:
        return int(host_bytes * config.kv_memory_share) // num_ranks
    return room.left_bytes(config.gpu_memory_share or GPU_SHARE)


def _advise_on_gpu(
    config: PrefillConfig | DecodeConfig, num_pages: int, wanted: int, page_bytes: int, needed_mib: int, room: GpuRoom
) -> str:
    """The setting by which `wanted` pages, or fewer, fit; empty where `num_pages` do.

    Each advice is for what remains when the one before was followed: a share, then a context, then a smaller model.
    """
    share = config.gpu_memory_share or GPU_SHARE
    left, at_most = (room.left_bytes(part) // page_bytes for part in (share, 1.0))
    if config.kv_memory_mib:
        if wanted <= num_pages <= left:
            return ""
        wanted_mib = needed_mib if num_pages < wanted else left * config.tp * page_bytes // MIB
        if not wanted <= wanted_mib * MIB // (config.tp * page_bytes) <= left:
            return "--kv-memory-mib 0, for what is left"
        return f"--kv-memory-mib {wanted_mib} or {'more' if num_pages < wanted else 'less'}"
    if num_pages >= wanted:
        return ""
    if left * config.page_tokens >= USEFUL_TOKENS:
        return f"--max-context-tokens {left * config.page_tokens} or less"
    few = wanted if wanted <= at_most else min(wanted, -(-USEFUL_TOKENS // config.page_tokens))
    wanted_bytes = room.taken_bytes + room.reserve_bytes + (few + 1) * page_bytes
    wanted_share = math.ceil(wanted_bytes / room.total_bytes * 100) / 100
    if share < wanted_share <= 1:
        return f"--gpu-memory-share {wanted_share:g} or more"
    return "--model to a smaller one, or give the worker more GPUs by --tp (under serve --prefill-tp, --decode-tp)"


def _describe_gpu(config: PrefillConfig | DecodeConfig, wanted: int, page_bytes: int, room: GpuRoom) -> str:
    share = config.gpu_memory_share or GPU_SHARE
    wanted_mib, left_mib = wanted * page_bytes // MIB, room.left_bytes(share) // MIB
    asked = config.kv_memory_mib
    what = f"kv_memory_mib={asked} cannot be used" if asked else "the GPU has no room for the KV of one context"
    return (
        f"{what}: {wanted * config.page_tokens} tokens take {wanted_mib} MiB on each GPU, and {left_mib} MiB are left "
        f"of {share:.3g} x {room.total_bytes // MIB} MiB, of which weights and rows take {room.taken_bytes // MIB} MiB "
        f"and computing {room.reserve_bytes // MIB} MiB"
    )


def size_pool(
    config: PrefillConfig | DecodeConfig,
    model_context_tokens: int,
    page_bytes: int,
    num_ranks: int,
    room: GpuRoom | None,
    mapped_bytes: int,
    slot_bytes: int = 0,
) -> tuple[int, int]:
    """`resolve_pools` with this host's free memory, less mapped weights: these count as free, but are needed."""
    host_bytes = max(0, available_memory_bytes() - mapped_bytes)
    return resolve_pools(config, model_context_tokens, page_bytes, num_ranks, room, host_bytes, slot_bytes)


def _meminfo_available_bytes() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # not Linux: assume that half is free


def _working_set_bytes() -> int:
    """The container's memory use, without file cache not used recently, such as a model just downloaded."""
    used = _read(CGROUP / "memory.current")
    cached = re.search(r"^inactive_file (\d+)$", _read(CGROUP / "memory.stat"), re.MULTILINE)
    return max(0, (int(used) if used.isdecimal() else 0) - (int(cached[1]) if cached else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
