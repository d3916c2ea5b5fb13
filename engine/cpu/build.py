"""Builds the C++ files of this folder with the system's compiler on first use and caches the result per user.

Knows compilers, flags and files; nothing of what the kernels compute.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import structlog

from engine.weights.folders import list_cache_folders

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared")
BUILD_S = 300
ROOM_BYTES = 10 << 20  # all kernels take 1 MiB, and the compiler's own files a few more
ISA = "BATON_CPU_ISA"  # environment variable: build for less than this CPU has, to measure and test that
NATIVE = "native"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set to build for. Kernels choose by the compiler's macros."""

    flags: str  # the compiler's
    needs: str = ""  # what /proc/cpuinfo must list


INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    NATIVE: InstructionSet("-march=native"),
    "avx2": InstructionSet("-march=x86-64-v3", "avx2 fma"),
    "avx2-vnni": InstructionSet("-march=x86-64-v3 -mavxvnni", "avx2 fma avx_vnni"),
    "avx512": InstructionSet("-march=x86-64-v4", "avx512f avx512bw avx512vl"),
    "avx512-vnni": InstructionSet("-march=x86-64-v4 -mavx512vnni", "avx512f avx512bw avx512vl avx512_vnni"),
    "avx512-bf16": InstructionSet(
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16", "avx512f avx512bw avx512vl avx512_vnni avx512_bf16"
    ),
    "amx": InstructionSet(
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",
        "avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8",
    ),
    "neon": InstructionSet("-march=armv8-a", "asimd"),
    "neon-dotprod": InstructionSet("-march=armv8.2-a+dotprod", "asimd asimddp"),
    "neon-bf16": InstructionSet("-march=armv8.6-a", "asimd asimddp bf16 i8mm"),
}


class BuildError(Exception):
    """The kernel cannot be built or loaded; the message is one line for the user."""


def load_kernel(name: str) -> ctypes.CDLL:
    """Load NAME.cpp for this compiler and CPU; build it first if not cached. Raises BuildError."""
    source = FOLDER / f"{name}.cpp"
    find_instruction_set()  # raises
    command = [*find_compiler(), *FLAGS, *INSTRUCTION_SETS[os.environ.get(ISA) or NATIVE].flags.split()]
    link = _openmp_library()
    file_name = f"{name}-{_fingerprint(source, command, link)}.so"
    try:
        folders = list_cache_folders()
        path = next((folder / file_name for folder in folders if (folder / file_name).exists()), None)
        if path is None:
            path = _choose_roomy(tuple(folders)) / file_name
            _build(source, command, link, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot build or load {source.name}: {error}{_advice(str(error))}") from error


def find_instruction_set() -> str:
    """The set to build for: $BATON_CPU_ISA, or the best that this CPU has. BuildError if it does not have it."""
    if (name := os.environ.get(ISA) or NATIVE) == NATIVE:
        return runnable_instruction_sets()[-1]
    if name not in INSTRUCTION_SETS:
        raise BuildError(f"{ISA}={name} is not known: {', '.join(INSTRUCTION_SETS)}")
    if missing := [flag for flag in INSTRUCTION_SETS[name].needs.split() if flag not in cpu_flags()]:
        raise BuildError(f"{ISA}={name} needs a CPU with {', '.join(missing)}: unset it, or choose another")
    return name


def runnable_instruction_sets() -> list[str]:
    """The names of the sets that this CPU can run."""
    flags = cpu_flags()
    return [name for name, isa in INSTRUCTION_SETS.items() if flags.issuperset(isa.needs.split())]


def find_compiler() -> list[str]:
    """$CXX (may carry arguments) if set, else the first of g++, c++, clang++. BuildError if not found."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [["g++"], ["c++"], ["clang++"]]
    for candidate in candidates:
        if shutil.which(candidate[0]):
            return candidate
    raise BuildError(f"no C++ compiler: looked for {', '.join(candidate[0] for candidate in candidates)}")


@cache  # so that the warning comes once
def _choose_roomy(folders: tuple[Path, ...]) -> Path:
    """The first folder with room for all kernels, else the first."""
    chosen = next((folder for folder in folders if shutil.disk_usage(folder).free >= ROOM_BYTES), folders[0])
    if chosen != folders[0]:
        reason = f"kernels are built in {chosen}; set XDG_CACHE_HOME to a folder with {ROOM_BYTES >> 20} MiB free"
        log.warning("the cache folder is full", folder=str(folders[0]), reason=reason)
    return chosen


def _build(source: Path, command: list[str], link: list[str], path: Path) -> None:
    """Build beside `path`, then rename: concurrent builders see no file or a whole one, and the last rename wins."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        built = Path(folder) / path.name
        try:
            done = subprocess.run(
                [*command, str(source), "-o", str(built), *link],
                capture_output=True,
                text=True,
                timeout=BUILD_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} took more than {BUILD_S} s on {source.name}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"{command[0]} cannot build {source.name} in {path.parent}: {first}{_advice(done.stderr)}")
        built.replace(path)


def _advice(complaint: str) -> str:
    """Advice if the complaint is about a path that cannot be written; else empty."""
    signs = ("No space left", "Disk quota", "Read-only", "No usable temporary directory", "File too large")
    if not any(sign in complaint for sign in signs):
        return ""
    return "; set XDG_CACHE_HOME, and TMPDIR for the compiler, to folders that can be written and have 10 MiB free"


def _openmp_library() -> list[str]:
    """Linker arguments that bind the kernel to the libgomp that torch has loaded, which wheels may rename.

    Two copies would be two thread pools, each spinning after its work on cores that the other needs.
    """
    if sys.platform != "linux":
        return []
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    return ["-Wl,--as-needed", sorted(loaded)[0]] if len(loaded) == 1 else []


def _fingerprint(source: Path, command: list[str], link: list[str]) -> str:
    """16 hex digits over everything that the built file depends on."""
    try:
        version = subprocess.run([*command[:1], "--version"], capture_output=True, timeout=BUILD_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} --version failed: {error}") from error
    headers = [header.read_bytes() for header in sorted(FOLDER.glob("*.h"))]
    parts = [source.read_bytes(), *headers, version, repr((command, link)).encode(), _cpu_features().encode()]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def _cpu_features() -> str:
    """The features that -march=native depends on: different machines may share a home folder."""
    return (
        platform.machine()
        + "".join(sorted({line for line in _cpu_lines() if line.startswith("model name")}))
        + (" ".join(sorted(cpu_flags())))
    )


@cache
def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def is_cpu_by(vendor: str) -> bool:
    """vendor: as x86 CPUs name it."""
    return any(line.startswith("vendor_id") and line.endswith(vendor) for line in _cpu_lines())


@cache
def cpu_flags() -> frozenset[str]:
    """Extensions of the instruction set, as Linux names them."""
    names = ("flags", "Features", "CPU part")
    return frozenset(word for line in _cpu_lines() if line.startswith(names) for word in line.split(":")[1].split())
