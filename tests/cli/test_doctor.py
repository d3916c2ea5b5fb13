"""`baton doctor`: conclusions from facts about made-up machines, and a run on this one."""

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from cli import doctor_probe
from cli.bench import load_shape
from cli.doctor import show
from cli.doctor_facts import GpuFacts, Machine, Model
from cli.doctor_probe import examine_machine
from cli.doctor_rules import Row, judge
from runtime.config import ServeConfig
from runtime.settings import field_names
from tests.support.command_line import call
from wire.kv_layout import PagePart

GIB = 1 << 30
PEERS = ("GPU-a", "GPU-b")
H200 = GpuFacts("NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0), "GPU-a", PEERS)
CPU = Machine(
    num_cores=8, num_host_cores=16, memory_bytes=64 * GIB, unknown_limits={},
    instruction_sets=("avx2", "avx512", "amx"), cpp_compiler="g++", kernel_error="", products="",
    are_products_slow=False, c_compiler="/usr/bin/gcc", has_python_header=True, own_namespaces=(),
    memory_file_error="", locked_bytes=8 << 20,
    torch="2.11.0+cpu", torch_cuda="", driver="", num_driver_gpus=0, visible_gpus=(), visible_setting="", gpus=(),
    triton="", flashinfer="", no_cuda_compiler="", nixl="", rdma_devices=(),
)  # fmt: skip
NODE = replace(
    CPU, torch="2.11.0+cu130", torch_cuda="13.0", driver="580.65", num_driver_gpus=2, visible_gpus=("0", "1"),
    gpus=(H200, replace(H200, uuid="GPU-b")), triton="3.6.0", flashinfer="0.7.2",
)  # fmt: skip
PARTS = (PagePart(8, (2 << 20) // 8),)
SHAPE = load_shape("8B")
ON_CPU = Model(
    "cpu",
    "bfloat16",
    "bfloat16",
    128,
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
ON_GPU = replace(ON_CPU, device="cuda", attention="flashinfer", attention_reason="GPU of compute capability 9.0")


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
    assert rows["gpu 0"].found.endswith("compute capability 9.0, driver 580.65")
    assert rows["flashinfer"].found == "0.7.2"
    rows = look(ServeConfig(), replace(NODE, gpus=(H200,), visible_gpus=("0",)), ON_GPU)
    assert troubles(rows) == {}
    assert rows["workers"].found.startswith("0 prefill, 1 decode: decode workers need all GPUs and compute prompts too")
    assert "2048 prompt tokens in a step" in rows["decode-0"].found


NO_FILE = replace(CPU, memory_file_error="ENOSYS")
UNMOUNTED = replace(CPU, unknown_limits={"no known limit of memory": "not mounted: mount /sys/fs/cgroup"})
NO_CXX = replace(CPU, kernel_error="no C++ compiler", cpp_compiler="")
SLOW = replace(CPU, products="1 row reads at 0.20 of that", are_products_slow=True)
UNSEEN = replace(NODE, gpus=())  # by torch
FAR_APART = replace(NODE, gpus=(H200, replace(H200, uuid="GPU-b", readable=("GPU-b",))))  # decode cannot read prefill
FAR_FROM_1 = replace(NODE, gpus=(replace(H200, readable=("GPU-a",)), NODE.gpus[1]))  # a rank of prefill; decode is on 0
OLD = replace(NODE, gpus=(replace(H200, capability=(7, 5)),) * 2)


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
        (ServeConfig(), replace(UNSEEN, driver="570.86"), "gpu", "warning", "update NVIDIA's driver, or install torch"),
        (ServeConfig(), replace(UNSEEN, visible_gpus=()), "gpu", "warning", "unset CUDA_VISIBLE_DEVICES"),
        (ServeConfig(), NO_CXX, "cpu kernels", "warning", "install g++"),
        (ServeConfig(), replace(NO_CXX, cpp_compiler="g++"), "cpu kernels", "warning", "set CXX"),
        (ServeConfig(), SLOW, "cpu kernels", "warning", "set CXX to a newer g++"),
        (ServeConfig(), NO_FILE, "shared memory", "warning", "allow memfd_create"),
        (ServeConfig(), UNMOUNTED, "no known limit of memory", "warning", "mount /sys/fs/cgroup"),
        (ServeConfig(), replace(NODE, flashinfer=""), "flashinfer", "warning", "baton[cuda]"),
        (
            ServeConfig(),
            replace(NODE, flashinfer="0.7.4"),
            "flashinfer",
            "warning",
            "pip install 'flashinfer-python==0.7.2",
        ),
        (ServeConfig(), replace(NODE, no_cuda_compiler="there is no nvcc"), "flashinfer", "warning", "baton[cuda]"),
        (ServeConfig(), replace(NODE, no_cuda_compiler="there is no g++"), "flashinfer", "warning", "install g++"),
        (ServeConfig(), replace(NODE, no_cuda_compiler="FLASHINFER_DISABLE_JIT is set"), "flashinfer", "ok", ""),
        (ServeConfig(), replace(NODE, triton=""), "triton", "warning", "pip install triton"),
        (ServeConfig(), replace(NODE, c_compiler=""), "triton", "warning", "install gcc"),
        (ServeConfig(), replace(NODE, has_python_header=False), "triton", "warning", "python3-dev"),
        (ServeConfig(), replace(NODE, gpus=(replace(H200, free_bytes=GIB),)), "gpu 0", "warning", "--gpu-memory-share"),
        (ServeConfig(), OLD, "gpu 1", "warning", "--dtype float16"),
        # notes
        (ServeConfig(), replace(CPU, own_namespaces=("PID",)), "namespaces", "ok", "docker run --pid"),
        (ServeConfig(prefill_workers=0), CPU, "hand-off", "ok", ""),
        (ServeConfig(transport="cuda_ipc"), FAR_FROM_1, "hand-off", "ok", ""),
        (ServeConfig(device="cpu"), UNSEEN, "gpu", "ok", ""),
        (ServeConfig(), replace(NODE, kernel_error="no C++ compiler"), "cpu kernels", "ok", ""),
    ],
)
def test_what_is_wrong_is_told_with_what_changes_it(
    config: ServeConfig, machine: Machine, part: str, status: str, advice: str
) -> None:
    model = ON_GPU if machine.gpus and config.device != "cpu" else ON_CPU
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
    rows = judge(ServeConfig(), replace(NODE, flashinfer="", c_compiler=""), ON_GPU)
    show(rows, Console(file=screen, width=100, force_terminal=True, color_system=None))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert all(row.advice in text for row in rows)


# -- how facts are found ---------------------------------------------------------------------------------------------


class Properties:
    """torch's properties of a GPU."""

    name, total_memory, major, minor = "NVIDIA H200", 140 * GIB, 9, 0

    def __init__(self, index: int) -> None:
        self.uuid = PEERS[index]


def test_gpus_are_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has too little memory for a context, and the first cannot read it."""

    def tell_free(index: int) -> tuple[int, int]:
        if index == 1:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return 139 * GIB, 140 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", tell_free)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (0, 1))
    machine = examine_machine()
    assert machine.gpus == (
        replace(H200, readable=PEERS[:1]),
        replace(H200, uuid="GPU-b", readable=PEERS[::-1], free_bytes=0),
    )


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
    measured = [row["found"] for row in report["rows"] if row["part"] == "cpu kernels"]
    assert "a model of 1B reads prompts at" in measured[0] or report["machine"]["kernel_error"]
    assert (report["model"]["device"], report["model"]["head_dim"]) == ("cpu", 64)
    head_bytes = 16 * 2 * 2 * 64  # of a layer: tokens, K and V, bf16, D
    assert report["model"]["parts"] == [[2, 6 * head_bytes, 6], [1, 2 * head_bytes, 2]], (
        "heads and layers of both models"
    )


def test_it_takes_what_serve_takes_and_its_exit_code_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probe, "examine_machine", lambda: CPU)
    done = call("doctor", "--device=cpu", "--kv-memory-mib=1")
    assert done.returncode == 1 and "set --kv-memory-mib" in " ".join(done.stdout.split())
    done = call("doctor", "--help")
    assert all(f"--{name.replace('_', '-')}" in done.stdout for name in field_names(ServeConfig))
