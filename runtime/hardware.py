"""What this machine has, within container limits, and which packages. Nothing of torch."""

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPU_ISA = "BATON_CPU_ISA"  # what CPU kernels are built for, see engine/cpu/build.py
CGROUP = Path("/sys/fs/cgroup")


def find_version(distribution: str) -> str:
    """Of an installed package; empty when it is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


OWN_VERSION = find_version("baton") or "unknown"


def num_cores() -> int:
    """Cores this process may use, within its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    return min(cores, max(1, round(int(quota) / int(period)))) if quota.isdecimal() else cores


def resolve_threads(threads: int, num_cores: int) -> int:
    """`threads`, or all cores if it is 0."""
    return threads or max(1, num_cores)


def wait_without_spinning() -> None:
    """Let OpenMP threads sleep while they wait for each other. Call it before importing torch.

    By default they spin. If another process needs the core, each barrier then costs a scheduling quantum (measured: a
    decode step of two workers on two cores takes 10 times as long). Where kernels are to be built for AVX2
    (engine/cpu/build.py), torch uses no more either.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get(CPU_ISA, "").startswith("avx2"):
        os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


def available_memory_bytes() -> int:
    """Main memory available without swapping, within the container's limit."""
    available, limit = _meminfo_available_bytes(), _read(CGROUP / "memory.max")
    return min(available, max(0, int(limit) - _working_set_bytes())) if limit.isdecimal() else available


def _meminfo_available_bytes() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    if found is None:  # not Linux: assume that half is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return int(found[1]) << 10


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
