"""Does everything hold on a GPU? A list of checks in one call, with a table at the end.

    python -m bench.gpu_check            (make gpu-check)

Each check compares the device with the CPU or with transformers. `--device cpu` runs the same checks without a GPU,
which shows that they themselves work.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import numpy as np
import torch
from cyclopts import App
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.batches import Part, build_sampling_batch, pack
from bench.live import serve
from demo.paths import TARGET_DIR
from engine.attention.base import AttentionShape
from engine.attention.heads import Heads
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import Slice
from engine.kvcache.pool import Pool, PoolShape
from engine.model.weights import load_model
from engine.rows import Rows
from engine.runner import Runner
from engine.sampling import sample
from protos import inference_pb2, inference_pb2_grpc
from wire.sampling import SamplingParams

PAGE_TOKENS, ROW_PAGES = 16, 8
PROMPT = list(range(20, 120))
NUM_TOKENS = 16

app = App(help=__doc__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table."""

    name: str
    is_passed: bool
    detail: str
    seconds: float


def check_attention(device: torch.device) -> str:
    """torch_sdpa gives on the device what it gives on the CPU, for a ragged batch on shuffled pages."""
    shape = AttentionShape(8, 2, 64, 0.125)
    parts = [
        Part(range(40), 0, [5, 1, 7], num_logits=0),
        Part([3], 20, [2, 6], num_logits=1),
    ]
    outputs = []
    for where in (torch.device("cpu"), device):
        generator = torch.Generator().manual_seed(0)
        pool = torch.randn(PoolShape(8, 1, 2, PAGE_TOKENS, 64, torch.float32).sizes, generator=generator).to(where)
        query_key, value = (torch.randn(41, heads, 64, generator=generator).to(where) for heads in (10, 2))
        batch = pack(parts, PAGE_TOKENS, where)
        backend = TorchSdpaAttention(shape)
        backend.plan(pool, batch)
        outputs.append(backend.attend(0, Heads(query_key, value), None).cpu())
    worst = (outputs[0] - outputs[1]).abs().max().item()
    assert worst < 1e-4, f"differs by {worst:.2g}"
    return f"largest difference {worst:.1e}"


def check_noise(device: torch.device) -> str:
    """Sampled tokens do not depend on the device."""
    logits = torch.randn(64, 32000, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0, top_p=0.95, top_k=0, min_p=0.0, seed=seed) for seed in range(64)]
    batch = build_sampling_batch(params, range(64))
    there = sample(logits.to(device, copy=True), batch).cpu()
    here = sample(logits, batch)
    same = (here == there).sum().item()
    assert same == 64, f"{64 - same} of 64 tokens differ"
    return "64 of 64 tokens equal"


def check_pool(device: torch.device) -> str:
    """Pages leave and enter a pool as the same bytes."""
    pool = Pool(PoolShape(8, 4, 2, PAGE_TOKENS, 64, torch.bfloat16), device)
    pool.tensor.copy_(torch.randn(pool.shape.sizes, generator=torch.Generator().manual_seed(2)))
    rows = pool.load([6, 1])
    pool.store([3, 5], [rows[0], rows[1]])
    assert torch.equal(pool.tensor[[3, 5]], pool.tensor[[6, 1]])
    assert (pool.load([3, 5]) == rows).all()
    return f"{rows.nbytes} bytes"


def check_greedy(device: torch.device) -> str:
    """The engine alone gives transformers' greedy tokens in float32."""
    runner, rows = build_runner("float32", device, num_rows=1)
    open_row(rows, 0)
    steps = [Slice(0, 0, len(PROMPT), 1), *(Slice(0, len(PROMPT) + i, 1, 1) for i in range(NUM_TOKENS - 1))]
    launched = [runner.launch([step]) for step in steps]  # each reads on the device what the last one chose
    assert [step.collect().tokens[0] for step in launched] == reference_tokens(), "tokens differ"
    return f"{NUM_TOKENS} tokens equal"


def check_service(device: torch.device) -> str:
    """The whole ring on the device gives the same tokens; pages travel by grpc where memory is not shared."""
    with serve(TARGET_DIR, "--dtype=float32", f"--device={device.type}") as live:
        with grpc.insecure_channel(live.grpc_address) as channel:
            ids = inference_pb2.TokenIds(ids=PROMPT)
            request = inference_pb2.GenerateRequest(
                token_ids=ids, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
            )
            parts = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120))
        assert [token for part in parts for token in part.token_ids] == reference_tokens(), "tokens differ"
        moved = live.metric("decode-0", "kv_transfer_bytes_total")
        live.wait_until_unused()
    return f"{moved:.0f} bytes of KV handed over"


def time_steps(device: torch.device) -> str:
    """Time of one decode step of the demo model, alone and for 16 sequences."""
    runner, rows = build_runner("bfloat16", device, num_rows=16)
    for row in range(16):
        open_row(rows, row)
    found = []
    for size in (1, 16):
        slices = [Slice(row, 40, 1, 1) for row in range(size)]
        times = []
        for _ in range(20):
            started = time.perf_counter()
            runner.launch(slices).collect()
            times.append(time.perf_counter() - started)
        found.append(f"{sorted(times)[10] * 1e3:.2f} ms for {size}")
    return ", ".join(found)


def build_runner(dtype: str, device: torch.device, num_rows: int) -> tuple[Runner, Rows]:
    """The demo model with rows and a pool, without a worker around it."""
    model = load_model(TARGET_DIR, dtype, device)
    config = model.config
    num_pages = num_rows * ROW_PAGES
    shape = PoolShape(num_pages, config.num_layers, config.num_kv_heads, PAGE_TOKENS, config.head_dim, model.dtype)
    rows = Rows(num_rows, ROW_PAGES * PAGE_TOKENS, PAGE_TOKENS, config.vocab_size, device)
    return Runner(model, TorchSdpaAttention(config.attention_shape), Pool(shape, device).tensor, rows), rows


def open_row(rows: Rows, row: int) -> None:
    """PROMPT, to be answered greedily."""
    rows.open(row, np.array(PROMPT, np.int32), SamplingParams(temperature=0.0), len(PROMPT))
    rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))


def reference_tokens() -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = answer[0, len(PROMPT) :].tolist()
    return tokens


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "attention equals the CPU's": check_attention,
    "sampling noise equals the CPU's": check_noise,
    "pages survive a round trip": check_pool,
    "engine gives transformers' tokens": check_greedy,
    "service gives transformers' tokens": check_service,
    "decode step, demo model (timing)": time_steps,
}


def run_check(name: str, check: Callable[[torch.device], str], device: torch.device) -> Outcome:
    started = time.monotonic()
    try:
        detail, is_passed = check(device), True
    except Exception as error:  # a failed check is a row, and the others still run
        detail, is_passed = f"{type(error).__name__}: {error}", False
    return Outcome(name, is_passed, detail, time.monotonic() - started)


@app.default
def main(*, device: Literal["cuda", "cpu"] = "cuda") -> int:
    """Run all checks. Exit code 1 when one fails, 2 without a GPU."""
    console = Console(width=140)
    if device == "cuda" and not torch.cuda.is_available():
        console.print("torch sees no GPU here: nothing was checked. `--device cpu` tries the checks themselves.")
        return 2
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    outcomes = [run_check(title, check, torch.device(device)) for title, check in CHECKS.items()]
    table = Table("check", "result", "detail", "s", title=f"{name}, torch {torch.__version__}")
    for outcome in outcomes:
        table.add_row(outcome.name, "ok" if outcome.is_passed else "FAILED", outcome.detail, f"{outcome.seconds:.1f}")
    console.print(table)
    return 0 if all(outcome.is_passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(app())
