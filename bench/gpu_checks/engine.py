"""The engine on the device against transformers; a decode worker's steps, with and without graphs, drafts and masks."""

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.gpu_checks.loop import GATEWAY, run_jobs
from decode_worker.grammar.bindings import compile_text
from decode_worker.grammar.matcher import LoadedGrammar
from decode_worker.grammar.vocabulary import read_vocabulary
from decode_worker.speculation.speculator import Speculator
from demo.paths import DRAFT_DIR, TARGET_DIR
from engine.batch import ForwardRow
from engine.compose import FullEngine, build_engine
from engine.cuda.captured import capture_graphs
from engine.cuda.graph_shapes import MAX_DRAFT_ROWS, choose_shapes
from engine.engine import KvDType
from engine.formats.fp8 import has_fp8
from engine.input_batch import InputBatch
from engine.layers.linear import Quantization
from tests.support.batches import SAMPLINGS
from tests.support.decoding import build_speculators
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams
from worker.params import SequenceParams
from worker.table import num_rows_for

PAGE_TOKENS, ROW_PAGES, NUM_TOKENS = 16, 8, 16
PROMPT = list(range(20, 120))
MAX_DRAFTS = 4
STEP_S = 5e-3  # of the drafters' cost model, so that plans do not depend on the machine
CHUNK_TOKENS = 32  # prompts take several steps, beside answers
SIZES = {"cuda": (len(SAMPLINGS), 32), "cpu": (4, 32)}  # answers, tokens of each
# KV dtype |-> of 12 answers, how many may differ: kernels for other numbers of rows round differently. float16 has an
# eighth of bfloat16's rounding, so near-ties are rare; a code of e4m3 that falls the other way is a larger step.
MOST_TIES = {"auto": 3, "fp8": 5}
MOST_REGRET = 0.5  # of a log-probability, that bfloat16 may cost
FP8_ERRORS = {"weights": 3.0, "KV": 1.0}  # of a log-probability at most; see check_logits
CHURN_TOKENS = 48  # of an answer: longer than admission leaves room for
FEW_PAGES = 24  # for 12 sequences that need up to 60: some are preempted
GRAMMAR = 'root ::= "{" [a-z]* "}"'


def build_demo_engine(
    dtype: str, device: torch.device, max_running: int, graph_rows: int = 0, quantization: Quantization = "none",
    kv_dtype: KvDType = "auto",
) -> FullEngine:  # fmt: skip
    """The demo model and its draft model; each row's pages are contiguous. On a CPU, graphs are calls."""
    num_pages = num_rows_for(max_running) * ROW_PAGES
    engine = build_engine(
        str(TARGET_DIR), str(DRAFT_DIR), dtype, device.type, 1, PAGE_TOKENS,
        num_rows_for(max_running), lambda *_: (num_pages + (device.type == "cpu"), 0), lambda _done, _total: None,
        ROW_PAGES * PAGE_TOKENS - MAX_DRAFT_TOKENS, quantization, kv_dtype,
    )  # fmt: skip
    engine.warm_up(graph_rows, MAX_DRAFTS)
    if device.type == "cpu" and graph_rows:
        assert engine.draft_runner is not None
        for runner in (engine.runner, engine.draft_runner):
            capture_graphs(
                runner, choose_shapes(graph_rows, MAX_DRAFTS, MAX_DRAFT_ROWS), lambda compute: compute, num_pages
            )
        engine = replace(engine, padding_page=num_pages)
    return engine


def open_row(rows: InputBatch, row: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
    rows.open(row, np.array(prompt, np.int32), sampling, len(prompt))
    rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))


@cache
def load_reference(dtype: torch.dtype = torch.float32) -> Any:
    """transformers' demo model, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=dtype, trust_remote_code=False)


@cache
def reference_tokens() -> list[int]:
    """transformers' greedy answer to PROMPT, in float32 on the CPU."""
    ids = torch.tensor([PROMPT])
    answer = load_reference().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = answer[0, len(PROMPT) :].tolist()
    return tokens


def find_regret(tokens: Sequence[int], prompt: Sequence[int] = PROMPT) -> float:
    """Largest gap between the likeliest log-probability and an answer token's; by transformers in float32."""
    with torch.inference_mode():
        logits = load_reference()(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), -1)
    own = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (logprobs.max(-1).values - own).max().item()


def check_greedy(device: torch.device) -> str:
    """float32: transformers' tokens"""
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
    """Log-probabilities of 100 tokens: float32 near transformers', bfloat16 no worse than transformers', and fp8"""
    ids = torch.tensor([PROMPT])
    truth = _score(load_reference(), ids)
    theirs = _score(load_reference(torch.bfloat16).to(device), ids)
    bounds = {"float32": 1e-3, "bfloat16": 1.5 * (theirs - truth).abs().max().item() + 0.01}
    found = []
    for name, dtype, quantization, kv_dtype in (
        ("float32", "float32", "none", "auto"), ("bfloat16", "bfloat16", "none", "auto"),
        ("fp8 weights", "bfloat16", "fp8", "auto"), ("fp8 KV", "bfloat16", "none", "fp8"),
    ):  # fmt: skip
        if "fp8" in name and not has_fp8(device):
            found.append(f"no {name} on this GPU")
            continue
        engine = build_demo_engine(dtype, device, 1, 0, quantization, kv_dtype)  # type: ignore[arg-type]
        open_row(engine.rows, 0, PROMPT, SamplingParams(temperature=0.0))
        count = len(PROMPT) - 1  # more than the 64 rows up to which fp8 weights take rows as they are
        step = engine.runner.launch([ForwardRow(0, 0, count, num_logits=count, num_given=count)]).collect()
        ours = torch.tensor([one.logprob for one in step.logprobs if one is not None])
        error = (ours - truth).abs().max().item()
        bound = bounds.get(name) or FP8_ERRORS[name.removeprefix("fp8 ")]
        assert error <= bound, f"{name}: off by {error:.2g}, allowed {bound:.2g}"
        found.append(f"{name} off by {error:.1e} (allowed {bound:.1e})")
    return ", ".join(found)


def _score(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of every token but the first."""
    with torch.inference_mode():
        logits = model(ids.to(model.device)).logits[0, :-1].float().cpu()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def build_answers(
    count: int, num_tokens: int, drafter: str, has_json: bool = False, is_greedy: bool = False
) -> list[SequenceParams]:  # fmt: skip
    """A request for each kind of sampling; the fourth matches a grammar if `has_json`."""
    words = read_vocabulary(TARGET_DIR, 1024)
    grammar = LoadedGrammar(compile_text("ebnf", GRAMMAR, words.info), words, words.text_mask("ebnf", GRAMMAR))
    return [
        SequenceParams(
            str(row), np.array(PROMPT[row % 3 : 3 + 5 * row], np.int32).tobytes(), max(5 * row + 2 - row % 3, 0),
            num_tokens, gateway=GATEWAY, handle=row + 1, sampling=SAMPLINGS[0] if is_greedy else SAMPLINGS[row],
            drafter=drafter, max_draft_tokens=0 if drafter == "off" else MAX_DRAFTS,
            grammar=grammar if has_json and row == 3 else None,
        )
        for row in range(count)
    ]  # fmt: skip


def build_drafters(engine: FullEngine, is_ahead: bool) -> Mapping[str, Speculator]:
    return build_speculators(engine, CHUNK_TOKENS, is_ahead, STEP_S)


def check_ahead(device: torch.device) -> str:
    """float32, no graphs: a step ahead, with drafts and with one JSON client of 12, gives the tokens of one by one"""
    return _compare(build_demo_engine("float32", device, len(SAMPLINGS)), None, 0)


def check_graphs(device: torch.device) -> str:
    """Graphs of one and of several tokens, one by one and ahead, with drafts and JSON: the tokens of eager steps"""
    dtype = "float16" if device.type == "cuda" else "float32"  # FlashInfer has no float32
    found = []
    for kv_dtype in ("auto", "fp8") if device.type == "cuda" and has_fp8(device) else ("auto",):
        eager, graphs = (
            build_demo_engine(dtype, device, len(SAMPLINGS), rows, kv_dtype=kv_dtype) for rows in (0, len(SAMPLINGS))
        )
        found.append(f"KV {kv_dtype}: " + _compare(eager, graphs, MOST_TIES[kv_dtype] if device.type == "cuda" else 0))
    return "; ".join(found)


def _compare(eager: FullEngine, graphs: FullEngine | None, most_ties: int) -> str:
    """Answers by eager steps one by one, against all other ways; at most `most_ties` answers of each way differ."""
    found, num_drafted, sizes = [], 0, SIZES[eager.device.type]
    for has_json in (False, True):
        truth = run_jobs(
            eager, build_answers(*sizes, "off", has_json), steps_ahead=0, chunk_tokens=CHUNK_TOKENS
        ).tokens  # fmt: skip
        for drafter, ahead in (("off", 0), ("off", 1), ("ngram", 1), ("draft", 0), ("draft", 1)):
            if (graphs is None and not ahead) or (has_json and drafter == "off"):
                continue
            engine = graphs or eager
            ran = run_jobs(
                engine, build_answers(*sizes, drafter, has_json), build_drafters(engine, bool(ahead))[drafter],
                steps_ahead=ahead, chunk_tokens=CHUNK_TOKENS, may_wait=graphs is None or drafter != "off",
            )  # fmt: skip
            num_drafted += ran.num_drafted
            different = sorted(handle for handle in truth if ran.tokens[handle] != truth[handle])
            way = f"{drafter}{' ahead' * ahead}{' with JSON' * has_json}"
            assert len(different) <= most_ties, f"{way}: answers {different} differ from eager ones"
            found.append(f"{way} {len(different)}")
            assert bool(ran.num_accepted) == (drafter != "off"), f"{way}: {ran.num_accepted} drafts were right"
    return f"{sizes[0]} answers, {num_drafted} drafts; answers that differ: {', '.join(found)}"


def check_churn(device: torch.device) -> str:
    """MINUTES (default 1) of preemption, aborts and pages that change owners: greedy answers stay right"""
    seconds = 60 * float(os.environ.get("MINUTES") or 1) if device.type == "cuda" else 0
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    engine = build_demo_engine(dtype, device, len(SAMPLINGS), len(SAMPLINGS))
    truth = run_jobs(engine, build_answers(len(SAMPLINGS), CHURN_TOKENS, "off", is_greedy=True), steps_ahead=0).tokens
    until, num_rounds, worst = time.monotonic() + seconds, 0, 0.0
    num_preemptions = num_answers = num_aborted = num_ties = 0
    while not num_rounds or time.monotonic() < until:
        draw, drafter = random.Random(num_rounds), ("ngram", "draft", "off")[num_rounds % 3]
        requests = [
            replace(one, handle=one.handle + len(truth) * copy)
            for copy in range(2)
            for one in build_answers(len(SAMPLINGS), CHURN_TOKENS, drafter, is_greedy=True)
        ]
        draw.shuffle(requests)
        ran = run_jobs(
            engine, requests, build_drafters(engine, True)[drafter], steps_ahead=1, num_pages=FEW_PAGES,
            at_once=len(truth), chunk_tokens=CHUNK_TOKENS,
            aborted={one.handle: draw.randrange(1, CHURN_TOKENS) for one in draw.sample(requests, len(requests) // 4)},
        )  # fmt: skip
        for one in requests:
            tokens, expected = ran.tokens.get(one.handle, []), truth[(one.handle - 1) % len(truth) + 1]
            if tokens != expected[: len(tokens)]:
                num_ties += 1
                worst = max(worst, find_regret(tokens, np.frombuffer(one.prompt, np.int32).tolist()))
        assert worst <= (MOST_REGRET if device.type == "cuda" else 0), f"a token is less likely than the best: {worst}"
        num_rounds, num_preemptions = num_rounds + 1, num_preemptions + ran.scheduler.num_preemptions
        num_answers, num_aborted = num_answers + len(ran.ends), num_aborted + len(requests) - len(ran.ends)
    assert num_preemptions, "nothing was preempted"
    return (
        f"{num_answers} answers, {num_aborted} aborted, {num_preemptions} preemptions; {num_ties} answers with another "
        f"token at a near-tie, regret {worst:.2g}"
    )
