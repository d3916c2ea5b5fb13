"""The FlashInfer backend against torch_sdpa, with doubles of FlashInfer's wrappers.

The doubles have the signatures of the real wrappers (read from the installed package), refuse what FlashInfer refuses
or would wait for, and compute attention densely. The Triton kernels around them run for real, in the interpreter.
"""

import os
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flashinfer.jit.attention import modules as flashinfer_modules
from structlog.testing import capture_logs
from transformers import CONFIG_MAPPING, AutoConfig

from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.catalogue import FAMILIES, build_config
from engine.compose import choose_attention
from engine.cuda import device as device_module
from engine.cuda import flashinfer as backend_module
from engine.cuda import flashinfer_latents, modules, toolkit
from engine.cuda.flashinfer import FlashInferAttention, find_obstacle
from engine.cuda.modules import (
    BuiltAhead,
    Capability,
    Kernels,
    choose_kernels,
    find_built,
    find_gap,
    name_modules,
    runs_on,
)
from tests.support.attention import CPU, Problem, check_writes
from tests.support.combinations import combination
from tests.support.families import DEEPSEEK_V3
from tests.support.flashinfer_doubles import Decode, Prefill, Wrapper


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "BatchDecodeWithPagedKVCacheWrapper", Decode)
    monkeypatch.setattr(backend_module, "BatchPrefillWithPagedKVCacheWrapper", Prefill)
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setitem(modules.SHORT, "float32", "f32")  # in which the doubles compute
    monkeypatch.setattr(Wrapper, "plans", [])


H100 = 132  # multiprocessors
PROPERTIES = SimpleNamespace(multi_processor_count=H100)


def check(problem: Problem, backend: FlashInferAttention, window: int | None) -> None:
    out, pool = problem.run(backend, window)
    expected, _ = problem.run(TorchSdpaAttention(problem.shape), window)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    check_writes(problem, pool)


def build(problem: Problem, *windows: int | None) -> FlashInferAttention:
    return FlashInferAttention(problem.shape, windows, problem.query.dtype, CPU, H100)


DECODE, PROMPT, MIXED = [(1, 1), (1, 40), (1, 16), (1, 17)], [(24, 24)], [(5, 33), (1, 9), (3, 3), (16, 48)]


@pytest.mark.parametrize(
    ("lens", "heads", "window"),  # each two of a lens, of heads and of a window in one of them
    [
        (DECODE, (6, 2), None), (DECODE, (7, 1), 1), (DECODE, (2, 2), 20),
        (PROMPT, (6, 2), 1), (PROMPT, (7, 1), 20), (PROMPT, (2, 2), None),
        (MIXED, (6, 2), 20), (MIXED, (7, 1), None), (MIXED, (2, 2), 1),
    ],
    ids=str,
)  # fmt: skip
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


def test_a_long_context_among_many_answers_is_divided_but_not_by_windows() -> None:
    problem = Problem([(1, 3)] * 40 + [(1, 300)], heads=(2, 2), head_dim=16)
    backend = FlashInferAttention(problem.shape, [None, 20], problem.query.dtype, CPU, num_processors=4)
    check(problem, backend.for_graph(41, 1, 59), None)
    assert [plan["fixed_split_size"] for plan in Wrapper.plans] == [8, None]
    check(problem, backend, None)  # its scratch memory is FlashInfer's own: too small here
    assert [plan["fixed_split_size"] for plan in Wrapper.plans[2:]] == [None, None]


def test_buffers_of_another_name_are_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.flashinfer_doubles.inspect.getsource", lambda _method: "")
    problem = Problem([(1, 1)], head_dim=16)
    with pytest.raises(AttributeError, match=r"no _int_workspace_buffer: install flashinfer-python"):
        build(problem, None).plan(problem.pool, problem.batch)


def test_the_log_says_once_that_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flashinfer.jit.env.FLASHINFER_JIT_DIR", tmp_path)
    problem = Problem([(1, 1)], head_dim=16)
    with capture_logs() as lines:
        backend = build(problem, None, 20)
        for _ in range(2):
            backend.plan(problem.pool, problem.batch)
    ((said,),) = [[line["kernels"] for line in lines if "takes minutes" in line["event"]]]
    assert said == ["f32 with KV in f32, heads of 16", "f32 with KV in f32, heads of 16, a window"]
    for name in name_modules(problem.shape, [None, 20], "float32", "float32"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    with capture_logs() as lines:
        build(problem, None, 20).plan(problem.pool, problem.batch)
    assert not lines, "they are there from before"


class Copying:
    """A torch.cuda event of a copy."""

    waited = 0

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        Copying.waited += 1


def test_six_steps_of_all_kinds_of_plans_are_on_their_way_before_one_waits() -> None:
    problem = Problem([(1, 3), (5, 9)], head_dim=16)
    backend = build(problem, None, 1, 20)
    staged, Copying.waited = backend._workspace._staged, 0
    backend._workspace._mark = Copying  # type: ignore[assignment]
    for step in range(6):
        backend.plan(problem.pool, problem.batch)
        assert (len(staged), Copying.waited) == (6 * (step + 1), 0)
    backend.plan(problem.pool, problem.batch)
    assert (len(staged), Copying.waited) == (36, 6)
    for _, is_copied in staged:
        is_copied.is_done = True  # type: ignore[union-attr]
    backend.plan(problem.pool, problem.batch)
    assert (len(staged), Copying.waited) == (36, 6), "what has been copied is taken at once"


def test_answers_with_drafts_are_planned_apart_from_both() -> None:
    problem = Problem([(1, 30), (4, 9), (1, 9), (2, 2), (18, 30), (1, 5)], head_dim=16)
    check(problem, build(problem, None), None)
    decode, drafts, prefill = Wrapper.plans
    assert decode["q_len_per_req"] == 1 and decode["indptr"].tolist() == [0, 2]
    assert (drafts["backend"], drafts["qo_indptr"].tolist()) == ("fa2", [0, 4, 5, 7])
    assert prefill["qo_indptr"].tolist() == [0, 18, 19]


def test_answers_are_planned_apart_from_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own pages, lengths and tile; answers after a prompt, which a step never has, as prompts."""
    monkeypatch.setattr(backend_module, "FA3_TOKENS", 8)
    monkeypatch.setattr(backend_module, "MOST_DRAFTED", 1)
    problem = Problem([(1, 30), (1, 9), (14, 30), (11, 11)], head_dim=16)
    backend = FlashInferAttention(problem.shape, [None], problem.query.dtype, CPU, H100, has_fa3=True)
    check(problem, backend, None)
    decode, other, prefill = Wrapper.plans
    assert decode["q_len_per_req"] == 1 and decode["indptr"].tolist() == [0, 2, 3]
    assert (other["backend"], prefill["backend"]) == ("fa2", "fa3")  # the first prompt loads both
    assert prefill["qo_indptr"].tolist() == [0, 14, 25] and prefill["indptr"].tolist() == [0, 2, 3]
    check(Problem([(3, 9), (1, 20)], head_dim=16), backend, None)


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
    assert "72 dimensions" in str(find_obstacle(AttentionShape(4, 2, 72, 0.1), torch.bfloat16))
    assert find_obstacle(AttentionShape(4, 2, 80, 0.1), torch.bfloat16) is None
    assert find_obstacle(shape, torch.bfloat16, has_sinks=True) is None
    capped = AttentionShape(4, 2, 64, 0.125, softcap=50.0)
    with_sinks = choose_attention(capped, [None], torch.device("cuda"), torch.bfloat16, has_sinks=True)
    assert with_sinks.backend.name == "torch_sdpa" and with_sinks.is_fallback and "sinks" in with_sinks.reason
    with pytest.raises(ValueError, match="sinks"):
        FlashInferAttention(shape, [None], torch.bfloat16, CPU, H100).attend(
            0, Problem([(1, 1)]).heads, None, torch.zeros(4)
        )


@pytest.mark.parametrize(
    ("lens", "window"), [combination(DECODE, 20), combination(PROMPT, None), (MIXED, 20), (DECODE, None)], ids=str
)
def test_sinks_join_the_softmax_of_answers_and_prompts(lens: list[tuple[int, int]], window: int | None) -> None:
    problem = Problem(lens, head_dim=16)
    problem.sinks = torch.linspace(-1, 4, 6)
    backend = FlashInferAttention(problem.shape, [None, 20], torch.float32, CPU, H100, sinks_kv=torch.float32)
    check(problem, backend, window)
    if lens is DECODE:
        check(problem, backend.for_graph(4, 1, 7), window)
    problem.sinks = None  # a layer without any
    check(problem, backend, window)


@pytest.mark.parametrize(("lens", "head_dim"), [(DECODE, 80), (PROMPT, 96), (MIXED, 112)], ids=str)
def test_pages_pad_heads_that_flashinfer_lacks(lens: list[tuple[int, int]], head_dim: int) -> None:
    """Zeros follow keys and values, as they were when the pool was made."""
    problem = Problem(lens, head_dim=head_dim)
    problem.pool = torch.nn.functional.pad(problem.pool, (0, 128 - head_dim))
    backend = build(problem, None)
    check(problem, backend, None)
    assert Wrapper.plans[0].get("head_dim_qk", Wrapper.plans[0].get("head_dim")) == 128
    assert Wrapper.plans[0]["sm_scale"] == head_dim**-0.5
    if lens is DECODE:
        check(problem, backend.for_graph(4, 1, 7), None)


GIVEN = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6}}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in CONFIG_MAPPING])
def test_every_family_is_attended_by_flashinfer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100, of transformers' own sizes."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(device_module, "explain_no_compiler", lambda: "")
    for module, name in ((backend_module, "FlashInferAttention"), (flashinfer_latents, "FlashInferLatents")):
        monkeypatch.setattr(module, name, lambda *args: SimpleNamespace(name="flashinfer", is_capturable=True))
    config = build_config(AutoConfig.for_model(family, **GIVEN.get(family, {})).to_dict())
    for shape in set(config.attention_shapes):
        choice = choose_attention(shape, config.windows, torch.device("cuda"), BF16, has_sinks=config.has_sinks)
        assert choice.backend.name == "flashinfer", choice.reason


def test_without_flashinfer_torch_attends_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.cuda.flashinfer", None)
    monkeypatch.delattr("engine.cuda.flashinfer", raising=False)
    choice = choose_attention(AttentionShape(4, 2, 64, 0.125), [None], torch.device("cuda"), torch.bfloat16)
    assert choice.backend.name == "torch_sdpa" and choice.is_fallback
    assert "cannot be imported" in choice.reason and "baton[cuda]" in choice.reason


def test_another_flashinfer_is_not_used_and_the_right_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "VERSION", "0.7.4")
    choice = choose_attention(AttentionShape(4, 2, 64, 0.125), [None], torch.device("cuda"), torch.bfloat16)
    assert choice.backend.name == "torch_sdpa" and choice.is_fallback
    assert "0.7.4" in choice.reason and "'flashinfer-python==0.7.2.*'" in choice.reason


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("window", [combination(None), 20])
def test_prompts_are_attended_to_by_fa3_and_answers_beside_a_chunk_by_fa2(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "FA3_TOKENS", 8)

    def planned(lens: list[tuple[int, int]], has_fa3: bool) -> list[str]:
        problem = Problem(lens, head_dim=16)
        backend = FlashInferAttention(problem.shape, [None, 20], problem.query.dtype, CPU, H100, has_fa3)
        check(problem, backend, window)  # plans once, which loads all modules
        Wrapper.plans.clear()
        check(problem, backend, window)
        return [plan["backend"] for plan in Wrapper.plans]

    prompts, mixed, answers = [(9, 9), (7, 23)], [(14, 30), (1, 9)], [(1, 8), (1, 9)]
    assert planned(prompts, True) == ["fa3"] * 2
    assert planned(prompts, False) == planned(mixed, True) == planned(answers, True) == ["fa2"] * 2


def test_the_first_prompt_loads_all_modules() -> None:
    problem = Problem([(5, 5)], head_dim=16)
    check(problem, FlashInferAttention(problem.shape, [None], problem.query.dtype, CPU, H100, has_fa3=True), None)
    assert {plan["backend"] for plan in Wrapper.plans} == {"fa2", "fa3"}  # no later one compiles or reads a module


def test_heads_of_512_are_attended_by_fa2_alone() -> None:
    shape = AttentionShape(8, 2, 512, 0.1)
    for size, kernels in ((shape, ("fa2",)), (AttentionShape(8, 2, 256, 0.1), ("fa2", "fa3"))):
        built = BuiltAhead(frozenset(), ())
        assert choose_kernels(size, [None], "bfloat16", "bfloat16", built, (9, 0), "")[0] == kernels
        assert "8.0" in choose_kernels(size, [None], "bfloat16", "bfloat16", built, (7, 5), "")[1]


@pytest.mark.parametrize(
    ("kv_dtype", "reason"), [(None, "FlashInfer, fa2 and for prompts fa3"), (FP8, "FlashInfer, fa2")]
)
def test_the_choice_for_a_gpu_says_which_kernels(
    kv_dtype: torch.dtype | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(device_module, "explain_no_compiler", lambda: "")
    built: list[object] = []
    monkeypatch.setattr(backend_module, "FlashInferAttention", lambda *args: built.extend(args))
    shape, device = AttentionShape(32, 8, 128, 0.1), torch.device("cuda")
    assert choose_attention(shape, [None], device, BF16, kv_dtype).reason == reason
    assert built == [shape, frozenset([None]), BF16, device, H100, kv_dtype is None, None]
    built.clear()
    small = AttentionShape(64, 8, 64, 0.1)
    assert choose_attention(small, [None], device, BF16, kv_dtype, has_sinks=True).reason == "FlashInfer, fa2"
    assert built[-2:] == [False, kv_dtype or BF16]


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


LATENTS = build_config(DEEPSEEK_V3).attention_shapes[0]


@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
def test_names_of_latents_are_those_that_flashinfer_asks_for(kernels: Kernels) -> None:
    own = torch.bfloat16
    mla = flashinfer_modules.get_batch_mla_uri(kernels, own, FP8, own, torch.int32, 512, 64, False)
    uri = flashinfer_modules.get_batch_prefill_uri(
        kernels, own, own, own, torch.int32, 192, 128, 0, False, False, False
    )
    heads = uri
    if kernels == "fa2":
        heads = flashinfer_modules._get_batch_prefill_module_uri(uri, "fa2", "equal", "full")
    assert name_modules(LATENTS, [None], "bfloat16", "float8_e4m3fn", kernels) == {mla, heads}


def test_a_hopper_attends_to_latents_by_fa3_if_it_can() -> None:
    def choose_here(
        built: frozenset[str], capability: Capability, no_compiler: str = "there is no nvcc", kv: str = "bfloat16"
    ) -> tuple[tuple[str, ...], str]:
        ahead = BuiltAhead(built, ("8.0", "9.0a"))
        return choose_kernels(LATENTS, [None], "bfloat16", kv, ahead, capability, no_compiler)

    fa2, fa3 = (name_modules(LATENTS, [None], "bfloat16", "bfloat16", kind) for kind in ("fa2", "fa3"))
    assert choose_here(fa2 | fa3, (9, 0)) == (("fa3",), "FlashInfer, fa3 for latents")
    kinds, reason = choose_here(fa2, (9, 0))
    assert kinds == ("fa2",) and "fa2 for latents; FlashInfer has no module built ahead for bf16" in reason
    assert choose_here(fa2 | fa3, (8, 0))[0] == choose_here(frozenset(), (8, 9), "")[0] == ("fa2",)
    kinds, reason = choose_here(frozenset(), (8, 9))
    assert not kinds and "bf16 with KV in bf16, latents of 512, and there is no nvcc: build it" in reason
    assert choose_here(frozenset(), (9, 0), "", "float8_e4m3fn")[0] == ("fa3",)
    assert "unset --kv-dtype" in choose_here(frozenset(), (10, 0), "", "float8_e4m3fn")[1]


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
    with_sinks = name_modules(SHAPE, [9], "bfloat16", "bfloat16", has_sinks=True)
    assert "heads of 128, a window, sinks, and" in str(find_gap(with_sinks, built, (9, 0), "there is no nvcc"))
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
    monkeypatch.setattr(device_module, "find_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: PROPERTIES)
    monkeypatch.setattr(backend_module, "FlashInferAttention", Backend)
    choice = choose_attention(SHAPE, [None], torch.device("cuda"), torch.bfloat16)
    assert choice.backend.name == name and choice.is_fallback == (name == "torch_sdpa")
    assert ("build them for 8.9" in choice.reason) == choice.is_fallback


def test_why_nothing_is_compiled_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert toolkit.explain_no_compiler() == "there is no nvcc"
    (tmp_path / "bin").mkdir()
    for name, lacks in (("nvcc", "there is no g++"), ("gcc", "there is no g++"), ("c++", "")):
        (tmp_path / "bin" / name).touch(mode=0o755)
        assert toolkit.explain_no_compiler() == lacks
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert toolkit.explain_no_compiler() == "FLASHINFER_DISABLE_JIT is set"


def test_the_compiler_of_python_packages_is_that_of_torchs_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_DISABLE_JIT", toolkit.LINK_FLAGS):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    packages = tmp_path / "site" / "nvidia" / "cu13"
    for file in ("bin/nvcc", "lib/libcudart.so.13"):
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).touch(mode=0o755)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert toolkit.find_packages() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert toolkit.find_nvcc() == str(packages / "bin/nvcc")
    toolkit.choose_toolkit()
    links = tmp_path / "cache/baton/cuda-links"
    assert (os.environ["CUDA_HOME"], os.environ[toolkit.LINK_FLAGS]) == (str(packages), f"-L{links}")
    assert (links / "libcudart.so").resolve() == packages / "lib/libcudart.so.13"
    assert {file.name for file in links.iterdir()} == {"libcudart.so", "libcuda.so"}
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    toolkit.choose_toolkit()
    assert os.environ["CUDA_HOME"] == str(tmp_path), "what is set counts"
