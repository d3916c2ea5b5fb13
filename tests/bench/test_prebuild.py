"""Which FlashInfer modules are compiled ahead, and how."""

import ctypes
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer.jit.attention import modules as flashinfer_modules

from bench.gpu_checks import prebuild
from bench.gpu_checks.prebuild import KvDType, build_environment, build_specs, choose_architectures, complete
from engine.catalogue import build_config
from engine.cuda.modules import Kernels, name_modules
from engine.cuda.toolkit import LINK_FLAGS, link_toolkit
from tests.support.families import DEEPSEEK_V3


class Modules:
    """The functions called of flashinfer.jit.attention.modules: each call is its own specification."""

    @staticmethod
    def gen_batch_prefill_module(*arguments: Any) -> tuple[Any, ...]:
        return arguments

    _gen_batch_prefill_primary_module = gen_customize_batch_prefill_module = gen_batch_prefill_module
    gen_batch_mla_module = gen_batch_prefill_module


def test_modules_are_built_for_every_dtype_head_size_kind_of_kv_and_window() -> None:
    build = partial(build_specs, Modules, "sinks", ("bfloat16", "float16"), (64, 128), ("auto", "fp8"))
    specs = [spec for spec in build(has_fa3=True) if "AttentionSink" not in str(spec)]
    wanted = set()
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 128):
            for kv_dtype in (dtype, torch.float8_e4m3fn):
                for window in (False, True):
                    shared = (dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, 0, window, False)
                    wanted.add(("fa2", *shared, False))
                    wanted |= {("fa3", *shared, False)} if kv_dtype is dtype else set()
    assert len(specs) == 24
    assert set(specs) == wanted
    others = [spec for spec in build() if spec not in specs]
    assert [spec for spec in build() if spec in specs] == [spec for spec in specs if spec[0] == "fa2"]
    assert len({spec[1] for spec in others}) == len(others) == 8 and all(spec[6] == 64 for spec in others), "gpt-oss's"


def test_modules_of_latents_are_built_by_the_names_that_are_looked_for() -> None:
    uri = flashinfer_modules.get_batch_prefill_uri
    by_name = SimpleNamespace(
        gen_batch_mla_module=flashinfer_modules.get_batch_mla_uri,
        gen_batch_prefill_module=uri,
        _gen_batch_prefill_primary_module=lambda *given: flashinfer_modules._get_batch_prefill_module_uri(
            uri(*given), "fa2", "equal", "full"
        ),
    )
    shape = build_config(DEEPSEEK_V3).attention_shapes[0]
    cases: tuple[tuple[KvDType, str], ...] = (("auto", "bfloat16"), ("fp8", "float8_e4m3fn"))
    for kv_dtype, other in cases:
        found = build_specs(by_name, "", ("bfloat16",), (), (kv_dtype,), has_fa3=True, has_latents=True)
        kinds: tuple[Kernels, ...] = ("fa2", "fa3")
        assert {*found} == {name for kind in kinds for name in name_modules(shape, [None], "bfloat16", other, kind)}
    build = partial(build_specs, Modules, "", ("bfloat16", "float16"), (), ("auto", "fp8"), has_latents=True)
    assert [spec[:3] for spec in build()] == [
        ("fa2", dtype, dtype) for dtype in (torch.bfloat16, torch.float16) for _ in range(2)
    ]


def test_modules_are_linked_with_a_driver_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = tmp_path / "toolkit"
    for file in ("bin/nvcc", "lib64/libcudart.so"):
        (toolkit / file).parent.mkdir(parents=True)
        (toolkit / file).touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv(LINK_FLAGS, "")
    link_toolkit(tmp_path)
    link_toolkit(tmp_path)
    ctypes.CDLL(str(tmp_path / "libcuda.so"))
    assert b"libcuda.so.1\0" in (tmp_path / "libcuda.so").read_bytes(), "the library that a module loads at run time"
    environment = build_environment(tmp_path, ("8.0", "9.0a"))
    assert environment["FLASHINFER_CUDA_ARCH_LIST"] == "8.0 9.0a"
    assert os.environ[LINK_FLAGS] == f"-L{tmp_path}", "once"


def test_each_nvcc_compiles_for_all_cards_it_can_name() -> None:
    assert choose_architectures((13, 0)) == ("8.0", "8.9", "9.0a", "10.0f", "12.0f")
    assert complete("8.9") == "8.9" and complete("10.3") == "10.3a" and complete("12.0f") == "12.0f"
    assert choose_architectures((12, 8)) == ("8.0", "8.9", "9.0a", "10.0a", "12.0a")


def test_modules_with_a_soft_cap_are_others() -> None:
    plain, with_window = build_specs(Modules, "sinks", ("bfloat16",), (256,), ("auto",), has_softcap=True)
    assert plain[-3:] == (False, True, False) and with_window[-3:] == (True, True, False)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit whose nvcc says its version, and the parts of FlashInfer that are called, which write texts."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
    nvcc.chmod(0o755)
    (nvcc.parents[1] / "lib64").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in (*build_environment(tmp_path, ()), LINK_FLAGS):
        monkeypatch.setenv(name, "")  # which the call below changes

    def specify(*arguments: Any) -> Any:
        name = "_".join(map(str, arguments))
        return SimpleNamespace(name=name, jit_library_path=tmp_path / name)

    def compile_all(specs: list[Any], **_options: bool) -> None:
        for spec in specs:
            spec.jit_library_path.write_text(os.environ["FLASHINFER_CUDA_ARCH_LIST"])

    parts = {
        "flashinfer.jit.core": SimpleNamespace(build_jit_specs=compile_all),
        "flashinfer.jit.attention.modules": SimpleNamespace(
            gen_batch_prefill_module=specify,
            _gen_batch_prefill_primary_module=specify,
            gen_batch_mla_module=specify,
        ),
        "flashinfer.jit.attention.variants": SimpleNamespace(attention_sink_decl={"fa2": "sinks"}),
    }
    monkeypatch.setattr("importlib.import_module", parts.__getitem__)
    return tmp_path / "aot"


def test_the_architectures_are_listed_beside_the_modules(compiler: Path) -> None:
    assert prebuild.main(compiler, dtypes=("bfloat16",), head_dims=(128,), kv_dtypes=("auto",)) == 0
    wanted = "8.0 8.9 9.0a 10.0a 12.0a"
    assert (compiler / "architectures.txt").read_text() == f"{wanted}\n"
    assert [module.read_text() for module in compiler.glob("*/*.so")] == [wanted] * 8
    with pytest.raises(ValueError, match=r"aot has modules for 8\.0 8\.9 .*: set FOLDER to another folder"):
        prebuild.main(compiler, architectures="12.0f")
    assert len(list(compiler.glob("*/*.so"))) == 8
    ada = compiler.parent / "ada"
    prebuild.main(ada, dtypes=("bfloat16",), head_dims=(128,), kv_dtypes=("auto",), architectures="8.9", latents=False)
    assert len(list(ada.glob("*/fa2*.so"))) == len(list(ada.glob("*/*.so"))) == 2, "fa3 is for Hopper alone"
