"""Trains a draft head (EAGLE-3, or Medusa) for a chat model, on text that it writes itself, in less than an hour of two
cores.

    python -m demo.train_head                        # for smollm2, beside its cached files
    python -m demo.train_head --model FOLDER --out FOLDER --minutes 40 --kind medusa

The learning rate follows the clock, so a run ends on time on a busy machine. The text is kept, for the next run. Where
other processes need the cores too, OMP_WAIT_POLICY=passive makes it several times faster.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from demo.draft_head import DraftHead, Guesser
from demo.head_text import Text, read_text, write_text
from demo.medusa_heads import MedusaHeads, new_medusa
from demo.muon import Muon
from demo.train import rate_at
from engine.formats.gguf_folder import gguf_cache
from runtime.config_parts import SMOLLM2
from worker.startup.models import locate_model

app = App(help=__doc__)
STEPS = 4  # of a chain in training
STEP_WEIGHT = 0.8  # of a step's loss, relative to the step before
DEPTH = 8  # of a chain in evaluation
CHOICES = 8  # of the target's likeliest tokens that are learned for each position
HARD_SHARE = 0.5  # of the loss: the likeliest token alone, which greedy decoding takes
BATCH_TOKENS = 1536
MATRIX_RATE, OTHER_RATE = 1.2e-2, 1e-3  # of Muon and of AdamW, at their peak
# AVX2 has no products of bfloat16, which torch makes of much slower ones
DTYPE = torch.float32 if torch.backends.cpu.get_cpu_capability() == "AVX2" else torch.bfloat16
REPORT_EVERY_S, SAVE_EVERY_S = 60.0, 180.0
MOST_REPORTING = 0.05  # of the time: figures on held-out text take long where cores are slow


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of similar lengths, padded by at least DEPTH + 1 tokens at the end."""

    tokens: Tensor  # [texts, rows + DEPTH + 1]
    is_answer: Tensor  # like tokens

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[1] - DEPTH - 1

    def at(self, step: int, values: Tensor) -> Tensor:
        """values [texts, rows + DEPTH + 1, ...] |-> those of the tokens that a step guesses: [texts, rows, ...]."""
        return values[:, 2 + step : 2 + step + self.num_rows]

    def is_guessed(self, step: int) -> Tensor:
        """Where chains lie in the answer as far as this step. [texts, rows]"""
        return self.at(-1, self.is_answer) & self.at(step, self.is_answer)


@dataclass(frozen=True, slots=True)
class Observed:
    """The target's outputs for a batch."""

    taps: Tensor  # [texts, rows, 3 * hidden], or of what the head reads
    ids: Tensor  # [texts, rows + DEPTH + 1, CHOICES] likeliest tokens in place of each, ids of the draft vocabulary
    weights: Tensor  # like ids: their shares of the loss; 0 for tokens outside of the draft vocabulary


def make_batches(texts: Sequence[Text]) -> list[Batch]:
    groups: list[list[Text]] = [[]]
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if groups[-1] and (len(groups[-1]) + 1) * len(text.tokens) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(text)
    return [_make_batch(group) for group in groups if group]


def _make_batch(texts: Sequence[Text]) -> Batch:
    width = max(len(text.tokens) for text in texts) + DEPTH + 1
    tokens, is_answer = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width).bool()
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        is_answer[row, text.num_prompt : len(text.tokens)] = True
    return Batch(tokens, is_answer)


def load_target(folder: Path) -> LlamaForCausalLM:
    """In DTYPE. ValueError if it is no Llama model."""
    file = next((path.name for path in folder.glob("*.gguf")), None)
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=DTYPE, trust_remote_code=False)
    if not isinstance(target, LlamaForCausalLM):
        raise ValueError(f"{folder} has a {type(target).__name__}, expected a LlamaForCausalLM")
    target.requires_grad_(False)
    return target


def count_tokens(texts: Sequence[Text], vocab_size: int) -> Tensor:
    """How often each token occurs in the answers. [vocab_size]"""
    answers = [token for text in texts for token in text.tokens[text.num_prompt :]]
    return torch.bincount(torch.tensor(answers), minlength=vocab_size)


def new_head(target: LlamaForCausalLM, draft_ids: Tensor) -> DraftHead:
    """It begins with the weights of the target's last layer, adding nothing to the last of the hidden states yet."""
    head = DraftHead(target.config, draft_ids)
    hidden, last = target.config.hidden_size, target.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.normal_(std=0.02 * hidden**-0.5)[:, -hidden:] += torch.eye(hidden)
        for name, matrix in head.midlayer.self_attn.named_parameters():
            known = last.self_attn.get_parameter(name)
            if name == "o_proj.weight":
                matrix.zero_()
            else:
                matrix[:, :hidden].normal_(std=float(known.float().std()))
                matrix[:, -hidden:] = known
        head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        head.midlayer.mlp.down_proj.weight.zero_()
        head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
    return head


@torch.no_grad()
def observe(target: LlamaForCausalLM, head: Guesser, batch: Batch) -> Observed:
    out = target.model(input_ids=batch.tokens[:, : batch.num_rows], use_cache=False, output_hidden_states=True)
    before = batch.is_answer[:, 1 : batch.num_rows + 1]  # the next token is of the answer
    logits = target.lm_head(out.last_hidden_state[before]).float()
    best = logits.topk(CHOICES)
    shares = (1 - HARD_SHARE) * (best.values - logits.logsumexp(-1, keepdim=True)).exp()
    shares[:, 0] += HARD_SHARE
    to_draft = head.t2d.cumsum(0) - 1
    ids = torch.zeros(*batch.tokens.shape, CHOICES, dtype=torch.long)
    weights = torch.zeros(*batch.tokens.shape, CHOICES)
    ids[:, 1 : batch.num_rows + 1][before] = to_draft[best.indices].clamp(min=0)
    weights[:, 1 : batch.num_rows + 1][before] = shares * head.t2d[best.indices]
    return Observed(head.tap(out.hidden_states), ids, weights)


def loss_of(head: Guesser, target: LlamaForCausalLM, batch: Batch, observed: Observed) -> Tensor:
    """Cross-entropy of all steps, a position's own."""
    total = torch.zeros(())
    with torch.autocast("cpu", torch.bfloat16, enabled=DTYPE is torch.bfloat16):
        for step, hidden in enumerate(head.unroll(target.model.embed_tokens, batch.tokens, observed.taps, STEPS)):
            where = batch.is_guessed(step)
            log_shares = head.logits(hidden[where]).log_softmax(-1)
            ids, weights = batch.at(step, observed.ids)[where], batch.at(step, observed.weights)[where]
            loss = -(weights * log_shares.gather(-1, ids)).sum() / where.sum().clamp(min=1)
            total = total + STEP_WEIGHT**step * loss
    return total


@dataclass(frozen=True, slots=True)
class Figures:
    """Chains on held-out text that the target wrote at temperature 0."""

    right: list[float]  # by depth: the share of right guesses after right ones only
    chains: dict[int, float]  # guesses of a chain |-> those accepted, on average over the steps of decoding


@torch.no_grad()
def evaluate(head: Guesser, target: LlamaForCausalLM, batches: Sequence[Batch], lengths: Sequence[int]) -> Figures:
    tried, right = torch.zeros(DEPTH), torch.zeros(DEPTH)
    accepted: dict[int, list[int]] = {length: [] for length in lengths}
    for batch in batches:
        taps, is_right = observe(target, head, batch).taps, batch.at(-1, batch.is_answer)
        count = torch.zeros_like(is_right, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=DTYPE is torch.bfloat16):
            for step, hidden in enumerate(head.unroll(target.model.embed_tokens, batch.tokens, taps, DEPTH)):
                possible = is_right & batch.is_guessed(step)
                is_right = possible & (head.guess(hidden) == batch.at(step, batch.tokens))
                tried[step] += possible.sum()
                right[step] += is_right.sum()
                count += is_right
        for counts, is_answer in zip(count.tolist(), batch.at(-1, batch.is_answer).tolist(), strict=True):
            begin, end = is_answer.index(True), sum(is_answer) + is_answer.index(True)
            for length in lengths:
                row = begin
                while row < end - 1:  # at the last row nothing is left to guess
                    accepted[length].append(min(counts[row], length))
                    row += 1 + accepted[length][-1]
    means = {length: sum(found) / max(len(found), 1) for length, found in accepted.items()}
    return Figures((right / tried.clamp(min=1)).tolist(), means)


def optimizers(head: Guesser) -> list[tuple[torch.optim.Optimizer, float]]:
    """With their peak rates: Muon for the layer's matrices, AdamW for the rest."""
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
    others = [p for name, p in head.named_parameters() if p.ndim == 1 or name == "lm_head.weight"]
    muon = Muon(matrices, DTYPE, momentum=0.95, weight_decay=0.01)
    return [(muon, MATRIX_RATE), (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), OTHER_RATE)]


def train(
    head: Guesser, target: LlamaForCausalLM, batches: Sequence[Batch], held_out: Sequence[Batch], seconds: float,
    out: Path, seed: int, console: Console, rate_scale: float = 1.0,
) -> list[float]:  # fmt: skip
    """For so long; saves now and then, and at the end. Returns the loss of each step."""
    rng, steps, losses = Random(seed), optimizers(head), list[float]()
    observed: dict[int, Observed] = {}  # what the first epoch computes, 3.5 kB a token
    start = reported = saved = time.monotonic()
    reporting_s = 0.0
    for epoch in itertools.count():
        for index in rng.sample(range(len(batches)), len(batches)):
            now = time.monotonic()
            if now - start >= seconds:
                head.save(out)
                return losses
            if index not in observed:
                observed[index] = observe(target, head, batches[index])
            loss = loss_of(head, target, batches[index], observed[index])
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer, peak in steps:
                for group in optimizer.param_groups:
                    group["lr"] = rate_at((now - start) / seconds, peak * rate_scale)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if now - reported > max(REPORT_EVERY_S, reporting_s / MOST_REPORTING):
                recent = losses[-50:]
                figures = evaluate(head, target, held_out[::4], ())
                reported = time.monotonic()
                reporting_s = reported - now
                rates = " ".join(f"{share:.2f}" for share in figures.right[:5])
                console.print(
                    f"{(now - start) / 60:.1f} min, epoch {epoch}, batch {len(losses)}:"
                    f" loss {sum(recent) / len(recent):.3f}, right at depths 1 to 5: {rates}"
                )
            if now - saved > SAVE_EVERY_S:
                saved = now
                head.save(out)
    raise AssertionError("the loop ends by the clock")


def print_table(figures: Figures, console: Console) -> None:
    table = Table("depth", "right after right guesses", title="held-out prompts, temperature 0")
    for depth, share in enumerate(figures.right, 1):
        if share:
            table.add_row(str(depth), f"{share:.1%}")
    console.print(table)
    for length, mean in figures.chains.items():
        console.print(f"chains of up to {length}: {mean:.2f} guesses accepted, {1 + mean:.2f} tokens a step")


@app.default
def main(
    *,
    model: str = SMOLLM2,
    kind: Literal["eagle3", "medusa"] = "eagle3",
    out: Path | None = None,
    minutes: Annotated[float, Parameter(help="of training, after the text")] = 40.0,
    text: Annotated[Path | None, Parameter(help="file of the text; written if it is not there")] = None,
    text_minutes: Annotated[float, Parameter(help="of writing text")] = 10.0,
    draft_vocab: Annotated[int, Parameter(help="tokens that the head can guess")] = 8192,
    resume: Annotated[bool, Parameter(help="go on from the head in --out, at half the rate")] = False,
    threads: int = 2,
    seed: int = 1,
) -> None:
    """Write the text, train, save and print the figures."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    console = Console(width=120)
    folder = Path(locate_model(model))
    out = out or gguf_cache() / f"{Path(model).stem}-{kind}"
    text = text or out.with_name(f"{Path(model).stem}-text.json")
    if not text.exists():
        write_text(str(folder), text_minutes * 60, seed, text, console)
    texts = read_text(text)
    trained = [one for one in texts if not one.is_held_out]
    held_out = make_batches([one for one in texts if one.is_held_out and one.temperature == 0])
    target = load_target(folder)
    counts = count_tokens(trained, target.config.vocab_size)
    load, new = (MedusaHeads.load, new_medusa) if kind == "medusa" else (DraftHead.load, new_head)
    if resume:
        head: Guesser = load(target.config, out)
    else:
        head = new(target, counts.sort(descending=True, stable=True).indices[:draft_vocab].sort().values)
    covered = counts[head.t2d].sum() / counts.sum()
    console.print(f"{len(trained)} answers, {counts.sum():.0f} tokens; the draft vocabulary has {covered:.2%} of them")
    batches, scale = make_batches(trained), 0.5 if resume else 1.0
    train(head, target, batches, held_out, minutes * 60, out, seed, console, scale)
    print_table(evaluate(head, target, held_out, (4, 8)), console)
    console.print(f"saved in {out}")


if __name__ == "__main__":
    app()
