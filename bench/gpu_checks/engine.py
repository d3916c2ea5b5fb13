"""The engine on the device against transformers, graphs against eager steps, steps ahead against one by one."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.batches import SAMPLINGS
from bench.gpu_checks.attention import without_waiting
from demo.paths import DRAFT_DIR, TARGET_DIR
from engine.batch import ForwardRow
from engine.engine import Engine, build_engine
from engine.input_batch import InputBatch
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams
from worker.scheduler import num_rows_for

PAGE_TOKENS, ROW_PAGES, NUM_TOKENS = 16, 8, 16
PROMPT = list(range(20, 120))
AHEAD = 2
MOST_TIES = 2  # of 12 answers; rounding may change them


def build_demo_engine(dtype: str, device: torch.device, max_running: int, graph_rows: int = 0) -> Engine:
    """The demo model and its draft model; each row's pages are contiguous."""
    engine = build_engine(
        str(TARGET_DIR), str(DRAFT_DIR), dtype, device.type, torch.get_num_threads(), PAGE_TOKENS,
        num_rows_for(max_running), lambda *_: num_rows_for(max_running) * ROW_PAGES,
        lambda _done, _total: None, ROW_PAGES * PAGE_TOKENS - MAX_DRAFT_TOKENS,
    )  # fmt: skip
    engine.warm_up(graph_rows)
    return engine


def open_row(rows: InputBatch, row: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
    rows.open(row, np.array(prompt, np.int32), sampling, len(prompt))
    rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))


@cache
def reference_tokens() -> list[int]:
    """transformers' greedy answer to PROMPT, in float32 on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = answer[0, len(PROMPT) :].tolist()
    return tokens


def check_greedy(device: torch.device) -> str:
    """float32: transformers' tokens."""
    engine = build_demo_engine("float32", device, 1)
    open_row(engine.rows, 0, PROMPT, SamplingParams(temperature=0.0))
    requests = [
        ForwardRow(0, 0, len(PROMPT), 1),
        *(ForwardRow(0, len(PROMPT) + i, 1, 1) for i in range(NUM_TOKENS - 1)),
    ]
    launched = [engine.runner.launch([part]) for part in requests]  # each reads the previous token on the device
    assert [step.collect().tokens[0] for step in launched] == reference_tokens(), "tokens differ"
    return f"{NUM_TOKENS} tokens equal ({engine.attention.backend.name})"


def check_logits(device: torch.device) -> str:
    """Log-probabilities of a prompt's tokens: float32 near transformers', bfloat16 no worse than transformers' own."""
    ids = torch.tensor([PROMPT])
    truth = _transformers_logprobs(ids, torch.float32, torch.device("cpu"))
    found = []
    for dtype in ("float32", "bfloat16"):
        engine = build_demo_engine(dtype, device, 1)
        open_row(engine.rows, 0, PROMPT, SamplingParams(temperature=0.0))
        count = len(PROMPT) - 1
        step = engine.runner.launch([ForwardRow(0, 0, count, num_logits=count, num_given=count)]).collect()
        ours = torch.tensor([one.logprob for one in step.logprobs if one is not None])
        error = (ours - truth).abs().max().item()
        bound = 1e-3
        if dtype == "bfloat16":
            theirs = _transformers_logprobs(ids, torch.bfloat16, device)
            bound = 1.5 * (theirs - truth).abs().max().item() + 0.01
        assert error <= bound, f"{dtype}: off by {error:.2g}, allowed {bound:.2g}"
        found.append(f"{dtype} off by {error:.1e} (allowed {bound:.1e})")
    return ", ".join(found)


def _transformers_logprobs(ids: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of every token but the first."""
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=dtype)
    model.to(device)
    with torch.inference_mode():
        logits = model(ids.to(device)).logits[0, :-1].float().cpu()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def check_graphs(device: torch.device) -> str:
    """Tokens of all kinds of sampling: graphs give those of eager steps, and steps ahead those of graphs."""
    everyone = range(len(SAMPLINGS))
    dtype = "bfloat16" if device.type == "cuda" else "float32"  # FlashInfer has no float32
    prompts = [PROMPT[: 3 + 5 * row] for row in everyone]
    answers: dict[str, list[list[int]]] = {}
    for name, graph_rows, ahead in (("eager", 0, 0), ("graphs", len(SAMPLINGS), 0), ("ahead", len(SAMPLINGS), AHEAD)):
        engine = build_demo_engine(dtype, device, len(SAMPLINGS), graph_rows)
        for row in everyone:
            open_row(engine.rows, row, prompts[row], SAMPLINGS[row])
        launched, collected = [], []
        for step in range(NUM_TOKENS):
            requests = [
                ForwardRow(row, 0, len(prompts[row]), 1)
                if step == 0
                else ForwardRow(row, len(prompts[row]) + step - 1, 1, 1)
                for row in everyone
            ]
            with without_waiting(device):
                launched.append(engine.runner.launch(requests))
            if len(launched) > ahead:
                collected.append(launched.pop(0).collect().tokens)
        collected += [step.collect().tokens for step in launched]
        answers[name] = [list(answer) for answer in zip(*collected, strict=True)]
    assert answers["ahead"] == answers["graphs"], "steps ahead change tokens"
    different = [row for row in everyone if answers["graphs"][row] != answers["eager"][row]]
    allowed = MOST_TIES if device.type == "cuda" else 0  # attention splits work differently there: last bits change
    assert len(different) <= allowed, f"rows {different} differ from eager's"
    return f"{len(SAMPLINGS)} kinds of sampling, {NUM_TOKENS} tokens each, {len(different)} differ; no hidden wait"


def check_eager_ahead(device: torch.device) -> str:
    """float32, no graphs: two steps ahead give the tokens of one by one."""
    answers = []
    for ahead in (0, AHEAD):
        engine = build_demo_engine("float32", device, 1)
        open_row(engine.rows, 0, PROMPT, SAMPLINGS[5])
        launched, collected = [engine.runner.launch([ForwardRow(0, 0, len(PROMPT), 1)])], []
        for step in range(NUM_TOKENS):
            launched.append(engine.runner.launch([ForwardRow(0, len(PROMPT) + step, 1, 1)]))
            if len(launched) > ahead:
                collected += launched.pop(0).collect().tokens
        answers.append(collected + [token for step in launched for token in step.collect().tokens])
    assert answers[0] == answers[1], "tokens differ"
    return f"{len(answers[0])} tokens equal"


def find_regret(tokens: Sequence[int]) -> float:
    """Largest gap between the likeliest log-probability and an answer token's; by transformers in float32."""
    ids = torch.tensor([[*PROMPT, *tokens]])
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1].float(), -1)
    own = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (logprobs.max(-1).values - own).max().item()
