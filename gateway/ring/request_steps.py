"""What can happen to a request, and what is to be done then: input and output of its machine (request_machine.py).

Pure values. Messages of the workers' protocol are used as they are where nothing has to be added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.ring.generation import Tokens
from gateway.ring.reasons import Reason
from protos import decode_pb2, prefill_pb2
from wire.logprobs import TokenLogprobs
from wire.messages import unpack_decode_timing
from wire.timing import Timing

Role = Literal["prefill", "decode"]
NO_TIMING = Timing()


# -- what happens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """The request has places on workers, and a name for its session."""

    decode: str  # incarnation
    prefill: str | None  # incarnation; None when decode prefills by itself
    local_prefill_max_tokens: int  # as in policy.Placement
    address: str = ""  # of the decode worker
    stream: str = ""  # the Steps stream that reports the session
    handle: int = 0  # of the session on that stream
    why: str = ""  # as in policy.Placement


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker has no room for the attempt, can never serve such a request, is gone, or failed.

    "compiling": the grammar is not compiled yet.
    """

    role: Role
    why: Literal["no room", "compiling", "invalid", "absent", "failed"]
    detail: str
    is_grammar: bool = False  # with "invalid": the grammar is at fault
    param: str = ""  # and of it what comes from this field of the client's; empty: all, or unknown


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prefill worker handed over all KV and is done with the attempt."""

    timing: Timing = NO_TIMING  # the prefill worker's part
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of all prompt tokens but the first, when asked for


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """A SessionDelta, its log-probabilities and timing unpacked."""

    attempt: int
    token_ids: Sequence[int]
    finish_reason: str = ""
    error: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the next prompt tokens, where decode computes the prompt
    timing: Timing = NO_TIMING  # the decode worker's part, with the last update


def update_of(
    delta: decode_pb2.SessionDelta,
    logprobs: Sequence[TokenLogprobs] = (),
    prompt_logprobs: Sequence[TokenLogprobs] = (),
) -> SessionUpdate:
    """`logprobs`, `prompt_logprobs`: the delta's, unpacked."""
    timing = unpack_decode_timing(delta.timing) if delta.finish_reason else NO_TIMING
    return SessionUpdate(
        delta.attempt, delta.token_ids, delta.finish_reason, delta.error, logprobs, prompt_logprobs, timing
    )


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session's worker, or its stream, is gone."""

    detail: str
    is_stuck: bool = False  # a worker is in a step that does not end
    role: Role = "decode"  # which one is at fault


# Reason: the request gets no places, or its deadline passed while it runs. ReserveResponse: the session is open.
Event = (
    Placed | Reason | decode_pb2.ReserveResponse | Refused | Prefilled | SessionUpdate | SessionLost
)  # fmt: skip


# -- what is to be done ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give back one place before the others; a worker that refused is full."""

    role: Role
    is_refused: bool


@dataclass(frozen=True, slots=True)
class Remember:
    """The attempt's worker of this role has the KV of all the request's tokens but the last, and caches it."""

    role: Role


@dataclass(frozen=True, slots=True)
class Forget:
    """The attempt's decode worker has less of the prompt than was expected."""

    num_cached: int  # tokens that it has


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """The attempt is over: abort what is left of its session and prefill, give back its places."""

    reason: str = ""  # empty after a whole answer
    is_failure: bool = False


# decode_pb2.ReserveRequest: open a session. prefill_pb2.RunRequest: have the prompt prefilled for the session.
# Tokens: for the client.
Action = decode_pb2.ReserveRequest | prefill_pb2.RunRequest | GiveBack | Remember | Forget | Tokens | EndAttempt
