"""How long KV is worth keeping after its request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_KEEP_S = 3600.0
MAX_KEPT_PARTS = 4
ALL_TOKENS = 2**32 - 1  # prompt and answer, whatever their length


class KeptPart(NamedTuple):
    """The first tokens of a prompt, or more."""

    tokens: int
    seconds: float  # after the request


@dataclass(frozen=True, slots=True)
class Retention:
    """The parts of a request whose KV is to outlive other KV, within its owner's share of a pool."""

    owner: str
    parts: Sequence[KeptPart]
