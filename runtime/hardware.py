"""Finds this machine's cores, memory and packages, within container limits. Does not import torch."""

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

CPU_ISA = "BATON_CPU_ISA"  # what CPU kernels are built for, see engine/cpu/build.py
CHECK_STEPS = "BATON_CHECK_STEPS"  # see engine/cpu/sampling_checks.py
PROC = Path("/proc/self")
MEMORY_FILES = (  # of a control group, v2 and v1: its limit, its use, and in its memory.stat the part that can be freed
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

Controller = Literal["cpu", "memory"]  # of control groups: what they limit
SETTINGS: dict[Controller, str] = {"cpu": "--threads", "memory": "--kv-memory-mib"}  # where a limit is not known


def find_version(distribution: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


OWN_VERSION = find_version("baton") or "unknown"


class Cores(NamedTuple):
    """The cores that this process may compute with."""

    cpus: frozenset[int]  # the system's numbers of them
    num: int  # of them that it may keep busy, within its container's CPU quota
    group: int  # inode of the control group with that quota, which is shared with all processes in it; 0: none


def find_cores() -> Cores:
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = Cores(frozenset(cpus), len(cpus), 0)
    for group in find_cgroups("cpu"):
        quota = _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        numbers = [int(word) for word in quota.split() if word.isdecimal()]  # no quota: "max 100000", "-1 100000"
        if len(numbers) == 2 and all(numbers) and (num := max(1, round(numbers[0] / numbers[1]))) <= cores.num:
            is_less = num < len(cpus)
            cores = Cores(cores.cpus, num, group.stat().st_ino if is_less else 0)
    return cores


def num_cores() -> int:
    """Cores this process may use, within its container's CPU quota."""
    return find_cores().num


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


def give_way(nice: int) -> None:
    """On Linux: this process's threads, and those that they start, leave the cores to others that want them too."""
    for thread in (PROC / "task").glob("*"):
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def available_memory_bytes() -> int:
    """Main memory available without swapping, within the container's limit."""
    lefts = map(_left_bytes, find_cgroups("memory"))
    return min([_meminfo_available_bytes(), *(left for left in lefts if left is not None)])


def find_cgroups(controller: Controller) -> list[Path]:
    """Folders of the control groups, v1 or v2, that limit this process: its own, then those around it that are seen."""
    paths = _cgroup_paths()
    is_v1 = controller in paths
    path = paths.get(controller, paths.get("", ""))
    groups: list[Path] = []
    for line in _read(PROC / "mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ")[:3]
        if kind != ("cgroup" if is_v1 else "cgroup2") or (is_v1 and controller not in options.split(",")):
            continue
        root, point = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), one) for one in mount.split(" ")[3:5])
        top = Path(point)
        own = top / Path(path).relative_to(root) if Path(path).is_relative_to(root) else top
        groups += (group for group in (own, *own.parents) if group.is_relative_to(top) and group.is_dir())
    return groups


def find_unknown_limits() -> dict[str, str]:
    """Each limit of a container, should this be one, that cannot be read |-> why, and what to do."""
    why = (
        "the control groups that this process is in are not mounted: if they have a limit, mount /sys/fs/cgroup, or set"
    )
    unknown = [one for one in SETTINGS if _cgroup_paths() and not find_cgroups(one)]
    return {f"no known limit of {one}": f"{why} {SETTINGS[one]} to what it allows" for one in unknown}


def _cgroup_paths() -> dict[str, str]:
    """Path of this process's control group for each controller of v1, and under "" for those of v2."""
    fields = (line.split(":", 2) for line in _read(PROC / "cgroup").splitlines())
    return {one: path for _, controllers, path in fields for one in controllers.split(",")}


def _left_bytes(group: Path) -> int | None:
    """Bytes of memory that the group's processes may still take together; None without a limit.

    File cache not used recently, such as a model just downloaded, does not count as used.
    """
    stat = _read(group / "memory.stat")
    around = _find_number("hierarchical_memory_limit", stat)  # v1: the least also of groups that cannot be seen
    for limit_name, use_name, cache_name in MEMORY_FILES:
        limit, used = _read(group / limit_name), _read(group / use_name)
        if limit.isdecimal():
            working = (int(used) if used.isdecimal() else 0) - (_find_number(cache_name, stat) or 0)
            return max(0, min(int(limit), around or int(limit)) - max(0, working))
    return None


def _find_number(name: str, text: str) -> int | None:
    found = re.search(rf"^{name} +(\d+)(?: kB)?$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _meminfo_available_bytes() -> int:
    found = _find_number("MemAvailable:", _read(Path("/proc/meminfo")))
    if found is None:  # not Linux: assume that half is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return found << 10


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
