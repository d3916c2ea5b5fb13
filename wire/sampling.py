"""How to sample the next token: one value for clients' requests, messages and the engine. Pure.

`SamplingParams` is the table of parameters. Messages, the fields of requests and their ranges, and the engine's arrays
follow from it; what a parameter does is in engine/sampling and its kernels.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

MAX_DRAFT_TOKENS = 16  # drafts per step and answer
LEAST_TEMPERATURE = 1e-6  # greedy below it: noise would move no logit by 2.3e-5, and float32 would round 1e-46 to 0


class ClientRange(NamedTuple):
    """The values that clients may give; the engine supports more."""

    lowest: float
    highest: float
    excludes_lowest: bool = False


class Scalar(NamedTuple):
    """A parameter that is one number."""

    dtype: str  # of the engine's array, as numpy names it
    is_valid: Callable[[float], bool]
    expected: str  # the valid values, for errors
    clients: ClientRange | None  # None: the gateway has a rule of its own


def _scalar(
    dtype: str, is_valid: Callable[[float], bool], expected: str, clients: ClientRange | None = None
) -> Mapping[str, Scalar]:
    return {"scalar": Scalar(dtype, is_valid, expected, clients)}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Complete, with defaults filled in. ValueError at creation names a value out of range."""

    temperature: float = field(  # 0 or close to it: the likeliest token, whatever the filters and the seed
        default=1.0,
        metadata=_scalar("f4", lambda value: 0 <= value < math.inf, "a finite number >= 0", ClientRange(0.0, 2.0)),
    )
    top_p: float = field(  # 1: off
        default=1.0,
        metadata=_scalar(
            "f8", lambda value: 0 < value <= 1, "more than 0 and at most 1", ClientRange(0.0, 1.0, excludes_lowest=True)
        ),
    )
    top_k: int = field(default=0, metadata=_scalar("i8", lambda value: value >= 0, ">= 0"))  # 0: off
    min_p: float = field(  # 0: off
        default=0.0, metadata=_scalar("f8", lambda value: 0 <= value <= 1, "0 to 1", ClientRange(0.0, 1.0))
    )
    seed: int = field(
        default=0, metadata=_scalar("u8", lambda value: 0 <= value < 1 << 64, "an unsigned 64-bit integer")
    )
    frequency_penalty: float = field(  # 0: off; this and the parameters below also apply to greedy sampling
        default=0.0, metadata=_scalar("f4", math.isfinite, "a finite number", ClientRange(-2.0, 2.0))
    )
    presence_penalty: float = field(  # 0: off
        default=0.0, metadata=_scalar("f4", math.isfinite, "a finite number", ClientRange(-2.0, 2.0))
    )
    repetition_penalty: float = field(  # 1: off
        default=1.0,
        metadata=_scalar(
            "f4", lambda value: 0 < value < math.inf, "a finite number > 0", ClientRange(0.0, 2.0, excludes_lowest=True)
        ),
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once

    def __post_init__(self) -> None:
        for name, scalar in SCALARS.items():
            value = getattr(self, name)
            if not scalar.is_valid(value):
                raise ValueError(f"{name} is {value}, expected {scalar.expected}")
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


SCALARS: Mapping[str, Scalar] = {
    parameter.name: parameter.metadata["scalar"] for parameter in fields(SamplingParams) if parameter.metadata
}
