"""What the engine is asked about one row of logits, and what it answers. Values; knows no tensors but a mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.history import History
from engine.sampling import SamplingParams

TokenMask = NDArray[np.int32] | Tensor
"""[ceil(V / 32)] int32 on the CPU: bit t % 32 of word t // 32 is set |-> token t may come. xgrammar's layout."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How to choose, or score, the token after one row of logits."""

    sampling: SamplingParams
    position: int  # index in its sequence of the token to choose
    tokens: Sequence[int]  # the sequence; this row has seen tokens[: position - len(guesses)], then `guesses`
    num_prompt: int  # the first so many tokens are the prompt, the others up to `position` the answer
    forbidden: frozenset[int] = frozenset()  # tokens not to choose, unless there is no other (min_tokens)
    mask: TokenMask | None = None  # tokens to choose from (a grammar)
    num_logprobs: int | None = None  # None: no log-probabilities; else how many of the likeliest to tell as well
    is_given: bool = False  # nothing to choose: the token is tokens[position]
    guesses: tuple[int, ...] = ()  # part of the answer
    history: History | None = None  # of what it has seen before `guesses`; None: counted anew if penalties ask


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities: of log_softmax in float32, before any adjustment."""

    logprob: float  # of the token chosen or given
    top_ids: tuple[int, ...]  # the likeliest tokens, likeliest first, the lower id first among equals
    top_logprobs: tuple[float, ...]  # theirs


@dataclass(frozen=True, slots=True)
class Chosen:
    """The answer to a `Choice`."""

    token: int
    logprobs: TokenLogprobs | None  # None unless the choice asks for some
