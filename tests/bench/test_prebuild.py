"""Which FlashInfer modules are compiled ahead, and how; needs no FlashInfer."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from bench.gpu_checks.prebuild import build_environment, build_specs, write_driver_stub


class Modules:
    """The functions called of flashinfer.jit.attention.modules: each call is its own specification."""

    @staticmethod
    def gen_batch_decode_module(*arguments: Any) -> tuple[Any, ...]:
        return ("decode", *arguments)

    @staticmethod
    def _gen_batch_prefill_primary_module(*arguments: Any) -> tuple[Any, ...]:
        return ("prefill", *arguments)


def test_both_kinds_are_built_for_every_dtype_head_size_kind_of_kv_and_window() -> None:
    specs = list(build_specs(Modules, ("bfloat16", "float16"), (64, 128), ("auto", "fp8")))
    wanted = set()
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 128):
            for kv_dtype in (dtype, torch.float8_e4m3fn):
                for window in (False, True):
                    shared = (dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, 0, window, False)
                    wanted |= {("decode", *shared), ("prefill", "fa2", *shared, False)}
    assert len(specs) == 32
    assert set(specs) == wanted


def test_modules_are_linked_with_a_driver_that_is_not_there(tmp_path: Path) -> None:
    write_driver_stub(tmp_path)
    ctypes.CDLL(str(tmp_path / "libcuda.so"))
    assert b"libcuda.so.1\0" in (tmp_path / "libcuda.so").read_bytes(), "the library that a module loads at run time"
    environment = build_environment(tmp_path)
    assert environment["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    assert environment["FLASHINFER_EXTRA_LDFLAGS"] == f"-L{tmp_path}"
