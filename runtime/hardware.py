"""What this machine has, and the pure choices that follow from it.

Knows cores and memory within container limits, nothing of torch: the caller passes GPU memory.
"""

import math
import os
import re
from pathlib import Path

from runtime.config import DecodeConfig, PrefillConfig
from runtime.config_parts import GPU_SHARE
from runtime.settings import ConfigError

CPU_ISA = "BATON_CPU_ISA"  # what CPU kernels are built for, see engine/kernels/build.py
CGROUP = Path("/sys/fs/cgroup")
GPU_RESERVE_BYTES = 2 << 30
"""The part of a worker's GPU share that is not for weights or pages: CUDA's context and libraries 0.5 GiB, attention
workspaces 0.4, CUDA graphs 0.3, activations 0.2 (mostly logits of 64 rows x 128k tokens x 4 bytes, copied a few times
in sampling). The sum is not quite doubled, as none of it has been measured on a GPU yet."""
MIB = 1 << 20


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


def resolve_pool(
    config: PrefillConfig | DecodeConfig,
    model_context_tokens: int,
    page_bytes: int,
    num_ranks: int,
    gpu_memory: tuple[int, int] | None,
    host_bytes: int,
) -> int:
    """Pages of a worker's pool: `kv_memory_mib` if set, else `max_running` full contexts within its share of memory.

    `page_bytes`: of one rank. `gpu_memory`: (bytes of a rank's GPU, bytes that the rank uses); None on a CPU, where
    `host_bytes` are free for all ranks. What other processes use of a GPU does not count: workers whose shares fit
    together fit in any start order. Raises ConfigError if not even one full context fits.
    """
    context_tokens = resolve_context(config.max_context_tokens, model_context_tokens)
    pages_per_context = -(-context_tokens // config.page_tokens)
    most, host_page_bytes = config.max_running * pages_per_context, num_ranks * page_bytes
    if config.kv_memory_mib:
        num_pages = config.kv_memory_mib * MIB // host_page_bytes
    elif gpu_memory is None:
        num_pages = min(most, int(host_bytes * config.kv_memory_share) // host_page_bytes)
    else:
        num_pages = min(most, _left_on_gpu(config, *gpu_memory) // page_bytes)
    if num_pages >= pages_per_context:
        return num_pages
    if gpu_memory is not None and not config.kv_memory_mib:
        raise ConfigError(_explain_small_gpu(config, context_tokens, page_bytes, *gpu_memory))
    needed_mib = -(-pages_per_context * host_page_bytes // MIB)
    raise ConfigError(
        f"kv_memory_mib={config.kv_memory_mib} holds {num_pages * config.page_tokens} tokens, less than one "
        f"context of {context_tokens}: set --kv-memory-mib {needed_mib} or more, or a smaller --max-context-tokens"
    )


def size_pool(
    config: PrefillConfig | DecodeConfig,
    model_context_tokens: int,
    page_bytes: int,
    num_ranks: int,
    gpu_memory: tuple[int, int] | None,
    mapped_bytes: int,
) -> int:
    """`resolve_pool` with this host's free memory, less mapped weights: these count as free, but are needed."""
    host_bytes = max(0, available_memory_bytes() - mapped_bytes)
    return resolve_pool(config, model_context_tokens, page_bytes, num_ranks, gpu_memory, host_bytes)


def _left_on_gpu(config: PrefillConfig | DecodeConfig, total_bytes: int, taken_bytes: int) -> int:
    """Bytes for pages in the worker's share of a GPU."""
    return max(0, int(total_bytes * (config.gpu_memory_share or GPU_SHARE)) - taken_bytes - GPU_RESERVE_BYTES)


def _explain_small_gpu(
    config: PrefillConfig | DecodeConfig, context_tokens: int, page_bytes: int, total_bytes: int, taken_bytes: int
) -> str:
    left_bytes = _left_on_gpu(config, total_bytes, taken_bytes)
    wanted_bytes = -(-context_tokens // config.page_tokens) * page_bytes
    wanted_share = math.ceil((taken_bytes + GPU_RESERVE_BYTES + wanted_bytes) / total_bytes * 100) / 100
    if left_bytes >= page_bytes:
        advice = f"--max-context-tokens {left_bytes // page_bytes * config.page_tokens} or less"
    elif wanted_share <= 1:
        advice = f"--gpu-memory-share {wanted_share:g} or more"
    else:
        advice = "--model to a smaller one"
    return (
        f"the GPU has no room for the KV of one context of {context_tokens} tokens: it takes {wanted_bytes // MIB} "
        f"MiB, and {left_bytes // MIB} MiB are left of {config.gpu_memory_share or GPU_SHARE:.3g} x "
        f"{total_bytes // MIB} MiB, of which weights take {taken_bytes // MIB} MiB and computing "
        f"{GPU_RESERVE_BYTES // MIB} MiB: set {advice}"
    )


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
