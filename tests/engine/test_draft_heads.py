"""Draft heads compute what plain torch does over whole sequences: after prompts in chunks, drafts right and wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ForwardRow
from engine.engine import Engine, build_engine
from engine.runner import HeadRunner
from tests.support.draft_heads import Head, draft_truth, write_eagle3, write_mtp, write_target
from tests.support.tiny_models import VOCAB
from wire.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NUM_TOP, DEPTH = 10, 3
PROMPTS = [torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
           for length in (37, 18)]  # fmt: skip
FLAGS = {
    "specforge": {}, "all words": {}, "speculators": {}, "residual": {"norm_before_residual": True},
    "one norm": {"norm_before_fc": True}, "norms": {"fc_norm": True, "norm_output": True},
}  # fmt: skip


def build(model: Path, draft_model: str) -> Engine:
    return build_engine(
        str(model), draft_model, "float32", "cpu", 1, 16, 4, lambda *_: (40, 0), lambda _done, _total: None, 96
    )


def write_head(folder: Path, kind: str) -> tuple[Any, Head]:
    if kind == "mtp":
        return write_mtp(folder / "model", "glm4_moe")
    target = write_target(folder / "model")
    head = write_eagle3(
        folder / "head", target, FLAGS[kind], is_speculators=kind == "speculators", has_all_words=kind == "all words"
    )
    return target, head


class Rows:
    """Sequences of an engine, and the tokens that they have."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens = [list(prompt) for prompt in PROMPTS]
        for row, prompt in enumerate(PROMPTS):
            engine.rows.open(row, np.array(prompt, np.int32), GREEDY, len(prompt))
            engine.rows.write_pages(row, 0, range(6 * row, 6 * row + 6))

    def prefill(self) -> None:
        """The first prompt in chunks, the second one beside the last of these."""
        for begin in (0, 16, 21):
            self.engine.runner.launch([ForwardRow(0, begin, 16 if begin == 0 else 5)]).collect()
        rest = [ForwardRow(0, 26, 11, 1), ForwardRow(1, 0, 18, 1)]
        for own, token in zip(self.tokens, self.engine.runner.launch(rest).collect().tokens, strict=True):
            own.append(token)

    def draft(self) -> list[list[int]]:
        """The head's guesses; their log-probabilities are the truth's."""
        runner, guesses = self.engine.draft_runner, [list[int]() for _ in self.tokens]
        assert isinstance(runner, HeadRunner)
        told = []
        for depth in range(DEPTH):
            asked = [
                ForwardRow(row, len(own) - 1 + depth, 1, 1, chosen_logprobs=NUM_TOP, num_drafted=depth)
                for row, own in enumerate(self.tokens)
            ]
            found = runner.launch(asked).collect()
            told.append(found.logprobs)
            for own, token in zip(guesses, found.tokens, strict=True):
                own.append(token)
        self.told = told
        return guesses

    def check(self, target: Any, head: Head, guesses: list[list[int]]) -> None:
        for row, own in enumerate(self.tokens):
            for depth, truth in enumerate(draft_truth(target, head, own, guesses[row][:-1])):
                one = self.told[depth][row]
                assert one is not None
                best = truth.topk(NUM_TOP)
                assert list(one.top_ids) == best.indices.tolist(), (row, depth)
                assert list(one.top_logprobs) == pytest.approx(best.values.tolist(), abs=2e-4)
                assert guesses[row][depth] == best.indices[0]

    def verify(self, drafts: list[list[int]]) -> list[int]:
        """A step of the model with these drafts. Returns how many were right."""
        for row, own in enumerate(drafts):
            self.engine.rows.write_tokens(row, len(self.tokens[row]), np.array(own, np.int32))
        asked = [
            ForwardRow(row, len(own) - 1, 1 + len(drafts[row]), 1 + len(drafts[row]))
            for row, own in enumerate(self.tokens)
        ]
        found, begin, num_right = self.engine.runner.launch(asked).collect(), 0, []
        for row, own in enumerate(self.tokens):
            accepted = found.num_accepted.get(row, 0)
            own += found.tokens[begin : begin + accepted + 1]
            begin += 1 + len(drafts[row])
            num_right.append(accepted)
        return num_right


@pytest.mark.parametrize("kind", [*FLAGS, "mtp"])
def test_a_head_drafts_what_plain_torch_computes(tmp_path: Path, kind: str) -> None:
    target, head = write_head(tmp_path, kind)
    engine = build(tmp_path / "model", head.draft_model)
    rows = Rows(engine)
    rows.prefill()
    with torch.inference_mode():
        greedy = [target(input_ids=torch.tensor([own[:-1]])).logits[0, -1].argmax() for own in rows.tokens]
    assert [own[-1] for own in rows.tokens] == greedy
    guesses = rows.draft()
    rows.check(target, head, guesses)
    assert rows.verify(guesses) != [DEPTH, DEPTH]  # a random head
    rows.check(target, head, rows.draft())
    right = [
        target.generate(torch.tensor([own]), max_new_tokens=2, do_sample=False)[0, -2:].tolist() for own in rows.tokens
    ]
    assert rows.verify([right[0], [right[1][0], (right[1][1] + 1) % VOCAB]]) == [2, 1]
    rows.check(target, head, rows.draft())
    rows.verify([[], []])
    rows.check(target, head, rows.draft())
