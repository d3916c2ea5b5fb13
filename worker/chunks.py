"""How many prompt tokens the next step computes, and how long it will take, learnt from measured steps. Pure.

A step takes its answers' time plus some time per prompt token. No step is meant to take longer than `CHUNK_S`, on any
machine: the first chunk is the smallest, and each may be twice as large as any before it.
"""

from math import ceil, inf

CHUNK_S = 2.0  # of a step without answers, and of a step's prompts beside them; shorter than any sensible --stall-s
STRETCH = 1.7  # times the duration of a step with answers alone
FEWEST = 16  # tokens, whatever they take: about a page
GROWTH = 2.0  # of the largest chunk so far, until one took far too long
LATER_GROWTH = 1.05  # afterwards: larger chunks may take another way through the kernels
FAR_TOO_LONG = 2.0  # times CHUNK_S
MOST_GROWTH, MOST_SHRINKING = 1.2, 1.5  # per step beside answers: one short or long step may be chance
KEPT = 0.8  # weight of the old average when a step is added


class ChunkSizer:
    """Learns from each step of a worker. Sizes are in prompt tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ceiling = FEWEST  # of chunks: what may be tried next
        self._growth = GROWTH
        self._quiet_s = 0.0  # average of steps without prompt tokens; 0: none measured
        self._token_s = 0.0  # per prompt token; 0: none measured

    @property
    def alone(self) -> int:
        """Of the next step without answers."""
        return self._fit(CHUNK_S)

    @property
    def beside(self) -> int:
        """Of the next step with answers."""
        return self._fit(min((STRETCH - 1) * self._quiet_s, CHUNK_S))

    def _fit(self, seconds: float) -> int:
        fitting = int(seconds / self._token_s) if self._token_s else FEWEST
        return min(max(min(fitting, self._ceiling), FEWEST), self._most)

    def predict(self, num_answers: int, num_prompt_tokens: int) -> float:
        """Seconds of a step with these numbers of answer and prompt tokens; 0 before anything was measured."""
        token_s = self._token_s or self._quiet_s  # before the first prompt: at most a step each
        return (self._quiet_s if num_answers else 0.0) + token_s * num_prompt_tokens

    def note_step(self, num_answers: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with these numbers of answer and prompt tokens took `seconds`."""
        if seconds <= 0:
            return
        if num_prompt_tokens:
            is_beside = bool(num_answers and self._quiet_s)
            prompt_s = seconds - self._quiet_s if is_beside else seconds
            self._learn_token(is_beside, num_prompt_tokens, prompt_s)
            self._move_ceiling(num_prompt_tokens, prompt_s)
        elif num_answers:
            before = self._quiet_s or seconds
            self._quiet_s = KEPT * before + (1 - KEPT) * min(seconds, 2 * before)  # more may be chance

    def _learn_token(self, is_beside: bool, num_tokens: int, prompt_s: float) -> None:
        """Chunks beside answers are fine-tuned; without answers the last whole chunk counts."""
        size, wanted_s = (self.beside, (STRETCH - 1) * self._quiet_s) if is_beside else (self.alone, CHUNK_S)
        if num_tokens < size and prompt_s <= wanted_s:
            return  # a short prompt's tokens cost more
        found = prompt_s / num_tokens
        if is_beside:
            before = self._token_s or (STRETCH - 1) * self._quiet_s / FEWEST
            most = before * MOST_SHRINKING if prompt_s <= CHUNK_S else inf
            found = min(max(found, before / MOST_GROWTH), most)
        self._token_s = found

    def _move_ceiling(self, num_tokens: int, prompt_s: float) -> None:
        if prompt_s > FAR_TOO_LONG * CHUNK_S and num_tokens > FEWEST:
            self._ceiling, self._growth = max(num_tokens // 2, FEWEST), LATER_GROWTH
        else:
            self._ceiling = max(self._ceiling, ceil(num_tokens * self._growth))
