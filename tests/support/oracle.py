"""Reference answers by transformers: greedy tokens of a checkpoint in float32."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LogitsProcessor


class Oracle:
    """One checkpoint in transformers. Caches answers; a shorter one is a prefix of a longer one."""

    def __init__(self, folder: Path) -> None:
        (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
        self._model: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
        self._answers: dict[tuple[int, ...], list[int]] = {}  # prompt |-> its longest answer so far

    def answer(self, prompt_ids: Sequence[int], num_tokens: int, guess: Sequence[int] = ()) -> list[int]:
        """`num_tokens` greedy tokens after the prompt, past any end-of-sequence token."""
        key = tuple(prompt_ids)
        known = self._answers.get(key, [])
        if len(known) < num_tokens <= len(guess) and self._chooses(prompt_ids, guess[:num_tokens]):
            known = list(guess[:num_tokens])
        if len(known) < num_tokens:
            ids = torch.tensor([list(prompt_ids)])
            generated = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            known = generated[0, len(prompt_ids) :].tolist()
        self._answers[key] = known
        return known[:num_tokens]

    @torch.no_grad()
    def _chooses(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> bool:
        """True if each token is the likeliest after those before it."""
        ids = torch.tensor([[*prompt_ids, *tokens]])
        logits = self._model(ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen == list(tokens)

    @torch.no_grad()
    def answer_with(
        self, processor: LogitsProcessor, prompt_ids: Sequence[int], num_tokens: int, guess: Sequence[int] = ()
    ) -> list[int]:
        """Like `answer`, with logits changed before each token is chosen."""
        ids, begin = torch.tensor([[*prompt_ids, *guess]]), len(prompt_ids)
        if len(guess) == num_tokens:
            rows = self._model(ids, use_cache=False).logits[:, begin - 1 : -1]
            changed = [processor(ids[:, : begin + at], rows[:, at]).argmax(-1) for at in range(num_tokens)]
            if [int(token) for token in changed] == list(guess):
                return list(guess)
        ids = ids[:, :begin]
        for _ in range(num_tokens):
            logits = self._model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, processor(ids, logits).argmax(-1, keepdim=True)], dim=1)
        tokens: list[int] = ids[0, len(prompt_ids) :].tolist()
        return tokens

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[S] -> [S, V]: row i predicts the token after token_ids[: i + 1]."""
        logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits.log_softmax(-1)


def random_prompt(num_tokens: int, vocab: int, seed: int) -> list[int]:
    """Token ids above the special ones."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(6, vocab, (num_tokens,), generator=generator).tolist()
    return ids
