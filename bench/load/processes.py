"""Reads what a server and all its processes use from /proc."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def find_tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _read_stat(int(folder.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def read_pss_bytes(pid: int, with_children: bool = True) -> int:
    """Resident memory of the tree, or of the process alone; shared memory is divided between its users."""
    total = 0
    for one in find_tree(pid) if with_children else [pid]:
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def read_cpu_s(pid: int) -> float:
    stats = [_read_stat(one) for one in find_tree(pid)]
    return sum((int(fields[11]) + int(fields[12])) / TICKS for fields in stats if fields)


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ...; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
