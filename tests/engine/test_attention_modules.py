"""Which FlashInfer modules a model needs, and on which GPUs those that are built ahead run."""

import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from flashinfer.jit.attention import modules as flashinfer_modules

from engine.attention import choose, modules
from engine.attention import flashinfer as backend_module
from engine.attention.choose import choose_attention
from engine.attention.modules import BuiltAhead, Capability, choose_kernels, find_built, find_gap, name_modules, runs_on
from engine.attention.shape import AttentionShape

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1)
NEEDED = name_modules(SHAPE, [None], "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("window", "softcap", "kv_dtype"), product((None, 9), (0.0, 50.0), ("float16", "float8_e4m3fn"))
)
def test_names_are_those_that_flashinfer_asks_for(window: int | None, softcap: float, kv_dtype: str) -> None:
    half, kv = torch.float16, getattr(torch, kv_dtype)
    shared = (half, kv, half, torch.int32, 256, 256, 0, window is not None, softcap > 0)
    fa2, fa3 = (flashinfer_modules.get_batch_prefill_uri(kernels, *shared, False) for kernels in ("fa2", "fa3"))
    name = partial(name_modules, AttentionShape(8, 2, 256, 0.1, softcap), [window], "float16", kv_dtype)
    assert name() == {flashinfer_modules._get_batch_prefill_module_uri(fa2, "fa2", "equal", "full")}
    assert name("fa3") == {flashinfer_modules._get_batch_prefill_module_uri(fa3, "fa3", "runtime", "full")}


@pytest.mark.parametrize(
    ("architecture", "runs", "fails"),
    [
        ("9.0a", [(9, 0)], [(8, 9), (10, 0)]),
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("8.9", [(8, 9)], [(8, 0), (8, 6), (9, 0)]),
        ("10.0a", [(10, 0)], [(10, 3), (12, 0)]),
        ("12.0f", [(12, 0), (12, 1)], [(10, 0), (13, 0)]),
        ("12.0+PTX", [(12, 0), (13, 0)], [(10, 3)]),
    ],
)
def test_where_an_architectures_code_runs(architecture: str, runs: list[Capability], fails: list[Capability]) -> None:
    assert all(runs_on(architecture, one) for one in runs) and not any(runs_on(architecture, one) for one in fails)


def test_what_is_no_architecture() -> None:
    with pytest.raises(ValueError, match="sm_90"):
        runs_on("sm_90", (9, 0))


@pytest.mark.parametrize("no_compiler", ["", "there is no nvcc"])
def test_modules_of_another_architecture_are_loaded_even_where_nvcc_could_compile(no_compiler: str) -> None:
    gap = find_gap(NEEDED, BuiltAhead(NEEDED, ("9.0a",)), (8, 9), no_compiler)
    assert gap == "FlashInfer's modules are built for 9.0a, this GPU is 8.9: build them for 8.9 (docs/GPU.md)"
    assert "no architectures.txt" in str(find_gap(NEEDED, BuiltAhead(NEEDED, ()), (9, 0), no_compiler))


def test_a_module_that_is_missing_is_compiled_or_named() -> None:
    large = name_modules(AttentionShape(8, 2, 256, 0.1), [None], "bfloat16", "bfloat16")
    built = BuiltAhead(NEEDED, ("9.0a",))
    assert find_gap(large, built, (9, 0), "") is find_gap(large, built, (8, 9), "") is None
    gap = str(find_gap(large, built, (9, 0), "there is no nvcc"))
    assert "for bf16 with KV in bf16, heads of 256, and" in gap and "there is no nvcc: build it (docs/GPU.md)" in gap


FA3 = name_modules(SHAPE, [None], "bfloat16", "bfloat16", "fa3")


@pytest.mark.parametrize(
    ("dtypes", "capability", "has_fa3"),
    [
        (("bfloat16", "bfloat16"), (9, 0), True),
        (("float16", "float16"), (9, 0), True),
        (("bfloat16", "float8_e4m3fn"), (9, 0), False),
        (("bfloat16", "bfloat16"), (8, 9), False),
        (("bfloat16", "bfloat16"), (10, 0), False),
        (("bfloat16", "bfloat16"), (12, 0), False),
    ],
)
def test_gpus_and_pages_that_fa3_is_for(dtypes: tuple[str, str], capability: Capability, has_fa3: bool) -> None:
    kernels, reason = choose_kernels(SHAPE, [None, 20], *dtypes, BuiltAhead(frozenset(), ()), capability, "")
    assert ("fa3" in kernels) == ("fa3" in reason) == has_fa3 and "fa2" in kernels


def test_without_fa3s_modules_and_nvcc_a_hopper_attends_to_prompts_by_fa2_and_says_why() -> None:
    def choose_here(windows: list[int | None], built: frozenset[str], no_compiler: str) -> tuple[tuple[str, ...], str]:
        built_ahead = BuiltAhead(built, ("9.0a",))
        return choose_kernels(SHAPE, windows, "bfloat16", "bfloat16", built_ahead, (9, 0), no_compiler)

    assert choose_here([None], NEEDED, "") == choose_here([None], NEEDED | FA3, "there is no nvcc")
    kernels, reason = choose_here([None], NEEDED, "there is no nvcc")
    assert kernels == ("fa2",) and "128, fa3, and there is no nvcc: build it (docs/GPU.md)" in reason
    both = name_modules(SHAPE, [None, 9], "bfloat16", "bfloat16") | FA3  # fa3 without windows
    kernels, reason = choose_here([None, 9], both, "there is no nvcc")
    assert kernels == ("fa2",) and "a window, fa3, and" in reason
    assert choose_here([9], NEEDED | FA3, "there is no nvcc")[0] == ()


@pytest.mark.parametrize(("architectures", "name"), [("9.0a", "torch_sdpa"), ("8.0 9.0a", "flashinfer")])
def test_a_gpu_without_code_attends_by_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architectures: str, name: str
) -> None:
    """An L4 with the modules that are found beside FlashInfer."""

    class Backend:
        """In place of FlashInfer's, which takes memory of the GPU."""

        name = "flashinfer"

        def __init__(self, *_arguments: object) -> None:
            pass

    folder = tmp_path / "flashinfer" / "data" / "aot"
    for module in NEEDED:
        (folder / module).mkdir(parents=True)
        (folder / module / f"{module}.so").touch()
    (folder / modules.ARCHITECTURES).write_text(f"{architectures}\n")
    (tmp_path / "flashinfer" / "__init__.py").touch()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "flashinfer", raising=False)
        patch.syspath_prepend(tmp_path)
        built = find_built()
    assert built == BuiltAhead(NEEDED, tuple(architectures.split()))
    monkeypatch.setattr(choose, "find_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    monkeypatch.setattr(backend_module, "FlashInferAttention", Backend)
    choice = choose_attention(SHAPE, [None], torch.device("cuda"), torch.bfloat16)
    assert choice.backend.name == name and choice.is_fallback == (name == "torch_sdpa")
    assert ("build them for 8.9" in choice.reason) == choice.is_fallback


def test_why_nothing_is_compiled_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    assert modules.explain_no_compiler() == "there is no nvcc"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert modules.explain_no_compiler() == ""
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert modules.explain_no_compiler() == "FLASHINFER_DISABLE_JIT is set"
