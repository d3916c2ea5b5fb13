"""What is to be done for a request: the output of its machine (request_machine.py). Pure values; attempt.py acts."""

from dataclasses import dataclass

from gateway.generation import Tokens
from gateway.ring.request_events import Role


@dataclass(frozen=True, slots=True)
class Reserve:
    """Open a session."""

    attempt: int
    prompt_ids: list[int]
    max_tokens: int
    local_prefill_max_tokens: int
    num_emitted: int  # the last so many of prompt_ids are answer
    num_prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Have the prompt prefilled for the session."""

    prompt_ids: list[int]
    num_prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give back one place before the others; a worker that refused is full."""

    role: Role
    is_refused: bool


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens for the client."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Leave:
    """The attempt is over: abort what is left of its session and prefill, give back its places."""

    reason: str = ""  # empty after a whole answer
    is_failure: bool = False


Action = Reserve | Prefill | GiveBack | Emit | Leave
