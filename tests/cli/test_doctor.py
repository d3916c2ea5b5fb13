"""`baton doctor`: conclusions from facts about made-up machines, and a run on this one."""

import json
import sys
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
import torch
from rich.console import Console

from cli import doctor_probe
from cli.bench import load_shape
from cli.doctor import show
from cli.doctor_plan import judge
from cli.doctor_probe import examine_flashinfer, examine_machine, find_modules, read_architectures
from cli.doctor_rules import GpuFacts, Machine, Model, Row
from engine.attention.shape import AttentionShape
from engine.cuda.modules import BuiltAhead, name_modules
from engine.models.config import ModelConfig
from runtime.config import ServeConfig
from runtime.settings import field_names
from tests.support.command_line import call
from wire.kv_layout import PagePart

GIB = 1 << 30
H200 = GpuFacts("NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0), "uuid")
HEADS = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1)
WIDE = replace(HEADS, head_dim=256)
MODULES = tuple(sorted(name_modules(HEADS, [None], "bfloat16", "bfloat16")))
ALL = ("8.0", "8.9", "9.0a", "10.0f", "12.0f")  # what prebuild compiles for
CPU = Machine(
    num_cores=8, num_host_cores=16, memory_bytes=64 * GIB, instruction_sets=("avx2", "avx512", "amx"),
    cpp_compiler="g++", kernel_error="", products="", are_products_slow=False, reading_rate=0.0, multiplying_rate=0.0,
    c_compiler="/usr/bin/gcc", has_python_header=True,
    has_own_pid_namespace=False, has_own_ipc_namespace=False, memory_file_error="",
    locked_bytes=8 << 20,
    torch="2.11.0+cpu", torch_cuda="", torch_architectures=(), driver="", num_driver_gpus=0,
    visible_gpus=(), visible_setting="", gpus=(),
    strangers=(), linked=(), triton="", flashinfer="", flashinfer_error="", flashinfer_modules=(),
    flashinfer_architectures=(), no_compiler="there is no nvcc", nixl="", rdma_devices=(),
)  # fmt: skip
NODE = replace(
    CPU, torch="2.11.0+cu130", torch_cuda="13.0", driver="580.65", num_driver_gpus=2, visible_gpus=("0", "1"),
    gpus=(H200, replace(H200, uuid="GPU-b")), triton="3.6.0", flashinfer="0.7.2", flashinfer_modules=MODULES,
    flashinfer_architectures=ALL, linked=((0, 1),), torch_architectures=("7.5", "8.0", "8.6", "9.0", "10.0", "12.0"),
)  # fmt: skip
PARTS = (PagePart(8, (2 << 20) // 8),)
SHAPE = load_shape("8B")
ON_CPU = Model(
    "cpu",
    "bfloat16",
    "bfloat16",
    128,
    (),
    True,
    8192,
    PARTS,
    16 * GIB,
    "cpu_paged",
    "CPU kernel, AMX",
    False,
    SHAPE,
    "calls as hermes: the chat template writes calls so",
)
ON_GPU = replace(
    ON_CPU, device="cuda", modules=MODULES, attention="flashinfer", attention_reason="GPU of compute capability 9.0"
)


def look(config: ServeConfig, machine: Machine, model: Model | Exception) -> dict[str, Row]:
    """Part |-> its row. Each part occurs once, and advice is one line."""
    rows = judge(config, machine, model)
    assert len({row.part for row in rows}) == len(rows)
    assert not any("\n" in row.advice for row in rows)
    return {row.part: row for row in rows}


def troubles(rows: dict[str, Row]) -> dict[str, str]:
    return {part: row.status for part, row in rows.items() if row.status != "ok"}


def test_machines_as_they_should_be() -> None:
    rows = look(ServeConfig(), CPU, ON_CPU)
    assert troubles(rows) == {}
    assert rows["cores"].found.startswith("8 of 16 ")
    assert rows["hand-off"].found.startswith("shm: ")
    assert "room for 64 contexts, within 0.25 of free memory" in rows["decode-0"].found
    rows = look(ServeConfig(transport="grpc"), NODE, ON_GPU)
    assert troubles(rows) == {}
    assert rows["prefill-0"].found.startswith("gpu 0; attention flashinfer (GPU of")
    assert rows["decode-0"].found.startswith("gpu 1; ")
    assert rows["peer access"].found == "between all GPUs, over NVLink: --transport cuda_ipc can read pages"
    assert " (fp8 for" in rows["gpu 0"].found
    assert "modules built ahead for 8.0 8.9 9.0a 10.0f 12.0f" in rows["flashinfer"].found
    rows = look(ServeConfig(), replace(NODE, gpus=(H200,), visible_gpus=("0",)), ON_GPU)
    assert troubles(rows) == {}
    assert rows["workers"].found.startswith("0 prefill, 1 decode: decode workers need all GPUs and compute prompts too")
    assert "2048 prompt tokens in a step" in rows["decode-0"].found


NO_FILE = replace(CPU, memory_file_error="ENOSYS")
NO_CXX = replace(CPU, kernel_error="no C++ compiler", cpp_compiler="")
SLOW = replace(CPU, products="1 row reads at 0.20 of that", are_products_slow=True)
NO_MODULES = replace(NODE, flashinfer_modules=())
UNSEEN = replace(NODE, gpus=())  # by torch
FAR_APART = replace(NODE, strangers=((1, 0),))  # decode cannot read prefill
FAR_FROM_1 = replace(NODE, strangers=((0, 1),))  # only a rank of prefill is on 1; decode is on 0
OLD = replace(NODE, gpus=(replace(H200, capability=(7, 5)),) * 2)


def test_what_fits_follows_from_memory_and_its_speed() -> None:
    machine = replace(CPU, memory_bytes=20 * GIB, reading_rate=40e9, multiplying_rate=1e12)
    (row,) = [row for row in judge(ServeConfig(), machine, ValueError()) if row.part == "what fits"]
    assert row.found == (
        "models up to bf16 8B (2.5 tokens/s), int8 14B (2.9 tokens/s), int4 24B (2.9 tokens/s); at 10 tokens/s and "
        "more up to bf16 1.7B (12 tokens/s), int8 4B (10 tokens/s), int4 4B (18 tokens/s); a model of 1B reads "
        "prompts at 500 tokens/s, others in proportion"
    )
    tiny = replace(machine, memory_bytes=4 * GIB)
    assert "up to bf16 none" in str([row.found for row in judge(ServeConfig(), tiny, ValueError())])


def put(name: str, gib: float, *capability: int) -> Machine:
    """A machine with one such card, the worker image and a driver for CUDA 13."""
    size = int(gib * GIB)
    major, minor = capability
    return replace(NODE, gpus=(GpuFacts(name, size, size, (major, minor), "a"),), linked=(), num_driver_gpus=1)


L4, B200 = put("NVIDIA L4", 22, 8, 9), put("NVIDIA B200", 178, 10, 0)
MIXED = replace(NODE, gpus=(H200, *L4.gpus), flashinfer_architectures=("9.0a",))


def test_a_torch_without_kernels_for_the_gpu_cannot_serve() -> None:
    """CUDA 12.6 knows no Blackwell."""
    old = ("5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0")
    row = look(ServeConfig(), replace(B200, torch_architectures=old), ON_GPU)["gpu 0"]
    assert row.status == "missing" and "none for this GPU" in row.found and "CUDA 13" in row.advice
    row = look(ServeConfig(), replace(B200, torch_architectures=old, driver="570.86"), ON_GPU)["gpu 0"]
    assert "CU128_WHEEL_INDEX" in row.advice
    assert look(ServeConfig(), replace(L4, torch_architectures=old), ON_GPU)["gpu 0"].status == "ok"


@pytest.mark.parametrize(
    ("driver", "cuda", "found", "advice"),
    [
        ("550.90", "13.0", "needs 580 or newer", "driver to 580 or newer, or install torch for CUDA 12"),
        ("550.90", "", "without CUDA", "CUDA 12, which driver 550.90 runs: pip install 'torch==2.11.*' --index-url"),
        ("470.57", "13.0", "needs 580 or newer", "update NVIDIA's driver to 580 or newer"),
        ("470.57", "12.8", "needs 525 or newer", "update NVIDIA's driver to 525 or newer"),
        ("470.57", "", "without CUDA", "torch's CUDA wheels need 525 at least"),
        ("580.65", "13.0", "does not start torch's CUDA 13.0", "see what nvidia-smi says"),
        ("", "12.8", "driver unknown", "see what nvidia-smi says"),
    ],
)
def test_drivers_that_do_not_run_the_cuda_of_torch(driver: str, cuda: str, found: str, advice: str) -> None:
    row = look(ServeConfig(), replace(UNSEEN, driver=driver, torch_cuda=cuda), ON_CPU)["gpu"]
    assert row.status == "warning" and found in row.found and advice in row.advice
    assert ("install" in row.advice) == (driver == "550.90")


@pytest.mark.parametrize(
    ("linked", "strangers", "found"),
    [
        ((), (), "between all GPUs, over PCIe: "),
        (((0, 1), (0, 2), (1, 2)), (), "between all GPUs, over NVLink: "),
        (((0, 1),), (), "between all GPUs, over NVLink between 0 and 1, else PCIe: "),
        (((0, 1),), ((2, 0), (1, 2)), "not between 0 and 2, 1 and 2; the others over NVLink"),
        ((), ((0, 1), (0, 2), (1, 2)), "not between 0 and 1, 0 and 2, 1 and 2"),
    ],
)
def test_what_joins_gpus(
    linked: tuple[tuple[int, int], ...], strangers: tuple[tuple[int, int], ...], found: str
) -> None:
    machine = replace(NODE, gpus=(H200,) * 3, visible_gpus=("0", "1", "2"), linked=linked, strangers=strangers)
    row = look(ServeConfig(), machine, ON_GPU)["peer access"]
    assert row.found.startswith(found)
    assert ("cuda_ipc" in row.found) == (not strangers)


@pytest.mark.parametrize(
    ("config", "machine", "part", "status", "advice"),
    [
        # the requested settings are impossible
        (ServeConfig(device="cuda"), CPU, "gpu", "missing", "install NVIDIA's driver"),
        (ServeConfig(device="cuda"), replace(UNSEEN, torch_cuda=""), "gpu", "missing", "torch's CUDA wheel"),
        (ServeConfig(transport="shm"), NO_FILE, "hand-off", "missing", "--transport auto"),
        (ServeConfig(transport="shm", require_transport=True), NO_FILE, "hand-off", "missing", "--require-transport"),
        (ServeConfig(transport="cuda_ipc"), CPU, "hand-off", "missing", "--transport auto"),
        (ServeConfig(transport="cuda_ipc"), FAR_APART, "hand-off", "missing", "--transport auto"),
        (ServeConfig(transport="nixl"), CPU, "nixl", "missing", "pip install 'baton[nixl]'"),
        (ServeConfig(transport="nixl"), replace(NODE, torch_cuda="12.8"), "nixl", "missing", "'baton[nixl-cu12]'"),
        (ServeConfig(transport="nixl"), CPU, "hand-off", "missing", "--transport auto"),
        (ServeConfig(transport="nixl"), replace(CPU, nixl="1.5.1"), "nixl", "warning", "takes --nixl-allow-tcp"),
        (ServeConfig(transport="nixl", nixl_allow_tcp=True), replace(CPU, nixl="1.5.1"), "nixl", "ok", ""),
        (ServeConfig(transport="nixl"), replace(NODE, nixl="1.5.1", rdma_devices=("mlx5_0",)), "nixl", "ok", ""),
        (ServeConfig(transport="nixl"), replace(CPU, nixl="1.5.1"), "hand-off", "ok", ""),
        (ServeConfig(max_context_tokens=9000), CPU, "prefill-0", "missing", "--max-context-tokens 8192 or less"),
        (ServeConfig(kv_memory_mib=100), CPU, "decode-0", "missing", "--kv-memory-mib 1024 or more"),
        (ServeConfig(), replace(CPU, memory_bytes=GIB), "decode-0", "missing", "--kv-memory-mib 1024 or more"),
        (ServeConfig(gpu_memory_share=0.6, decode_workers=3), NODE, "workers", "missing", "--decode-workers 2"),
        (ServeConfig(prefill_tp=3), NODE, "workers", "missing", "each rank has a GPU of its own"),
        (ServeConfig(transport="cuda_ipc", prefill_tp=2), FAR_FROM_1, "hand-off", "missing", "--transport auto"),
        (ServeConfig(gpu_memory_share=0.05), NODE, "decode-0", "missing", "--gpu-memory-share 0.13 or more"),
        # possible, but slower than necessary
        (ServeConfig(), replace(UNSEEN, driver="570.86"), "gpu", "warning", "update NVIDIA's driver"),
        (ServeConfig(), replace(UNSEEN, visible_gpus=()), "gpu", "warning", "unset CUDA_VISIBLE_DEVICES"),
        (ServeConfig(), FAR_APART, "peer access", "warning", "set CUDA_VISIBLE_DEVICES"),
        (ServeConfig(), NO_CXX, "cpu kernels", "warning", "install g++"),
        (ServeConfig(), replace(NO_CXX, cpp_compiler="g++"), "cpu kernels", "warning", "set CXX"),
        (ServeConfig(), SLOW, "cpu kernels", "warning", "set CXX to a newer g++"),
        (ServeConfig(), NO_FILE, "shared memory", "warning", "allow memfd_create"),
        (ServeConfig(), replace(NODE, flashinfer=""), "flashinfer", "warning", "baton[cuda]"),
        (ServeConfig(), replace(NODE, flashinfer_error="No module tvm_ffi"), "flashinfer", "warning", "baton[cuda]"),
        (ServeConfig(), NO_MODULES, "flashinfer", "warning", "build it (docs/GPU.md)"),
        (ServeConfig(), MIXED, "flashinfer", "warning", "build them for 8.9"),
        (ServeConfig(dtype="float16"), NODE, "flashinfer", "warning", "build it (docs/GPU.md)"),
        (ServeConfig(kv_dtype="fp8"), NODE, "flashinfer", "warning", "build it (docs/GPU.md)"),
        (ServeConfig(), replace(NODE, triton=""), "triton", "warning", "pip install triton"),
        (ServeConfig(), replace(NODE, c_compiler=""), "triton", "warning", "install gcc"),
        (ServeConfig(), replace(NODE, has_python_header=False), "triton", "warning", "python3-dev"),
        (ServeConfig(), replace(NODE, gpus=(replace(H200, free_bytes=GIB),)), "gpu 0", "warning", "--gpu-memory-share"),
        (ServeConfig(), OLD, "gpu 1", "warning", "--dtype float16"),
        # notes
        (ServeConfig(), replace(NO_MODULES, no_compiler=""), "flashinfer", "ok", ""),
        (ServeConfig(), replace(CPU, has_own_pid_namespace=True), "namespaces", "ok", "docker run --pid"),
        (ServeConfig(prefill_workers=0), CPU, "hand-off", "ok", ""),
        (ServeConfig(transport="cuda_ipc"), replace(NODE, strangers=((0, 1),)), "hand-off", "ok", ""),
        (ServeConfig(device="cpu"), UNSEEN, "gpu", "ok", ""),
        (ServeConfig(), replace(NODE, kernel_error="no C++ compiler"), "cpu kernels", "ok", ""),
    ],
)
def test_what_is_wrong_is_told_with_what_changes_it(
    config: ServeConfig, machine: Machine, part: str, status: str, advice: str
) -> None:
    model = ON_GPU if machine.gpus and config.device != "cpu" else ON_CPU
    dtype = "float16" if config.dtype == "float16" else model.dtype
    kv_dtype = "float8_e4m3fn" if config.kv_dtype == "fp8" else dtype
    modules = tuple(name_modules(HEADS, [None], dtype, kv_dtype)) if model.device == "cuda" else ()
    model = replace(model, dtype=dtype, kv_dtype=kv_dtype, modules=modules)
    row = look(config, machine, model)[part]
    assert row.status == status, row
    assert advice in row.advice if advice else not row.advice


def test_a_model_that_cannot_be_examined() -> None:
    rows = look(ServeConfig(model=("a/b",)), CPU, FileNotFoundError("not in the cache"))
    assert (rows["model"].status, "decode-0" in rows) == ("warning", False)
    rows = look(ServeConfig(), CPU, ValueError("head_dim 3 is odd"))
    assert (rows["model"].status, rows["model"].found) == ("missing", "head_dim 3 is odd")
    rows = look(ServeConfig(device="cuda"), CPU, ValueError("no GPU"))
    assert troubles(rows) == {"gpu": "missing"}
    assert not {"model", "prefill-0", "hand-off"} & set(rows)


def test_the_table_fits_into_100_columns() -> None:
    screen = StringIO()
    rows = judge(ServeConfig(), replace(NODE, flashinfer_modules=(), strangers=((0, 1),)), ON_GPU)
    show(rows, Console(file=screen, width=100, force_terminal=True, color_system=None))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert all(row.advice in text for row in rows)


# -- how facts are found ---------------------------------------------------------------------------------------------


class Properties:
    """torch's properties of a GPU."""

    name, total_memory, major, minor, uuid = "NVIDIA H200", 140 * GIB, 9, 0, "uuid"


def test_gpus_are_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has too little memory for a context, and the first cannot read it."""

    def tell_free(index: int) -> tuple[int, int]:
        if index == 1:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return 139 * GIB, 140 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", tell_free)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (0, 1))
    machine = examine_machine()
    assert machine.gpus == (H200, replace(H200, free_bytes=0))
    assert machine.strangers == ((0, 1),)


@dataclass(frozen=True)
class MixedModel:
    """What attention depends on of a model: layers of two head sizes, with windows and without."""

    attention_shapes: tuple[AttentionShape, ...] = (HEADS, HEADS, WIDE, WIDE)
    windows: tuple[int | None, ...] = (None, 8, None, 8)
    has_sinks: bool = False


@pytest.mark.parametrize(
    ("model", "num_modules"),
    [
        (MixedModel(), 4),
        (MixedModel(has_sinks=True), 0),
        (MixedModel(attention_shapes=(HEADS, replace(HEADS, head_dim=80))), 0),
    ],
)
def test_a_models_modules_are_those_of_all_its_layers(model: MixedModel, num_modules: int) -> None:
    half = torch.float16
    assert len(find_modules(cast(ModelConfig, model), half, half)) == num_modules
    assert not find_modules(cast(ModelConfig, model), torch.float32, torch.float32)


def test_torchs_architectures_are_written_like_flashinfers() -> None:
    assert read_architectures(["sm_80", "sm_90a", "sm_120", "compute_120"]) == ("8.0", "9.0a", "12.0", "12.0+PTX")


@pytest.mark.parametrize(
    ("text", "error"), [("__version__ = '0.7.2'", ""), ("import no_such_module", "ModuleNotFoundError: No module")]
)
def test_flashinfer_is_imported_and_its_modules_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    for name in MODULES:
        (tmp_path / "flashinfer" / "data" / "aot" / name).mkdir(parents=True)
        (tmp_path / "flashinfer" / "data" / "aot" / name / f"{name}.so").touch()
    (tmp_path / "flashinfer" / "data" / "aot" / "architectures.txt").write_text("9.0a\n")
    (tmp_path / "flashinfer" / "__init__.py").write_text(text)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    version, found, modules = examine_flashinfer()
    sys.modules.pop("flashinfer", None)
    assert modules == BuiltAhead(frozenset(MODULES), ("9.0a",))
    assert found.startswith(error) and bool(found) == bool(error)
    assert version == "0.7.2" or error


def test_this_machine_in_json() -> None:
    """All facts are real; scripts may rely on the keys."""
    done = call("doctor", "--device=cpu", "--json", "--prefill-workers=2")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), done.stderr
    parts = [row["part"] for row in report["rows"]]
    assert {"cores", "torch", "gpu", "cpu kernels", "namespaces", "shared memory", "model"} <= set(parts)
    assert parts[-5:] == ["workers", "prefill-0", "prefill-1", "decode-0", "hand-off"]
    assert all(set(row) == {"part", "status", "found", "advice"} for row in report["rows"])
    assert report["machine"]["num_cores"] >= 1
    assert (report["model"]["device"], report["model"]["head_dim"]) == ("cpu", 64)
    head_bytes = 16 * 2 * 2 * 64  # of a layer: tokens, K and V, bf16, D
    assert report["model"]["parts"] == [[2, 6 * head_bytes], [1, 2 * head_bytes]], "heads and layers of both models"


def test_it_takes_what_serve_takes_and_its_exit_code_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probe, "examine_machine", lambda: CPU)
    done = call("doctor", "--device=cpu", "--kv-memory-mib=1")
    assert done.returncode == 1 and "set --kv-memory-mib" in " ".join(done.stdout.split())
    done = call("doctor", "--help")
    assert all(f"--{name.replace('_', '-')}" in done.stdout for name in field_names(ServeConfig))
