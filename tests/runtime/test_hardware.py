"""Cores and memory within limits of control groups: v1, v2, both at once, nested, or out of sight."""

import os
from pathlib import Path

import pytest

from runtime import hardware
from runtime.hardware import available_memory_bytes, find_cores, find_unknown_limits

MACHINE = 10_000  # bytes available on the machine
CPUS = frozenset(range(8))
POD = "/kubepods.slice/pod\\x2d1"  # systemd's spelling of pod-1; mountinfo has its backslash in octal
NO_LIMIT = "9223372036854771712\n"  # of v1


class System:
    """What the kernel would show, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "proc").mkdir()

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def show(self, groups: str, *mounts: tuple[str, str, str]) -> None:
        """/proc/self/cgroup, and mounts: the root that is seen, the mount point below the folder, type and options."""
        self.write("proc/cgroup", groups)
        lines: list[str] = []
        for index, (root, point, kind) in enumerate(mounts):
            escaped = root.replace("\\", "\\134")
            lines.append(f"{30 + index} 25 0:{index} {escaped} {self.folder / point} ro shared:9 - {kind}\n")
        self.write("proc/mountinfo", "".join(["22 1 8:1 / / rw - ext4 /dev/root rw\n", *lines]))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setattr(hardware, "PROC", tmp_path / "proc")
    monkeypatch.setattr(hardware, "_meminfo_available_bytes", lambda: MACHINE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(CPUS))
    return System(tmp_path)


V2 = ("/", "cg", "cgroup2 cgroup rw,nsdelegate")


@pytest.mark.parametrize(
    ("limit", "current", "stat", "available"),
    [
        ("5000\n", "4000\n", "anon 700\ninactive_file 3000\nactive_file 300\n", 4000),  # just after loading a model
        ("5000", "4000", "anon 4000\ninactive_file 0\nworkingset_restore_inactive_file 9\n", 1000),
        ("5000", "6000", "inactive_file 500", 0),
        ("5000", "100", "inactive_file 300", 5000),  # the two are not read at the same time
        ("50000", "100", "inactive_file 0", MACHINE),
        ("max", "4000", "inactive_file 300", MACHINE),
        (None, None, None, MACHINE),
        ("5000", None, None, 5000),
        ("5000", "4000", None, 1000),
        *(("5000", "4000", odd, 1000) for odd in ("", "\n\n", "inactive_file", "inactive_file x", "inactive_file 1 2")),
    ],
)
def test_page_cache_is_no_use_of_memory(
    system: System, limit: str | None, current: str | None, stat: str | None, available: int
) -> None:
    system.show("0::/\n", V2)
    for name, text in (("memory.max", limit), ("memory.current", current), ("memory.stat", stat)):
        if text is not None:
            system.write(f"cg/{name}", text)
    assert available_memory_bytes() == available


@pytest.mark.parametrize(
    ("path", "root", "own"),
    [
        ("/", "/", "cg"),  # a container with a namespace of its own
        ("/docker/1", "/", "cg/docker/1"),  # with --cgroupns=host, or a unit of systemd
        (f"{POD}/c", f"{POD}/c", "cg"),
        (f"{POD}/c/job", POD, "cg/c/job"),
        ("/", "/../..", "cg"),  # mounted before the namespace was made
    ],
)
def test_v2_is_read_where_this_process_is(system: System, path: str, root: str, own: str) -> None:
    system.show(f"0::{path}\n", (root, "cg", "cgroup2 cgroup2 rw"))
    system.write(f"{own}/memory.max", "5000")
    system.write(f"{own}/cpu.max", "200000 100000\n")
    assert available_memory_bytes() == 5000
    assert find_cores() == (CPUS, 2, (system.folder / own).stat().st_ino)


def test_the_least_limit_around_it_counts(system: System) -> None:
    system.show("0::/slice/job\n", V2)
    system.write("cg/slice/memory.max", "5000")
    system.write("cg/slice/memory.current", "4500")  # by others
    system.write("cg/slice/job/memory.max", "3000")
    system.write("cg/slice/job/cpu.max", "max 100000")
    assert (available_memory_bytes(), find_cores()) == (500, (CPUS, 8, 0))
    slice_inode = (system.folder / "cg/slice").stat().st_ino
    system.write("cg/slice/cpu.max", "150000 50000")
    assert find_cores() == (CPUS, 3, slice_inode)
    system.write("cg/slice/job/cpu.max", "300000 100000")
    assert find_cores() == (CPUS, 3, slice_inode), "others may have the same quota in it"
    system.write("cg/slice/job/cpu.max", "1000 100000")
    assert find_cores() == (CPUS, 1, (system.folder / "cg/slice/job").stat().st_ino)
    system.write("cg/slice/job/cpu.max", "1600000 100000")
    system.write("cg/slice/cpu.max", "800000 100000")
    assert find_cores() == (CPUS, 8, 0), "as many as it may run on anyway"


V1_GROUPS = "9:name=systemd:/x\n4:memory:{0}\n3:cpu,cpuacct:{0}\n0::/x\n"


@pytest.mark.parametrize(("root", "below"), [("/", "docker/1/"), ("/docker/1", "")])
def test_v1_has_a_tree_for_each_controller(system: System, root: str, below: str) -> None:
    """And where systemd has a tree of v2 beside them, that one limits nothing."""
    system.show(
        V1_GROUPS.format("/docker/1"),
        ("/", "unified", "cgroup2 cgroup2 rw"),
        (root, "cg/cpu", "cgroup cgroup rw,cpu,cpuacct"),
        (root, "cg/memory", "cgroup cgroup rw,memory"),
    )
    system.write("unified/x/memory.max", "1")
    memory, cpu = f"cg/memory/{below}", f"cg/cpu/{below}"
    system.write(f"{cpu}cpu.cfs_period_us", "100000\n")
    system.write(f"{cpu}cpu.cfs_quota_us", "-1\n")
    system.write(f"{memory}memory.limit_in_bytes", NO_LIMIT)
    system.write(f"{memory}memory.usage_in_bytes", "4000\n")
    system.write(
        f"{memory}memory.stat", f"inactive_file 1\nhierarchical_memory_limit {NO_LIMIT}total_inactive_file 300\n"
    )
    assert (available_memory_bytes(), find_cores()) == (MACHINE, (CPUS, 8, 0))
    system.write(f"{cpu}cpu.cfs_quota_us", "50000\n")
    system.write(f"{memory}memory.limit_in_bytes", "5000\n")
    assert (available_memory_bytes(), find_cores().num) == (1300, 1)
    system.write(f"{memory}memory.stat", "hierarchical_memory_limit 4500\ntotal_inactive_file 300\n")
    assert available_memory_bytes() == 800, "that of a group which cannot be seen from here"


def test_groups_out_of_sight_are_reported(system: System) -> None:
    assert find_unknown_limits() == {}, "a kernel without control groups"
    system.show("0::/\n", V2)
    (system.folder / "cg").mkdir()
    assert find_unknown_limits() == {}, "the machine's own group has no limits"
    system.show(V1_GROUPS.format("/"), ("/", "cg", "cgroup cgroup rw,memory"))
    assert [*find_unknown_limits()] == ["no known limit of cpu"]
    system.show("0::/docker/1\n")
    assert len(found := find_unknown_limits()) == 2 and "set --kv-memory-mib" in found["no known limit of memory"]
    assert (available_memory_bytes(), find_cores()) == (MACHINE, (CPUS, 8, 0))
