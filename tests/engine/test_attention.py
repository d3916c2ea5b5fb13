"""Attention over pages: torch_sdpa against a dense float64 softmax, the C++ kernel against torch_sdpa."""

import ctypes
import multiprocessing
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from structlog.testing import capture_logs
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.qkv import QKV
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import Batch
from engine.compose import choose_attention
from engine.cpu import build, cpu_paged
from engine.cpu.build import BuildError, load_kernel
from engine.cpu.cpu_math import Math, choose_math
from engine.cpu.cpu_paged import CpuPagedAttention, count_head_parts
from engine.weights.folders import cache_folder
from tests.support.attention import CPU, HAS_COMPILER, Problem, check_writes, needs_compiler, of_layer
from tests.support.combinations import others
from tests.support.instruction_sets import AMX, BUILDS, HAS_AMX, built_for
from wire.kv_layout import KV_HEADS, LAYERS, TOKENS
from wire.private_folders import UnsafeFolderError

CONTEXTS = (1, 15, 16, 17, 100, 1000)
DTYPES = (torch.float32, torch.bfloat16)


def tolerance(dtype: torch.dtype) -> float:
    return 2e-2 if dtype is torch.bfloat16 else 5e-6  # bfloat16: 2^-8 of outputs up to about 3, and of probabilities


def kernels(shape: AttentionShape, *of: Math) -> list[CpuPagedAttention]:
    found: list[CpuPagedAttention] = []
    for variant in [*BUILDS, *([AMX] if HAS_AMX else [])] if HAS_COMPILER else ():
        if variant.math in of:
            with built_for(variant):
                found.append(CpuPagedAttention(shape, load_kernel("cpu_paged"), variant.math))
    return found


def backends(shape: AttentionShape, dtype: torch.dtype) -> list[AttentionBackend]:
    return [TorchSdpaAttention(shape), *kernels(shape, *Math)]


def check_against_truth(problem: Problem, window: int | None = None) -> None:
    expected = problem.truth(window)
    dtype = problem.query.dtype
    for backend in backends(problem.shape, dtype):
        out, pool = problem.run(backend, window)
        assert out.dtype is dtype and out.is_contiguous() and out.shape == expected.shape
        error = float((out.double() - expected).abs().max())
        assert error < tolerance(dtype), f"{backend.name}: {error}"
        check_writes(problem, pool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "heads", "page_tokens"), [(64, (6, 2), 16), (80, (4, 4), 32), (128, (8, 1), 16)], ids=str
)
def test_mixed_batch(head_dim: int, heads: tuple[int, int], page_tokens: int, dtype: torch.dtype) -> None:
    lens = [*((1, context) for context in CONTEXTS), (5, 60), (17, 17), (100, 100), (90, 230)]
    check_against_truth(Problem(lens, heads, head_dim, page_tokens, dtype))


@pytest.mark.parametrize("dtype", others(DTYPES, torch.bfloat16), ids=str)
@pytest.mark.parametrize("window", [1, 16, 129, 5000])
def test_windows(window: int, dtype: torch.dtype) -> None:
    check_against_truth(Problem([(1, 1), (1, 17), (1, 400), (300, 300), (70, 333)], dtype=dtype), window)


@pytest.mark.parametrize("dtype", others(DTYPES, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("head_dim", "page_tokens"),
    [(8, 16), (32, 1), (48, 7), (96, 64), (33, 5), (512, 16)],
)
def test_odd_shapes(head_dim: int, page_tokens: int, dtype: torch.dtype) -> None:
    check_against_truth(Problem([(1, 33), (40, 150)], (10, 2), head_dim, page_tokens, dtype))


@pytest.mark.parametrize("dtype", others(DTYPES, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("num_heads", "dims", "page_tokens"),
    [(16, (576, 512), 16), (40, (288, 256), 32), (4, (56, 40), 16), (1, (9, 8), 5)],
    ids=str,
)
def test_values_that_are_part_of_the_keys(
    num_heads: int, dims: tuple[int, int], page_tokens: int, dtype: torch.dtype
) -> None:
    """As latents are: many query rows share one key."""
    head_dim, value_dim = dims
    lens = [(1, 1), (1, 17), (1, 300), (3, 290), (40, 40), (33, 150)]
    check_against_truth(Problem(lens, (num_heads, 1), head_dim, page_tokens, dtype, value_dim))


TREE = (0, 0, 1, 1, 3, 2, 0, 7, 7)  # parents of drafts


def bits_of(parents: tuple[int, ...]) -> list[int]:
    bits = [1]
    for index, parent in enumerate(parents, 1):
        bits.append(bits[parent] | 1 << index)
    return bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_trees_tokens_see_what_was_before_and_their_ancestors(softcap: float, dtype: torch.dtype) -> None:
    """Across pages and tiles, and beside others, whose bits stay the same."""
    lens = [(1, 33), (10, 70), (40, 45), (10, 10), (10, 131), (1, 500)]
    problem = Problem(lens, (8, 2), 64, 16, dtype)
    problem.shape = replace(problem.shape, softcap=softcap)
    plain = [problem.run(backend)[0] for backend in backends(problem.shape, dtype)]
    ancestors = [bit for query, _ in lens for bit in (bits_of(TREE) if query == 10 else [0] * query)]
    problem.batch = replace(problem.batch, ancestors=torch.tensor(ancestors, dtype=torch.int32))
    check_against_truth(problem)
    others = problem.batch.ancestors == 0
    for backend, expected in zip(backends(problem.shape, dtype), plain, strict=True):
        found = problem.run(backend)[0]
        assert torch.equal(found[others], expected[others]) and not torch.equal(found, expected), backend.name


@pytest.mark.parametrize("dtype", others(DTYPES, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("softcap", "has_sinks", "window"), [(2.0, False, 16), (0.0, True, None), (2.0, True, 129)])
def test_softcap_and_sinks(window: int | None, softcap: float, has_sinks: bool, dtype: torch.dtype) -> None:
    problem = Problem([(1, 1), (1, 17), (1, 400), (300, 300), (70, 333)], dtype=dtype)
    problem.shape = replace(problem.shape, softcap=softcap)
    if has_sinks:
        problem.sinks = torch.tensor([-200.0, -3.0, 0.0, 2.0, 6.0, 200.0])
    check_against_truth(problem, window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_neither_overflow_nor_leak(dtype: torch.dtype) -> None:
    problem = Problem([(1, 100), (64, 300)], dtype=dtype)
    problem.query, problem.pool, problem.key = problem.query * 32, problem.pool * 32, problem.key * 32
    problem.value = problem.value * 32
    expected = problem.truth(None)
    for backend in backends(problem.shape, dtype):
        out = problem.run(backend)[0].double()
        assert out.isfinite().all()
        # A score of 5000 has an error of 3e-4 in float32, and so has its probability; values reach 130.
        assert float((out - expected).abs().max()) < (0.1 if dtype is torch.float32 else 2), backend.name


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_pages_not_seen_does_not_leak(dtype: torch.dtype) -> None:
    problem = Problem([(1, 33), (20, 45)], dtype=dtype)
    clean = [problem.run(backend)[0] for backend in backends(problem.shape, dtype)]
    seen = torch.zeros(problem.pool.shape[0], 16, dtype=torch.bool)
    for (_, context), pages in zip(problem.lens, problem.pages, strict=True):
        for position in range(context):
            seen[pages[position // 16], position % 16] = True
    of_layer(problem.pool, 1).masked_fill_(~seen[:, None, :, None], torch.nan)
    for backend, expected in list(zip(backends(problem.shape, dtype), clean, strict=True))[1:]:
        assert torch.equal(problem.run(backend)[0], expected)


@needs_compiler
def test_thread_count_does_not_change_a_bit() -> None:
    problem = Problem([(1, 1000), (200, 300), (1, 5)], dtype=torch.bfloat16)
    backend = CpuPagedAttention(problem.shape, load_kernel("cpu_paged"), choose_math())
    before = torch.get_num_threads()
    results: list[Tensor] = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(problem.run(backend)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@needs_compiler
@pytest.mark.parametrize("dtype", others(DTYPES, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("lens", "value_dim", "softcap", "window"),
    [([(1, 500)], 64, 0.0, None), ([(1, 500)], 0, 2.0, None), ([(7, 480)], 0, 2.0, 129)],
)
def test_threads_share_the_query_heads_of_one_kv_head(
    lens: list[tuple[int, int]], value_dim: int, softcap: float, window: int | None, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of latents, and of any model with one KV head; with the same bits as one thread."""
    monkeypatch.setattr(cpu_paged, "LEAST_SHARED_BYTES", 1)
    assert [count_head_parts(12, 1, threads) for threads in (1, 2, 5, 8, 64)] == [1, 2, 6, 12, 1]
    assert count_head_parts(12, 4, 8) == 2 and count_head_parts(12, 9, 8) == 1
    problem, before = Problem(lens, (12, 1), 72, 16, dtype, value_dim), torch.get_num_threads()
    if softcap:
        problem.shape = replace(problem.shape, softcap=softcap)
        problem.sinks = torch.linspace(-3, 3, 12)
    expected = problem.truth(window)
    try:
        for backend in kernels(problem.shape, *Math):
            results: list[Tensor] = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                out, pool = problem.run(backend, window)
                assert float((out.double() - expected).abs().max()) < tolerance(dtype), (backend.name, count)
                check_writes(problem, pool)
                results.append(out)
            assert all(torch.equal(out, results[0]) for out in results), backend.name
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("heads", [(3, 3), (12, 4), (12, 2), (12, 1)], ids=str)
@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (2.0, 129)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_however_many_are_beside_it(
    heads: tuple[int, int], softcap: float, window: int | None, dtype: torch.dtype
) -> None:
    """Tiles take another way for up to 4, 8 and 16 rows of a KV head than for more, vectors for up to 16."""
    many = Problem([(20, 603)], heads, 80, 16, dtype)
    many.shape = replace(many.shape, softcap=softcap)
    many.sinks = torch.linspace(-3, 3, heads[0])
    for backend in kernels(many.shape, *Math):
        expected, pool = many.run(backend, window)
        for count in (1, 2, 4, 6):
            few = Problem([(count, 603)], heads, 80, 16, dtype)
            few.shape, few.sinks, few.pool = many.shape, many.sinks, pool
            few.query, few.key, few.value = many.query[-count:], many.key[-count:], many.value[-count:]
            found = few.run(backend, window)[0]
            assert torch.equal(found, expected[-count:]), f"{backend.name}: {count}"


# --- what the kernel refuses


def lens(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def spoil(batch: Batch, name: str, index: tuple[int, ...], value: int) -> Batch:
    tensor: Tensor = getattr(batch, name).clone()
    tensor[index] = value
    fields: dict[str, Any] = {name: tensor}
    return replace(batch, **fields)


@needs_compiler
def test_what_changes_after_a_good_batch_is_checked() -> None:
    problem = Problem([(1, 33), (1, 45)])
    good = problem.batch
    others = (
        (spoil(good, "page_table", (0, 1), 10_000), "page_table holds 10000"),
        (spoil(good, "slot_mapping", (0,), 100_000), "slot_mapping holds 100000"),
        (spoil(good, "slot_mapping", (0,), -2), "slot_mapping holds -2"),
        (spoil(good, "seq_lens", (0,), 99), "seq_lens .* differ"),
        (spoil(good, "cu_seqlens_q", (1,), 2), "cu_seqlens_q"),
        (replace(good, query_lens_host=lens(1, 2)), "cu_seqlens_q"),
        (replace(good, token_ids=good.token_ids[:1]), "slot_mapping is"),
        (replace(good, page_table=good.page_table[:, :1].contiguous()), "45 tokens in a page table of 1 pages"),
    )
    for batch, message in others:
        backend = CpuPagedAttention(problem.shape, load_kernel("cpu_paged"), choose_math())
        backend.plan(problem.pool, good)
        with pytest.raises(ValueError, match=message):
            backend.plan(problem.pool, batch)
        with pytest.raises(AssertionError, match="attend without a plan"):
            backend.attend(0, problem.heads, None)
        backend.plan(problem.pool, good)
        with pytest.raises(ValueError, match="page_table holds"):
            backend.plan(problem.pool[:1], good)


def test_wrong_tensors_are_refused() -> None:
    problem = Problem([(2, 33)])
    backend = CpuPagedAttention(problem.shape, load_kernel("cpu_paged"), choose_math())
    (query_key, value, *_), pool, batch = problem.heads, problem.pool, problem.batch
    strided = torch.zeros(2, 8, 128)[..., ::2]
    for layer, heads, window, message in (
        (0, QKV(query_key[:1], value), None, "query is"),
        (0, QKV(query_key.bfloat16(), value), None, "query is torch.bfloat16"),
        (0, QKV(strided, value), None, "query has strides"),
        (0, QKV(query_key[:, 1:], value), None, "query is"),
        (0, QKV(query_key[:, 1:], value[:, :1]), None, "key is"),
        (0, QKV(query_key, value[..., :32]), None, "value is"),
        (2, problem.heads, None, "layer 2"),
        (-1, problem.heads, None, "layer -1"),
        (0, problem.heads, 0, "window is 0"),
    ):
        backend.plan(pool, batch)
        with pytest.raises(ValueError, match=message):
            backend.attend(layer, heads, window)
    with pytest.raises(ValueError, match="sinks is"):
        backend.attend(0, problem.heads, None, torch.zeros(5))
    for other, message in (
        (pool.half(), "pool is torch.float16"),
        (pool.narrow(KV_HEADS, 0, 1), "pool is"),
        (pool.transpose(TOKENS, LAYERS), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.plan(other, batch)
        with pytest.raises(AssertionError, match="without a plan"):  # the plan before is dropped
            backend.attend(0, problem.heads, None)
    assert torch.equal(pool, Problem([(2, 33)]).pool)


# --- layers that differ in their heads


# --- building and choosing


@needs_compiler
def test_choice_on_this_machine() -> None:
    shape = AttentionShape(4, 2, 64, 0.125)
    assert choose_attention(shape, [None], CPU, torch.bfloat16).backend.name == "cpu_paged"
    half = choose_attention(shape, [None], CPU, torch.float16)
    assert half.backend.name == "torch_sdpa" and half.is_fallback and "float16" in half.reason
    meta = choose_attention(shape, [None], torch.device("meta"), torch.float32)
    assert meta.backend.name == "torch_sdpa" and not meta.is_fallback


@needs_compiler
def test_a_failed_build_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cpu_paged.cpp"
    broken.write_text("int main() { return nonsense; }\n")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    choice = choose_attention(AttentionShape(4, 2, 64, 0.125), [None], CPU, torch.float32)
    assert choice.backend.name == "torch_sdpa" and choice.is_fallback
    assert "nonsense" in choice.reason and "\n" not in choice.reason
    assert not list((tmp_path / "cache" / "baton").iterdir())  # no half-built file is left


def test_a_cache_others_can_write_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "baton").mkdir()
    (tmp_path / "baton").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() != tmp_path / "baton"


def test_a_cache_that_is_a_link_or_below_a_folder_of_all_is_left_out_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "baton").symlink_to(tmp_path)
    with capture_logs() as logs:
        assert cache_folder() == cache_folder() != tmp_path / "cache" / "baton"
        (tmp_path / "cache" / "baton").unlink()
        (tmp_path / "cache").chmod(0o777)
        assert cache_folder() == cache_folder() != tmp_path / "cache" / "baton"
    assert [("is a link" in one["reason"], "mode 0777" in one["reason"]) for one in logs] == [
        (True, False), (False, True),
    ]  # fmt: skip
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    with pytest.raises(UnsafeFolderError):
        cache_folder()


@needs_compiler
def test_a_cache_without_room_is_left_for_another_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=0) if path.is_relative_to(tmp_path / "full") else usage
    )
    with capture_logs() as logged:
        for _ in range(2):
            load_kernel("tiny")
            (tmp_path / "tiny.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert len(list(tmp_path.glob(f"baton-{os.getuid()}/tiny-*.so"))) == 2 and not list(tmp_path.glob("full/*/*"))
    assert [(line["log_level"], line["event"]) for line in logged] == [("warning", "the cache folder is full")]


def _load_in_child(cache: str, results: "multiprocessing.SimpleQueue[str]") -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    try:
        results.put("ok" if isinstance(load_kernel("tiny"), ctypes.CDLL) else "no kernel")
    except BuildError as error:
        results.put(str(error))


@needs_compiler
def test_concurrent_builds_do_not_clash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.cpp"  # quick to compile; what is tested is the cache
    tiny.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    context = multiprocessing.get_context("fork")  # children only compile and dlopen, without torch threads
    results = context.SimpleQueue()
    children = [context.Process(target=_load_in_child, args=(str(tmp_path), results)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    assert [results.get() for _ in children] == ["ok"] * 4
    assert [path.suffix for path in (tmp_path / "baton").iterdir()] == [".so"]
