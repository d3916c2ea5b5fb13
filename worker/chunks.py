"""How many prompt tokens the next step computes, and how long it will take, learnt from measured steps. Pure.

A step with answers takes `quiet + fixed + token * n`: the time of its answers alone, what any chunk adds (on a GPU the
step leaves its CUDA graph), and a time per prompt token. No step is meant to take longer than `CHUNK_S`, of texts
`TEXTS_S`, on any machine: the first chunk is the smallest, and each may be twice as large as any before it.
"""

from math import ceil, inf
from typing import Any

from worker.plan import FEWEST, ChunkSizes, TokenBudget

CHUNK_S = 2.0  # of a step without answers, and of a step's prompts beside them; shorter than any sensible --stall-s
TEXTS_S = 8.0  # of a model without answers: no stream waits, and large products take less time per token
STRETCH = 1.7  # times the duration of a step with answers alone
# On a GPU. Its products are limited by memory below about 300 tokens (H100: 1e15 FLOP/s / 3.3e12 B/s, a weight of 2
# bytes and 2 FLOP a token), so 256 cost little more than 16, and a first chunk takes milliseconds.
FEWEST_ON_GPU = 256
GROWTH = 2.0  # of the largest chunk so far, until one took far too long
LATER_GROWTH = 1.05  # afterwards: larger chunks may take another way through the kernels
FAR_TOO_LONG = 2.0  # times CHUNK_S
MOST_GROWTH, MOST_SHRINKING = 1.2, 1.5  # per step beside answers: one short or long step may be chance
KEPT = 0.8  # weight of the old average when a step is added


class ChunkSizer(ChunkSizes):
    """Learns from each step of a worker. Sizes are in prompt tokens. itl_goal.py has one that keeps a goal."""

    def __init__(self, most: int, fewest: int = FEWEST, chunk_s: float = CHUNK_S) -> None:
        super().__init__(most, fewest)
        self._chunk_s = chunk_s
        self._ceiling = fewest  # of chunks: what may be tried next
        self._growth = GROWTH
        self._last = (0, 0.0)  # tokens of the last chunk beside answers, seconds that it added

    @property
    def alone(self) -> int:
        return self._fit(self._chunk_s)

    @property
    def beside(self) -> int:
        return self._fit(self._wanted_s - self.fixed_s)

    @property
    def _full_beside(self) -> int:
        """Beside answers, the fewest tokens whose cost is learnt from a step that was not too long."""
        return self.beside

    @property
    def _wanted_s(self) -> float:
        """Seconds that a chunk may add to a step with answers: more than a chunk's fixed cost, to be worthwhile."""
        return min(max((STRETCH - 1) * self.quiet_s, STRETCH * self.fixed_s), self._chunk_s)

    def _fit(self, seconds: float) -> int:
        fitting = int(seconds / self.token_s) if self.token_s else self._fewest
        return min(max(min(fitting, self._ceiling), self._fewest), self._most)

    def predict(self, num_answers: int, num_prompt_tokens: int) -> float:
        """0 before anything was measured."""
        token_s = self.token_s or self.quiet_s  # before the first prompt: at most a step each
        fixed_s = self.fixed_s if num_answers and num_prompt_tokens else 0.0
        return (self._answers_s(num_answers) if num_answers else 0.0) + fixed_s + token_s * num_prompt_tokens

    def _answers_s(self, num_answers: int) -> float:
        """Seconds of a step with answers alone, on average."""
        return self.quiet_s

    def note_step(self, num_answers: int, num_prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        quiet_s = self._answers_s(num_answers)
        if num_prompt_tokens:
            is_beside = bool(num_answers and quiet_s)
            prompt_s = seconds - quiet_s if is_beside else seconds
            if is_beside:
                self._learn_fixed(num_prompt_tokens, prompt_s)
            self._learn_token(is_beside, num_prompt_tokens, prompt_s)
            self._move_ceiling(num_prompt_tokens, prompt_s)
        elif num_answers:
            before = self.quiet_s or seconds
            self.quiet_s = KEPT * before + (1 - KEPT) * min(seconds, 2 * before)  # more may be chance

    def _learn_fixed(self, num_tokens: int, prompt_s: float) -> None:
        """Where the line through two chunks in a row of very different sizes begins; at most what they took."""
        (few, few_s), (many, many_s) = sorted((self._last, (num_tokens, prompt_s)))
        self._last = num_tokens, prompt_s
        found = min(self.fixed_s, prompt_s)
        if 0 < 2 * few <= many:
            found = min((few_s * many - many_s * few) / (many - few), few_s, many_s)
        self.fixed_s = KEPT * self.fixed_s + (1 - KEPT) * max(found, 0.0)

    def _learn_token(self, is_beside: bool, num_tokens: int, prompt_s: float) -> None:
        """Chunks beside answers are fine-tuned; without answers the last whole chunk counts."""
        size, wanted_s = (self._full_beside, self._wanted_s) if is_beside else (self.alone, self._chunk_s)
        if num_tokens < size and prompt_s <= wanted_s:
            return  # a short prompt's tokens cost more
        found = (prompt_s - self.fixed_s if is_beside else prompt_s) / num_tokens
        if is_beside:
            before = self.token_s or (STRETCH - 1) * self.quiet_s / self._fewest
            most = before * MOST_SHRINKING if prompt_s <= self._chunk_s else inf
            found = min(max(found, before / MOST_GROWTH), most)
        self.token_s = found

    def _move_ceiling(self, num_tokens: int, prompt_s: float) -> None:
        if prompt_s > FAR_TOO_LONG * self._chunk_s and num_tokens > self._fewest:
            self._ceiling, self._growth = max(num_tokens // 2, self._fewest), LATER_GROWTH
        else:
            self._ceiling = max(self._ceiling, ceil(num_tokens * self._growth))


def build_budget(prompt_tokens: int, setting: str, device: str, **others: Any) -> TokenBudget:
    """Chunks are learnt. `device`: torch's name of its type; `others`: fields of TokenBudget."""
    fewest = FEWEST_ON_GPU if device == "cuda" else FEWEST
    return TokenBudget(prompt_tokens, setting, fewest, **{"build_sizer": ChunkSizer, **others})
