"""Every Triton kernel of the engine compiles for an H200 as its launcher calls it, to the instructions that its speed
or its values depend on, and for other cards within their shared memory. Needs no GPU.
"""

import ast
import re
from pathlib import Path

import pytest

from engine.cuda import gpu_pages, gpu_states
from tests.support.cross_compile import CASES, HOPPER, IS_NIGHTLY, SHARED_KIB, Compiled, compile_kernels

KERNELS = Path(gpu_pages.__file__).parent
TENSOR_CORES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
KNOWN_CALLS = {"sum_kernel": {"__assertfail"}}  # a rank whose peer never comes
NEWEST = max(SHARED_KIB)  # few have less shared memory
OTHERS = sorted(SHARED_KIB.keys() - {HOPPER}) if IS_NIGHTLY else [NEWEST]
APPROXIMATE = ("fma.rn.f32", "div.full", "div.approx", "ex2.approx", "lg2.approx")


def find_launched(source: Path) -> set[str]:
    """Names of kernels in `kernel[grid](...)`."""
    calls = (node.func for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call))
    return {func.value.id for func in calls if isinstance(func, ast.Subscript) and isinstance(func.value, ast.Name)}


def find_calls(kernel: Compiled) -> set[str]:
    """Functions that it calls, of libraries too."""
    return set(re.findall(r"(?:call.uni|\.extern \.func) *(\w+)", kernel.ptx))


NAMES = set().union(*map(find_launched, KERNELS.glob("gpu_*.py")))


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Compiled]]:
    return compile_kernels()


def test_no_kernel_is_left_out_and_none_calls_what_is_not_there(compiled: dict[str, list[Compiled]]) -> None:
    kernels = [kernel for case in CASES for kernel in compiled[case]]
    assert {kernel.name for kernel in kernels} == NAMES
    assert all(compiled.values())
    for kernel in kernels:
        assert find_calls(kernel) == KNOWN_CALLS.get(kernel.name, set()), kernel.name


def test_sampling_computes_as_ieee_says(compiled: dict[str, list[Compiled]]) -> None:
    for case in ("sampling", "sampling from one block"):
        for kernel in compiled[case]:
            assert not kernel.may_fuse and not [word for word in APPROXIMATE if word in kernel.ptx], kernel.name
            if kernel.name == "_survey_blocks":
                assert "cvt.rn.f32.u32" in kernel.ptx and "div.rn.f32" in kernel.ptx
    assert len(compiled["sampling"]) == 6  # three planes of the survey


def test_weights_are_read_ahead_by_16_bytes_and_multiplied_by_tensor_cores(compiled: dict[str, list[Compiled]]) -> None:
    products = [(case, one) for case in CASES for one in compiled[case] if one.name.startswith("multiply")]
    for case, kernel in products:
        assert "cp.async.cg.shared.global" in kernel.ptx and 2 * (kernel.shared + 1024) <= 228 << 10, case
        is_plain = kernel.name in ("multiply_row", "multiply_row_of_groups", "multiply_slots")
        assert ("wgmma.mma_async" in kernel.ptx) != is_plain, case
        if case.startswith(("4 bits", "8 bits", "blocks")):
            waits = [line for line in kernel.ptx.splitlines() if "ld.global" in line]
            assert len(waits) <= 2, f"{case}: only biases are read when they are needed: {waits}"
    experts = [one for _case, one in products if one.name == "multiply_slots"]
    assert sum("min.NaN.f32" in one.ptx for one in experts) == 1, "clamps keep NaN"
    (many,) = compiled["blocks many"]
    assert "e4m3.e4m3" in many.ptx, "rounded rows are multiplied in 8 bits"


def test_other_memory_is_read_and_written_by_16_bytes_and_kv_becomes_fp8_in_hardware(
    compiled: dict[str, list[Compiled]],
) -> None:
    for kernel in compiled["layers"] + compiled["states"]:
        if kernel.name != "join_pages_kernel":
            assert "ld.global.v4.b32" in kernel.ptx and ".local" not in kernel.ptx, kernel.name
            assert "st.global.v4.b32" in kernel.ptx or kernel in compiled["states"], kernel.name
    (pages,), memory = compiled["pages"], next(one for one in compiled["states"] if one.name == "delta_kernel")
    for access in ("ld.global.v4.b32", "st.global.v4.b32"):
        assert pages.ptx.count(access) == gpu_pages.BLOCK_WORDS // (4 * 128), "each of 128 threads"
    assert memory.ptx.count("st.global.v4.b32") == 128 * gpu_states.VALUE_BLOCK // (4 * 32), "each of 32 threads"
    for kernel in compiled["fp8 rounding"]:
        assert all(part in kernel.ptx for part in ("ld.global.v4.b32", "cvt.rn.satfinite.e4m3x2.f32", "div.rn.f32"))
    for case in (case for case in CASES if case.startswith("write")):
        (kernel,) = compiled[case]
        assert ("cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx) == ("fp8" in case), case


def test_ranks_set_flags_after_their_rows_and_read_rows_after_all_flags(compiled: dict[str, list[Compiled]]) -> None:
    for size in (2, 8):
        plain, with_norm = sorted(compiled[f"sums of {size} ranks"], key=lambda kernel: len(kernel.ptx))
        for kernel in (plain, with_norm):
            written, rest = kernel.ptx.split("atom.global.sys.release.exch.b32")
            polled, read = rest.split("atom.global.sys.acquire.add.u32")
            assert "bar.sync" in written[written.rindex("st.global.v4.b32") :]
            assert "global.v4" not in polled and "bar.sync" in read[: read.index("ld.global.v4.b32")]
            assert read.count("ld.global.v4.b32") >= 2 * size  # 8 KiB by 16 bytes for each of 256 threads
            assert "overflow" not in kernel.ptx, "epochs wrap around"


@pytest.mark.parametrize("architecture", OTHERS)
def test_every_kernel_compiles_for_other_cards_and_fits_into_them(architecture: int) -> None:
    """A100, A10 and RTX 30, L4 and RTX 40, B200, RTX 50. The driver's double refuses what does not fit.

    `make test`: those that fill shared memory, for the last one.
    """
    compiled = compile_kernels(architecture)
    kernels = [kernel for found in compiled.values() for kernel in found]
    assert all(compiled.values())
    if architecture == NEWEST and IS_NIGHTLY:
        assert {kernel.name for kernel in kernels} == NAMES
    for kernel in kernels:
        assert kernel.shared <= SHARED_KIB[architecture] << 10, kernel.name
        assert find_calls(kernel) == KNOWN_CALLS.get(kernel.name, set()), kernel.name
        if kernel.name.startswith("multiply_rows"):
            assert any(name in kernel.ptx for name in TENSOR_CORES), kernel.name
