"""Log-probabilities at one position. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities: of log_softmax in float32, before any adjustment."""

    logprob: float  # of the token chosen or given
    top_ids: tuple[int, ...] = ()  # the likeliest tokens, likeliest first, the lower id first among equals
    top_logprobs: tuple[float, ...] = ()  # theirs
