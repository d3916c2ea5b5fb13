"""Which workers serve a request. Pure: views in, a decision out.

Filter, score, pick: a worker that cannot serve is filtered out with a reason, the rest are scored by load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NO_LIMIT = 2**32 - 1  # local prefill of any length


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment, as the gateway knows it."""

    role: Literal["prefill", "decode"]
    address: str
    incarnation: str
    layout: bytes  # equal for workers that can exchange pages
    is_alive: bool  # answers, makes progress, is not draining
    trouble: str  # why not, when it is not
    max_running: int
    num_mine: int  # requests this gateway has there
    is_full: bool  # refused a request since it last had news of free room
    free_pages: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one attempt goes. Without a prefill worker the decode worker prefills."""

    decode: WorkerView
    prefill: WorkerView | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Workers are alive, but have no room now."""


@dataclass(frozen=True, slots=True)
class WaitBeside:
    """The one worker that may serve has no room now."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Unready:
    """Nobody can serve."""

    reason: str


def choose_beside(workers: Sequence[WorkerView], incarnation: str) -> Placement | WaitBeside | Unready:
    """Place a request on the decode worker that holds a session whose prompt it shares: nothing is to be prefilled."""
    decode = next((view for view in workers if view.role == "decode" and view.incarnation == incarnation), None)
    if decode is None or not decode.is_alive:
        return Unready(f"the decode worker to share with {decode.trouble if decode else 'is gone'}")
    return Placement(decode, None) if _has_room(decode) else WaitBeside(incarnation)


def choose_placement(
    workers: Sequence[WorkerView], num_missing: int, local_prefill_max_tokens: int, avoid: frozenset[str] = frozenset()
) -> Placement | Wait | Unready:
    """Place a request that lacks KV for `num_missing` positions.

    Least loaded first. Incarnations in `avoid` failed this request before: such a decode worker is asked again only
    when no other can serve, such a prefill worker never, as one can do without. A prompt within
    `local_prefill_max_tokens`, and every prompt while no compatible prefill worker is alive, is prefilled by the
    decode worker itself.
    """
    reason = find_unready(workers)
    if reason is not None:
        return Unready(reason)
    workers = _leave_out(workers, avoid)
    with_room = [view for view in workers if view.is_alive and _has_room(view)]
    decodes = sorted((view for view in with_room if view.role == "decode"), key=_load)
    for decode in decodes:
        if num_missing <= local_prefill_max_tokens or not _can_prefill_for(workers, decode):
            return Placement(decode, None)
        partners = [view for view in with_room if view.role == "prefill" and view.layout == decode.layout]
        if partners:
            return Placement(decode, min(partners, key=_load))
    return Wait()


def _leave_out(workers: Sequence[WorkerView], avoid: frozenset[str]) -> list[WorkerView]:
    rest = [view for view in workers if view.incarnation not in avoid]
    if find_unready(rest) is None:
        return rest
    return [view for view in workers if view.role == "decode" or view.incarnation not in avoid]


def find_unready(workers: Sequence[WorkerView]) -> str | None:
    """Why nothing can be served; None when something can. A decode worker alone can: it also prefills."""
    decodes = [view for view in workers if view.role == "decode"]
    if any(view.is_alive for view in decodes):
        return None
    if not decodes:
        return "no decode worker is configured; name one with --decode"
    return "no decode worker is alive: " + "; ".join(f"{view.address} {view.trouble}" for view in decodes)


def _can_prefill_for(workers: Sequence[WorkerView], decode: WorkerView) -> bool:
    return any(view.role == "prefill" and view.is_alive and view.layout == decode.layout for view in workers)


def _has_room(view: WorkerView) -> bool:
    return not view.is_full and view.num_mine < view.max_running


def _load(view: WorkerView) -> tuple[float, int]:
    return (view.num_mine / view.max_running, -view.free_pages)
