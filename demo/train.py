"""Trains the tokenizer, the target and the draft from generated text on the CPU.

    python -m demo.train --out DIR --minutes 50 --seed 1

The schedule follows the clock, not a step count, so the run ends on time on any machine.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo.batches import BATCH_TOKENS, Batch, batches, documents
from demo.shapes import draft_config, new_model, save_checkpoint, target_config
from demo.tokens import train_tokenizer

TARGET_SHARE = 0.72  # of the minutes; the draft gets the rest
SAVE_EVERY_S = 300.0
REPORT_EVERY_S = 20.0
WARMUP_SHARE = 0.02
Loss = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """The budget of one training run."""

    name: str
    seconds: float
    peak_rate: float
    save: Callable[[], None]


def rate_at(progress: float, peak: float) -> float:
    """Learning rate: a short linear warm-up, then a cosine down to a fiftieth of the peak. progress in 0..1."""
    if progress < WARMUP_SHARE:
        return peak * (progress + 0.001) / WARMUP_SHARE
    return peak * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def logits_at(model: LlamaForCausalLM, body: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Logits at the batch's positions only. -> [n, vocab], float32"""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(batch.ids)
        logits: torch.Tensor = model.lm_head(hidden.flatten(0, 1)[batch.positions])
    return logits.float()


def body_of(model: LlamaForCausalLM, is_compiled: bool) -> Callable[..., torch.Tensor]:
    """The model without its head, ids [rows, tokens] -> hidden [rows, tokens, hidden]."""

    def body(ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    return torch.compile(body, dynamic=False) if is_compiled else body


def learning_loss(model: LlamaForCausalLM, is_compiled: bool) -> Loss:
    body = body_of(model, is_compiled)
    return lambda batch: functional.cross_entropy(logits_at(model, body, batch), batch.labels)


def distilling_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, is_compiled: bool) -> Loss:
    """Follow the target's distribution, above all its first choice, which greedy speculation accepts."""
    body, target_body = body_of(draft, is_compiled), body_of(target, is_compiled)

    def loss(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            wanted = logits_at(target, target_body, batch)
        logits = logits_at(draft, body, batch)
        soft = functional.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
        return 0.5 * soft + 0.5 * functional.cross_entropy(logits, wanted.argmax(-1))

    return loss


def train(model: LlamaForCausalLM, loss_of: Loss, source: Iterator[Batch], plan: Plan) -> None:
    steps = optimizers(model)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    start = saved = reported = time.monotonic()
    with Progress(*columns) as progress:
        bar = progress.add_task(plan.name, total=plan.seconds)
        for count in itertools.count(1):
            now = time.monotonic()
            if now - start >= plan.seconds:
                break
            rate = rate_at((now - start) / plan.seconds, plan.peak_rate)
            loss = loss_of(next(source))
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in steps:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
            if now - reported > REPORT_EVERY_S or count == 1:
                speed = count * BATCH_TOKENS / (time.monotonic() - start)
                progress.console.print(f"{plan.name}: step {count}, loss {loss.item():.4f}, {speed:.0f} tokens/s")
                reported = now
            if now - saved > SAVE_EVERY_S:
                plan.save()
                saved = now
            progress.update(bar, completed=now - start)
    plan.save()


def tokenizer_for(out: Path, seed: int) -> Tokenizer:
    """The tokenizer already in `out`, so that a second run keeps the token ids; otherwise a new one."""
    known = out / "target" / "tokenizer.json"
    if known.exists():
        return Tokenizer.from_file(str(known))
    return train_tokenizer(itertools.islice(documents(Random(seed)), 20_000))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write target/ and draft/ into")
    parser.add_argument("--minutes", type=float, default=50.0, help="time for both models together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("target", "draft"), help="train one; a draft follows the target in --out")
    parser.add_argument("--resume", action="store_true", help="go on from the weights in --out, at half the rate")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile (needs a C++ compiler)")
    return parser.parse_args()


def starting_model(config: LlamaConfig, seed: int, known: Path | None) -> LlamaForCausalLM:
    """A new model, or the one saved in `known`."""
    if known is None:
        return new_model(config, seed)
    return LlamaForCausalLM.from_pretrained(known, dtype=torch.float32, trust_remote_code=False)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    is_compiled, seed, seconds = not options.no_compile, options.seed, options.minutes * 60
    target_dir, draft_dir = options.out / "target", options.out / "draft"
    tokenizer, rate_scale = tokenizer_for(options.out, seed), 0.5 if options.resume else 1.0
    if options.only != "draft":
        target = starting_model(target_config(), seed, target_dir if options.resume else None)
        share = 1.0 if options.only else TARGET_SHARE
        plan = Plan(
            "target", seconds * share, rate_scale * 4e-3, lambda: save_checkpoint(target, tokenizer, target_dir)
        )
        train(target, learning_loss(target, is_compiled), batches(seed, tokenizer), plan)
    if options.only != "target":
        teacher = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32, trust_remote_code=False)
        draft = starting_model(draft_config(), seed + 1, draft_dir if options.resume else None)
        share = 1.0 if options.only else 1 - TARGET_SHARE
        plan = Plan("draft", seconds * share, rate_scale * 6e-3, lambda: save_checkpoint(draft, tokenizer, draft_dir))
        train(draft, distilling_loss(draft, teacher, is_compiled), batches(seed + 1, tokenizer), plan)


if __name__ == "__main__":
    main()
