"""How to sample the next token: one value for clients' requests, messages and the engine. Pure.

`SamplingParams` is the table of parameters. Messages, the fields of requests and their ranges, and the engine's arrays
follow from it; what a parameter does is in engine/sampling and its kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Annotated, NamedTuple, get_args, get_origin

MAX_DRAFT_TOKENS = 16  # drafts per step and answer
LEAST_TEMPERATURE = 1e-6  # greedy below it: noise would move no logit by 2.3e-5, and float32 would round 1e-46 to 0


class Range(NamedTuple):
    """The values that clients may give; the engine supports more."""

    lowest: float
    highest: float
    excludes_lowest: bool = False


class Scalar(NamedTuple):
    """A parameter that is one number."""

    dtype: str  # of the engine's values, as numpy names it
    is_valid: Callable[[float], bool]
    expected: str  # what is valid, for errors
    clients: Range | None = None  # None: the gateway has a rule of its own


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete, with defaults filled in. ValueError at creation names a value out of range."""

    # 0 or close to it: the likeliest token, whatever the filters and the seed
    temperature: Annotated[float, Scalar("f4", lambda x: 0 <= x < inf, "a finite number >= 0", Range(0.0, 2.0))] = 1.0
    top_p: Annotated[  # 1: off
        float, Scalar("f8", lambda x: 0 < x <= 1, "more than 0 and at most 1", Range(0.0, 1.0, excludes_lowest=True))
    ] = 1.0
    top_k: Annotated[int, Scalar("i8", lambda x: x >= 0, ">= 0")] = 0  # 0: off
    min_p: Annotated[float, Scalar("f8", lambda x: 0 <= x <= 1, "0 to 1", Range(0.0, 1.0))] = 0.0  # 0: off
    seed: Annotated[int, Scalar("u8", lambda x: 0 <= x < 1 << 64, "an unsigned 64-bit integer")] = 0
    # The parameters below also apply to greedy sampling. 0: off
    frequency_penalty: Annotated[float, Scalar("f4", isfinite, "a finite number", Range(-2.0, 2.0))] = 0.0
    presence_penalty: Annotated[float, Scalar("f4", isfinite, "a finite number", Range(-2.0, 2.0))] = 0.0
    repetition_penalty: Annotated[  # 1: off
        float, Scalar("f4", lambda x: 0 < x < inf, "a finite number > 0", Range(0.0, 2.0, excludes_lowest=True))
    ] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once

    def __post_init__(self) -> None:
        for name, scalar in SCALARS.items():
            value = getattr(self, name)
            is_number = isinstance(value, int if scalar.dtype[0] in "iu" else int | float)
            if not is_number or isinstance(value, bool) or not scalar.is_valid(value):
                raise ValueError(f"{name} is {value!r}, expected {scalar.expected}")
        for token, bias in self.logit_bias:
            if token < 0 or not isfinite(bias):
                raise ValueError(f"logit_bias adds {bias} to token {token}, expected an id >= 0 and a finite number")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens matter."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


SCALARS: Mapping[str, Scalar] = {
    one.name: get_args(one.type)[1] for one in fields(SamplingParams) if get_origin(one.type) is Annotated
}
