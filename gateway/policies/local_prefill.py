"""Whether a decode worker computes a short prompt by itself: on GPUs, seconds of waiting here against there. Pure.

    here  = the prompt's steps beside the answers, and for each answer what these steps take longer
    there = the hand-off's messages + the prefill worker's queue and the prompt, at its rate + the read of its KV

For an 8B model in fp8 on H100s (derived, not measured; see the test) an idle decode worker computes prompts of one
chunk, 256 tokens, and one with answers none. While 8,000 tokens wait for prefill, it computes up to 768 beside 8
answers. Where KV is read by gRPC, it computes up to MOST_TOKENS beside 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from gateway.router.placement import NO_LIMIT
from gateway.router.policies import LocalPrefill
from gateway.router.worker_view import ChunkCosts, WorkerView

# From the reservation to the acknowledged read a hand-off takes four gRPC messages of some 1 ms, and the prefill worker
# begins a step of its own. Not measured on a card.
HAND_OFF_S = 0.005
MOST_TOKENS = 2048  # longer prompts are always handed off: workers report their costs only once a second
NO_HAND_OFF = (
    "decode workers compute prompts themselves, beside their answers: prefill workers would compute with the same "
    "cores, which is slower; to see the hand-off all the same: --local-prefill-max-tokens 0"
)


@dataclass(frozen=True, slots=True)
class Rate:
    """The load and the speed of a prefill worker."""

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


class MeasuredLocalPrefill(LocalPrefill):
    """Any number where all prefill workers would take the cores away that the decode worker computes with
    (`share_cores`); on GPUs what is cheaper there by measured costs; else none."""

    def choose(self, decode: WorkerView, prefills: Sequence[WorkerView], num_lacking: int) -> tuple[int, str]:
        if _all_share_cores(decode, prefills):
            return NO_LIMIT, "prefill workers compute with the decode worker's cores"
        if any(view.num_threads for view in (decode, *prefills)):
            return 0, ""
        rates = [Rate(view.tokens_waiting, view.tokens_per_s) for view in prefills]
        is_local, why = prefers_local(num_lacking, decode.num_running, decode.tokens_waiting, decode.costs, rates)
        return num_lacking if is_local else 0, why

    def explain(self, workers: Sequence[WorkerView]) -> str:
        alive = [view for view in workers if view.is_alive]
        prefills = [view for view in alive if view.role == "prefill" and not view.embeds]
        for decode in (view for view in alive if view.role == "decode"):
            if not _all_share_cores(decode, [view for view in prefills if view.partners == decode.partners]):
                return ""
        return NO_HAND_OFF if prefills else ""


def choose_local_prefill(max_tokens: int | None) -> LocalPrefill:
    """The policy that --local-prefill-max-tokens asks for; None: by measured costs."""
    return MeasuredLocalPrefill() if max_tokens is None else LocalPrefill(max_tokens)


def _all_share_cores(decode: WorkerView, prefills: Sequence[WorkerView]) -> bool:
    return bool(prefills) and all(share_cores(decode, view) for view in prefills)


def share_cores(decode: WorkerView, prefill: WorkerView) -> bool:
    """Whether both compute on the same cores of one host, with more threads than these.

    Each then computes while the other waits, and both read all weights: a prompt's tokens beside the answers' in the
    decode worker's own steps cost less.
    """
    both = (decode.num_threads, prefill.num_threads)
    if decode.host != prefill.host or min(both) == 0:
        return False
    if decode.cpu_group == prefill.cpu_group != 0:
        return sum(both) > min(decode.num_cores, prefill.num_cores)
    return not decode.cpus.isdisjoint(prefill.cpus) and sum(both) > len(decode.cpus | prefill.cpus)
