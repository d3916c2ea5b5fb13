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
import torch
from cyclopts import App
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.live import serve
from demo.paths import TARGET_DIR
from engine.attention.base import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import SequenceSlice, build_batch
from engine.choice import Choice
from engine.kvcache.pool import Pool, PoolShape
from engine.model.weights import load_model
from engine.runner import Runner
from engine.sampling import SamplingParams, sample
from protos import inference_pb2, inference_pb2_grpc

PAGE_TOKENS = 16
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
    slices = [
        SequenceSlice(range(40), 0, [5, 1, 7], num_logits=0),
        SequenceSlice([3], 20, [2, 6], num_logits=1),
    ]
    outputs = []
    for where in (torch.device("cpu"), device):
        generator = torch.Generator().manual_seed(0)
        pool = torch.randn(8, 1, 2, 2, PAGE_TOKENS, 64, generator=generator).to(where)
        query, key, value = (torch.randn(41, heads, 64, generator=generator).to(where) for heads in (8, 2, 2))
        batch = build_batch(slices, PAGE_TOKENS, where)
        outputs.append(TorchSdpaAttention(shape).attend(0, query, key, value, pool, batch, None).cpu())
    worst = (outputs[0] - outputs[1]).abs().max().item()
    assert worst < 1e-4, f"differs by {worst:.2g}"
    return f"largest difference {worst:.1e}"


def check_noise(device: torch.device) -> str:
    """Sampled tokens do not depend on the device."""
    logits = torch.randn(64, 32000, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0, top_p=0.95, top_k=0, min_p=0.0, seed=seed) for seed in range(64)]
    here = sample(logits, params, list(range(64)))
    there = sample(logits.to(device), params, list(range(64))).cpu()
    same = (here == there).sum().item()
    assert same == 64, f"{64 - same} of 64 tokens differ"
    return "64 of 64 tokens equal"


def check_pool(device: torch.device) -> str:
    """Pages leave and enter a pool as the same bytes."""
    pool = Pool(PoolShape(8, 4, 2, PAGE_TOKENS, 64, torch.bfloat16), device)
    pool.tensor.copy_(torch.randn(pool.shape.sizes, generator=torch.Generator().manual_seed(2)))
    rows = pool.load([6, 1])
    pool.store(3, rows[0])
    assert torch.equal(pool.tensor[3], pool.tensor[6])
    assert (pool.load([3])[0] == rows[0]).all()
    return f"{rows.nbytes} bytes"


def check_greedy(device: torch.device) -> str:
    """The engine alone gives transformers' greedy tokens in float32."""
    runner = build_runner("float32", device, num_pages=16)
    tokens, computed = list(PROMPT), 0
    for _ in range(NUM_TOKENS):
        part = SequenceSlice(tokens[computed:], computed, range(16), num_logits=1)
        computed = len(tokens)
        choice = Choice(SamplingParams(temperature=0.0), len(tokens), tokens, len(PROMPT))
        tokens.append(runner.run([part], [choice])[0].token)
    assert tokens[len(PROMPT) :] == reference_tokens(), "tokens differ"
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
    runner = build_runner("bfloat16", device, num_pages=64)
    found = []
    for size in (1, 16):
        slices = [SequenceSlice([9], 40, range(3 * index, 3 * index + 3), num_logits=1) for index in range(size)]
        choices = [Choice(SamplingParams(temperature=0.0), 41, [9] * 41, 41)] * size
        times = []
        for _ in range(20):
            started = time.perf_counter()
            runner.run(slices, choices)
            times.append(time.perf_counter() - started)
        found.append(f"{sorted(times)[10] * 1e3:.2f} ms for {size}")
    return ", ".join(found)


def build_runner(dtype: str, device: torch.device, num_pages: int) -> Runner:
    """The demo model with a pool, without a worker around it."""
    model = load_model(TARGET_DIR, dtype, device)
    config = model.config
    shape = PoolShape(num_pages, config.num_layers, config.num_kv_heads, PAGE_TOKENS, config.head_dim, model.dtype)
    return Runner(model, TorchSdpaAttention(config.attention_shape), Pool(shape, device).tensor)


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
