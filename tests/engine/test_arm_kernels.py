"""CPU kernels built for Arm and run by qemu give what this machine's give, which other tests compare with torch."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.cpu.build import FLAGS, FOLDER, INSTRUCTION_SETS
from engine.cpu.cpu_math import Math
from tests.support.attention import needs_compiler

CROSS = ["aarch64-linux-gnu-g++"]
RUN = ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]
ARM = [name for name, isa in INSTRUCTION_SETS.items() if "asimd" in isa.needs]
SOURCE = Path(__file__).parent / "kernel_cases.cpp"
LANGUAGE = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-O3")]

needs_emulator = pytest.mark.skipif(
    not (shutil.which(CROSS[0]) and shutil.which(RUN[0])), reason="no g++-aarch64-linux-gnu, no qemu-user"
)


def start_build(compiler: list[str], flags: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*compiler, *LANGUAGE, "-O2", *flags.split(), f"-I{FOLDER}", str(SOURCE), "-o", str(path)])


def run(command: list[str], math: Math) -> NDArray[np.float32]:
    done = subprocess.run([*command, str(int(math))], stdout=subprocess.PIPE, check=True, timeout=300)
    return np.frombuffer(done.stdout, np.float32)


@needs_compiler
@needs_emulator
def test_results_on_arm_are_those_of_this_machine(tmp_path: Path) -> None:
    builds = {name: start_build(CROSS, INSTRUCTION_SETS[name].flags, tmp_path / name) for name in ARM}
    builds["here"] = start_build(["g++"], INSTRUCTION_SETS["native"].flags, tmp_path / "here")
    assert [build.wait(300) for build in builds.values()] == [0] * len(builds)
    expected = run([str(tmp_path / "here")], Math.WIDENED)
    assert len(expected) > 100_000 and np.isfinite(expected).all()
    for name in ARM:
        for math in Math if name == "neon-bf16" else [Math.WIDENED]:
            found = run([*RUN, str(tmp_path / name)], math)
            # float32 to the last bits; bfloat16, and probabilities rounded to it, within an ulp of values up to 2
            np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7, err_msg=f"{name} {math.name}")
            if math is Math.WIDENED:
                assert np.mean(found != expected) < 0.05
