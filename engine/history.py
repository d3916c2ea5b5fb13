"""What penalties ask about a sequence: which tokens have come, and how often each in the answer.

Kept while the sequence grows, so that a row of logits costs what its distinct tokens cost, not its whole context. Pure:
numpy, no torch.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.sampling import SamplingParams


class TokenCounts:
    """Counts tokens. What it has told stays as it is: growing makes new arrays."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.int64)  # [n] distinct tokens, in the order in which they first came
        self.counts = np.zeros(0, np.int64)  # [n] how often each has come
        self._places: dict[int, int] = {}  # token |-> its place in both

    def add(self, tokens: Sequence[int]) -> None:
        """These have come as well."""
        self.ids, self.counts = self.after(tokens)
        for token in self.ids[len(self._places) :].tolist():
            self._places[token] = len(self._places)

    def after(self, tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What `ids` and `counts` would be had `tokens` come as well. Modifies nothing."""
        if not tokens:
            return self.ids, self.counts
        more = Counter(tokens)
        ids = self.ids_after(more)
        known = {self._places[token]: count for token, count in more.items() if token in self._places}
        new = [more[token] for token in ids[len(self.ids) :].tolist()]
        counts = np.concatenate([self.counts, np.array(new, np.int64)])
        if known:
            counts[list(known)] += np.array(list(known.values()), np.int64)
        return ids, counts

    def ids_after(self, tokens: Iterable[int]) -> NDArray[np.int64]:
        """What `ids` would be. Modifies nothing."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._places]
        return np.concatenate([self.ids, np.array(new, np.int64)]) if new else self.ids


class History:
    """Counts of the first `length` tokens of a sequence that only grows: those that its penalties ask for."""

    def __init__(self, sampling: SamplingParams, num_prompt: int) -> None:
        """The first `num_prompt` tokens are the prompt, the others the answer. Costs nothing without penalties."""
        self.length = 0
        self.seen = TokenCounts()  # prompt and answer; for repetition_penalty
        self.answer = TokenCounts()  # for frequency_penalty and presence_penalty
        self._sampling = sampling
        self._num_prompt = num_prompt

    def follow(self, tokens: Sequence[int]) -> None:
        """Count what has come since the last call. `tokens`: all of the sequence. ValueError if it has shrunk."""
        if len(tokens) < self.length:
            raise ValueError(f"{self.length} tokens were counted, now there are {len(tokens)}")
        if self._sampling.repetition_penalty != 1:
            self.seen.add(tokens[self.length :])
        if self._sampling.frequency_penalty or self._sampling.presence_penalty:
            self.answer.add(tokens[max(self.length, self._num_prompt) :])
        self.length = len(tokens)
