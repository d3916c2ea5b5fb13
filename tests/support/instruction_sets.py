"""CPU kernels as other machines build them: every set of instructions that this machine can run."""

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from engine.cpu import build, cpu_layers, cpu_math, cpu_states, packed, packed_groups
from engine.cpu.build import NATIVE, runnable_instruction_sets
from engine.cpu.cpu_math import Math
from engine.cpu.cpu_sampling import load_cpu_sampling
from engine.weights.folders import cache_folder


@dataclass(frozen=True)
class Build:
    """What kernels are built for, and how they multiply bfloat16."""

    isa: str
    math: Math
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.isa}-{self.math.name.lower()}"


SETS = [isa for isa in runnable_instruction_sets() if isa != NATIVE]


def build_of(isa: str, math: Math) -> Build:
    """The best set is what everything else here is built for: its kernels are compiled once."""
    return Build(NATIVE if isa == SETS[-1] else isa, math)


BUILDS = [build_of(isa, Math.WIDENED) for isa in SETS if not isa.endswith("bf16")]
BUILDS += [build_of(isa, Math.PAIRS) for isa in SETS if isa.endswith("bf16")]
if platform.machine() == "x86_64":
    BUILDS.append(Build(NATIVE, Math.TILES, "-DBATON_EMULATE_AMX"))
AMX = Build("amx", Math.TILES)  # the CPU's own tiles
HAS_AMX = AMX.isa in SETS
ON_AMX = pytest.param(AMX, marks=pytest.mark.skipif(not HAS_AMX, reason="no AMX"))
WIDTHS = [build_of(isa, Math.WIDENED) for isa in SETS if isa in ("avx2", "avx512", "neon")]  # of vectors


@contextmanager
def built_for(build_: Build) -> Iterator[None]:
    """Kernels loaded meanwhile are built so."""
    variables = {build.ISA: build_.isa, "CXX": f"{os.environ.get('CXX', 'g++')} {build_.flags}"}
    flags = [flag.replace("-O3", "-O1") if build_.flags else flag for flag in build.FLAGS]  # emulation compiles slowly
    with mock.patch.dict("os.environ", variables), mock.patch.object(build, "FLAGS", flags), ExitStack() as stack:
        for user in (packed, packed_groups):
            stack.enter_context(mock.patch.object(user, "choose_math", lambda *_: build_.math))
        forget_kernels()
        if build_ == AMX:
            assert cpu_math._load().baton_request_tiles(), "the system does not let this process use tiles"
        try:
            yield
        finally:
            forget_kernels()


def link_kernels(home: Path, *left_out: str) -> Path:
    """Makes `home` an $XDG_CACHE_HOME that has, of what lies in ours, the kernels alone: all but those left out."""
    (home / "baton").mkdir(mode=0o700)
    for built in cache_folder().glob("*.so"):
        if built.name.partition("-")[0] not in left_out:
            (home / "baton" / built.name).symlink_to(built)
    return home


def forget_kernels() -> None:
    loaders = (packed._load, packed_groups._load, cpu_layers.load, cpu_states.load, cpu_math._load, load_cpu_sampling)
    for cached in loaders:
        cached.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    forget_kernels()
    yield
    forget_kernels()
