"""The FlashInfer backend against torch_sdpa, with doubles of FlashInfer's wrappers.
The doubles have the signatures of the real wrappers (read from the installed package), refuse what FlashInfer refuses
or would wait for, and compute attention densely. The Triton kernels around them run for real, in the interpreter.
"""

import sys

import pytest
import torch

from engine.attention import choose
from engine.attention import flashinfer as backend_module
from engine.attention.choose import choose_attention
from engine.attention.flashinfer import FlashInferAttention, find_obstacle
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from tests.support.attention import CPU, Problem, check_writes
from tests.support.flashinfer_doubles import Decode, Prefill, Wrapper


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "BatchDecodeWithPagedKVCacheWrapper", Decode)
    monkeypatch.setattr(backend_module, "BatchPrefillWithPagedKVCacheWrapper", Prefill)
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(Wrapper, "plans", [])


def check(problem: Problem, backend: FlashInferAttention, window: int | None) -> None:
    out, pool = problem.run(backend, window)
    expected, _ = problem.run(TorchSdpaAttention(problem.shape), window)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    check_writes(problem, pool)


def build(problem: Problem, *windows: int | None) -> FlashInferAttention:
    return FlashInferAttention(problem.shape, windows, problem.query.dtype, CPU)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (2, 2)])
@pytest.mark.parametrize(
    "lens", [[(1, 1), (1, 40), (1, 16), (1, 17)], [(24, 24)], [(5, 33), (1, 9), (3, 3), (16, 48)]], ids=str
)
def test_steps_are_those_of_torch_sdpa(lens: list[tuple[int, int]], heads: tuple[int, int], window: int | None) -> None:
    problem = Problem(lens, heads=heads, head_dim=16)
    check(problem, build(problem, None, 1, 20), window)
    assert len(Wrapper.plans) == 3  # once per step and window, not per layer


def test_a_captured_step_is_planned_into_buffers_of_its_own() -> None:
    problem = Problem([(1, 1), (1, 40), (1, 17)], head_dim=16)
    check(problem, build(problem, None).for_graph(3, 1, 6), None)
    for other in ((4, 1, 6), (3, 1, 5)):  # not the planned numbers: FlashInfer refuses them
        with pytest.raises(AssertionError):
            check(problem, build(problem, None).for_graph(*other), None)
    backend = build(problem, None)
    assert backend.for_graph(1, 1, 1)._workspace is backend._workspace


@pytest.mark.parametrize("window", [None, 20])
def test_a_captured_step_of_drafts_has_as_many_for_each_sequence(window: int | None) -> None:
    problem = Problem([(4, 4), (4, 40), (4, 17)], heads=(2, 2), head_dim=16)
    check(problem, build(problem, None, 20).for_graph(3, 4, 6), window)


def test_keys_and_values_fit_into_fp8_pages() -> None:
    problem = Problem([(1, 20), (1, 3)], head_dim=16)
    problem.key *= 1000  # beyond its largest number
    backend = build(problem, None)
    pool = problem.pool.to(torch.float8_e4m3fn)
    backend.plan(pool, problem.batch)
    backend.attend(1, problem.heads, None)
    assert Wrapper.plans[0]["kv_data_type"] is torch.float8_e4m3fn
    assert pool.float().abs().max() == 448


def test_models_that_flashinfer_has_no_kernels_for() -> None:
    shape = AttentionShape(4, 2, 64, 0.125)
    assert find_obstacle(shape, torch.bfloat16) is find_obstacle(shape, torch.float16) is None
    assert "float32" in str(find_obstacle(shape, torch.float32))
    assert "80 dimensions" in str(find_obstacle(AttentionShape(4, 2, 80, 0.1), torch.bfloat16))
    with_sinks = choose_attention(shape, [None], torch.device("cuda"), torch.bfloat16, has_sinks=True)
    assert with_sinks.backend.name == "torch_sdpa" and with_sinks.is_fallback and "sinks" in with_sinks.reason
    with pytest.raises(ValueError, match="sinks"):
        FlashInferAttention(shape, [None], torch.bfloat16, CPU).attend(0, Problem([(1, 1)]).heads, None, torch.zeros(4))


def test_without_flashinfer_torch_attends_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.attention.flashinfer", None)
    monkeypatch.delattr("engine.attention.flashinfer", raising=False)
    choice = choose_attention(AttentionShape(4, 2, 64, 0.125), [None], torch.device("cuda"), torch.bfloat16)
    assert choice.backend.name == "torch_sdpa" and choice.is_fallback
    assert "cannot be imported" in choice.reason and "baton[cuda]" in choice.reason


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("window", [None, 20])
def test_prompts_are_attended_to_by_fa3_and_answers_beside_a_chunk_by_fa2(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "FA3_TOKENS", 8)

    def planned(lens: list[tuple[int, int]], has_fa3: bool) -> list[str]:
        problem = Problem(lens, head_dim=16)
        backend = FlashInferAttention(problem.shape, [None, 20], problem.query.dtype, CPU, has_fa3)
        check(problem, backend, window)  # plans once, which loads all modules
        Wrapper.plans.clear()
        check(problem, backend, window)
        return [plan["backend"] for plan in Wrapper.plans]

    prompts, mixed, answers = [(9, 9), (7, 23)], [(14, 30), (1, 9)], [(1, 8), (1, 9)]
    assert planned(prompts, True) == ["fa3"] * 2
    assert planned(prompts, False) == planned(mixed, True) == planned(answers, True) == ["fa2"] * 2


def test_the_first_prompt_loads_all_modules() -> None:
    problem = Problem([(5, 5)], head_dim=16)
    check(problem, FlashInferAttention(problem.shape, [None], problem.query.dtype, CPU, has_fa3=True), None)
    assert {plan["backend"] for plan in Wrapper.plans} == {"fa2", "fa3"}  # no later one compiles or reads a module


@pytest.mark.parametrize(
    ("kv_dtype", "reason"), [(None, "FlashInfer, fa2 and for prompts fa3"), (FP8, "FlashInfer, fa2")]
)
def test_the_choice_for_a_gpu_says_which_kernels(
    kv_dtype: torch.dtype | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choose, "explain_no_compiler", lambda: "")
    built: list[object] = []
    monkeypatch.setattr(backend_module, "FlashInferAttention", lambda *args: built.extend(args))
    shape, device = AttentionShape(32, 8, 128, 0.1), torch.device("cuda")
    assert choose_attention(shape, [None], device, BF16, kv_dtype).reason == reason
    assert built == [shape, frozenset([None]), BF16, device, kv_dtype is None]
