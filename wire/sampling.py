"""How to sample the next token: one value for clients' requests, messages and the engine. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

MAX_DRAFT_TOKENS = 16  # drafts per step and answer
LEAST_TEMPERATURE = 1e-6  # greedy below it: noise would move no logit by 2.3e-5, and float32 would round 1e-46 to 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete, with defaults filled in. ValueError at creation names a value out of range."""

    temperature: float = 1.0  # 0 or close to it: the likeliest token, whatever the filters and the seed
    top_p: float = 1.0  # (0, 1]; 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1]; 0: off
    seed: int = 0  # unsigned, 64 bits
    frequency_penalty: float = 0.0  # 0: off; this and the fields below also apply to greedy sampling
    presence_penalty: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # more than 0; 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}, expected a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, expected >= 0")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, expected 0 to 1")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed}, expected an unsigned 64-bit integer")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite number")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, expected a finite number > 0")
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise ValueError(f"logit_bias adds {bias} to token {token}, expected an id >= 0 and a finite number")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens matter."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


SCALARS = tuple(field.name for field in fields(SamplingParams) if field.name != "logit_bias")
CLIENT_RANGES: Mapping[str, tuple[float, float]] = {  # field |-> the range for clients; the engine supports more
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
}
ABOVE_LOWEST = ("top_p", "repetition_penalty")  # fields whose lowest value is excluded
