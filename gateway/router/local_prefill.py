"""Whether a decode worker on a GPU computes a short prompt by itself: seconds of waiting here against there. Pure.

    here  = the prompt's steps beside the answers, and for each answer what these steps take longer
    there = the hand-off's messages + the prefill worker's queue and the prompt, at its rate + the read of its KV

For an 8B model in fp8 on H100s (derived, not measured; see the test) an idle decode worker computes prompts of one
chunk, 256 tokens, and one with answers none. While 8,000 tokens wait for prefill, it computes up to 768 beside 8
answers. Where KV is read by gRPC, it computes up to MOST_TOKENS beside 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

# From the reservation to the acknowledged read a hand-off takes four gRPC messages of some 1 ms, and the prefill worker
# begins a step of its own. Not measured on a card.
HAND_OFF_S = 0.005
MOST_TOKENS = 2048  # longer prompts are always handed off: workers report their costs only once a second


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """What prompts cost on a decode worker (worker/chunks.py). Seconds are 0 before they are measured."""

    quiet_s: float = 0.0  # a step with answers alone
    fixed_s: float = 0.0  # what a chunk of any size adds to it
    token_s: float = 0.0  # and what each of its tokens adds
    tokens: int = 0  # of the next chunk; 0: the worker computes no prompts
    read_s: float = 0.0  # to read one token's KV from a prefill worker


UNMEASURED = ChunkCosts()


@dataclass(frozen=True, slots=True)
class Rate:
    """A prefill worker's."""

    tokens_waiting: int
    tokens_per_s: float  # 0: not measured


def prefers_local(
    num_tokens: int, num_answers: int, num_waiting: int, costs: ChunkCosts, rates: Sequence[Rate]
) -> tuple[bool, str]:
    """Whether a prompt that lacks `num_tokens` is better computed on the decode worker, and why; "" if not known.

    `num_answers`: of the decode worker; `num_waiting`: prompt tokens that it has still to compute.
    """
    measured = [rate for rate in rates if rate.tokens_per_s > 0]
    if not costs.tokens or not measured:
        return False, ""
    fastest_s = min((rate.tokens_waiting + num_tokens) / rate.tokens_per_s for rate in measured)
    there_s = HAND_OFF_S + fastest_s + num_tokens * costs.read_s
    token_s = costs.token_s or 1 / max(rate.tokens_per_s for rate in measured)  # before the first: as fast as there
    num_steps = ceil(num_tokens / costs.tokens)
    added_s = num_steps * costs.fixed_s + num_tokens * token_s
    here_s = num_steps * costs.quiet_s + num_waiting * token_s + (1 + num_answers) * added_s
    is_local = num_tokens <= MOST_TOKENS and here_s <= there_s
    return is_local, (
        f"{num_tokens} tokens cost {here_s * 1e3:.0f} ms on the decode worker beside {num_answers} answers, "
        f"{there_s * 1e3:.0f} ms by hand-off"
    )
