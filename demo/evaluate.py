"""Measures the two checkpoints on held-out prompts: right answers per kind, and how often the draft agrees.

    python -m demo.evaluate --count 2000

Everything is greedy. Agreement is the share of the target's greedy tokens that the draft also puts first after the same
tokens: the acceptance of speculative decoding at temperature 0.
"""

import argparse
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.corpus.dialogue import Dialogue, held_out_scenes, staged
from demo.corpus.scene import Scene
from demo.paths import DRAFT_DIR, TARGET_DIR
from demo.tokens import EOS_IDS, render

MAX_NEW_TOKENS = 256
BATCH_SCENES = 64
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out scene, with or without a system message."""

    scene: Scene
    dialogue: Dialogue

    def prompt(self) -> str:
        asked = Dialogue(self.dialogue.messages[:-1], self.dialogue.tools)
        return render(asked) + "<|assistant|>"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The target's greedy answer to one case, and how many of its tokens the draft also puts first."""

    case: Case
    answer: str
    num_tokens: int
    num_agreed: int

    @property
    def is_right(self) -> bool:
        return self.case.scene.is_right(self.answer)


def held_out_cases(seed: int, count: int) -> list[Case]:
    """`count` cases with different prompts."""
    rng = Random(seed)
    cases: dict[str, Case] = {}
    for scene in held_out_scenes(rng):
        cases.setdefault("\n".join(scene.said()).casefold(), Case(scene, staged(rng, scene)))
        if len(cases) == count:
            break
    return list(cases.values())


def load(directory: Path) -> Any:
    """A transformers model in float32; its types lack `generate`."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)


@torch.inference_mode()
def outcomes(target: Any, draft: Any, tokenizer: Any, cases: Sequence[Case], limit: int) -> Iterator[Outcome]:
    """Answers one batch of cases with at most `limit` tokens each."""
    prompts = [case.prompt() for case in cases]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    mask, prompt_length = inputs["attention_mask"], inputs["input_ids"].shape[1]
    ids = target.generate(inputs["input_ids"], attention_mask=mask, max_new_tokens=limit, do_sample=False)
    answers = ids[:, prompt_length:]  # [cases, new tokens]
    full_mask = torch.cat([mask, torch.ones_like(answers)], dim=1)
    positions = (full_mask.cumsum(-1) - 1).clamp(min=0)
    logits = draft(ids, attention_mask=full_mask, position_ids=positions).logits
    agreed = logits[:, prompt_length - 1 : -1].argmax(-1) == answers
    is_end = torch.isin(answers, torch.tensor(EOS_IDS))
    before_end = is_end.cumsum(-1) - is_end.long() == 0  # up to and including the first end token
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    for case, text, agree, counted in zip(cases, texts, agreed, before_end, strict=True):
        yield Outcome(case, text, int(counted.sum()), int((agree & counted).sum()))


def measure(target_dir: Path, draft_dir: Path, cases: Sequence[Case], limit: int = MAX_NEW_TOKENS) -> list[Outcome]:
    target, draft = load(target_dir), load(draft_dir)
    tokenizer = AutoTokenizer.from_pretrained(target_dir, trust_remote_code=False)
    ordered = sorted(cases, key=lambda case: (case.scene.kind, len(case.prompt())))  # similar lengths together
    groups = [ordered[i : i + BATCH_SCENES] for i in range(0, len(ordered), BATCH_SCENES)]
    found: list[Outcome] = []
    for group in track(groups, description="answering"):
        found += outcomes(target, draft, tokenizer, group, limit)
    return found


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _row(name: str, group: Sequence[Outcome]) -> str:
    right = _share(sum(o.is_right for o in group), len(group))
    agreed = _share(sum(o.num_agreed for o in group), sum(o.num_tokens for o in group))
    return f"| {name} | {len(group)} | {right} | {agreed} |"


def table(found: Sequence[Outcome]) -> str:
    """Markdown: one row per kind (small talk as one), and a row for all."""
    kinds: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in found:
        kind = outcome.case.scene.kind
        kinds["small talk" if kind.startswith("small talk") else kind].append(outcome)
    rows = [_row(kind, kinds[kind]) for kind in sorted(kinds)]
    head = ["| kind | held-out prompts | right | draft agrees |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, _row("**all**", found)])


def report(found: Sequence[Outcome], command: str) -> str:
    return (
        "# Figures of the demo models\n\n"
        f"Made by `{command}`: greedy, float32, prompts that were never trained on.\n"
        "Right means the whole answer is one of the accepted answers (for stories: it names what was asked for).\n\n"
        f"{table(found)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET_DIR)
    parser.add_argument("--draft", type=Path, default=DRAFT_DIR)
    parser.add_argument("--count", type=int, default=2000, help="held-out prompts")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show-wrong", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = measure(options.target, options.draft, held_out_cases(options.seed, options.count))
    for outcome in [o for o in found if not o.is_right][: options.show_wrong]:
        print(f"{outcome.case.scene.kind}: {outcome.case.scene.said()} -> {outcome.answer!r}")
    text = report(found, shlex.join(["python", "-m", "demo.evaluate", *sys.argv[1:]]))
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
