"""Why no request can be served, if none can: which kinds of workers are missing. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import WEIGHTS_GONE
from gateway.router.worker_view import Role, WorkerView
from runtime.config_parts import NoPrefill


@dataclass(frozen=True, slots=True)
class Unready:
    """Why no worker can serve."""

    detail: str
    role: Role = "decode"  # whose workers are missing
    code: str = "not_ready"  # of the error
    is_final: bool = False  # no worker that is known, dead or alive, could: there is nothing to wait for


def find_unready(workers: Sequence[WorkerView], no_prefill: NoPrefill = "fallback") -> Unready | None:
    """Why no request can be served; None when one can. With fallback a decode worker alone can serve."""
    if not any(view.is_there for view in workers if view.answers):
        return Unready(_describe_none(workers, "decode"))
    return None if no_prefill == "fallback" else find_no_prefill(workers)


def find_no_vision(workers: Sequence[WorkerView]) -> Unready | None:
    """Why no prompt with images can be computed; None when one can."""
    partners = {view.partners for view in workers if view.role == "decode" and view.is_alive}
    if any(view.is_alive and view.takes_images and view.partners in partners for view in workers):
        return None
    return Unready("no worker that is alive computes prompts with images; the weaknesses in GET /status say why")


def find_no_prefill(workers: Sequence[WorkerView]) -> Unready | None:
    """Why no prefill worker can compute prompts for a living decode worker; None when one can."""
    partners = {view.partners for view in workers if view.role == "decode" and view.is_there}
    prefills = [view for view in workers if view.role == "prefill" and view.is_there]
    if any(view.partners in partners for view in prefills):
        return None
    mismatch = (
        "no prefill worker matches a decode worker; the gateway's log, or GET /status by revision, names the difference"
    )
    return Unready(mismatch if prefills else _describe_none(workers, "prefill"), "prefill")


def find_unusable(
    workers: Sequence[WorkerView], adapter: str, digest: str, computes: str, no_prefill: NoPrefill
) -> Unready | None:
    """Why a request with this adapter, begun by workers that compute so, cannot be served, though others can; or None.

    `digest`, `computes`: empty: any.
    """
    usable = [view for view in workers if view.can_serve(digest, computes)]
    lacking, all_lack = find_unready(usable, no_prefill), find_unready(workers, no_prefill)
    if lacking is None or (all_lack is not None and all_lack.role == lacking.role):
        return None
    others = [view for view in workers if view.role == lacking.role and view not in usable]
    foreign = [view for view in others if view.is_there and not view.can_serve("", computes)]
    if foreign:
        have = "alive has: " + ", ".join(f"{view.address} has {view.computes}" for view in foreign)
        detail = f"the answer began with the weights {computes}, which no {lacking.role} worker that is {have}"
        decodes = [view for view in workers if view.role == "decode"]
        may_come = lacking.role == "prefill" or any(not one.weights or one.can_serve("", computes) for one in decodes)
        return Unready(detail, lacking.role, WEIGHTS_GONE, is_final=not may_come)
    why = f"GET /status says why {', '.join(view.address for view in others)} lack it"
    detail = f"adapter '{adapter}' is on no {lacking.role} worker that is alive; {why}"
    return Unready(detail, lacking.role)


def _describe_none(workers: Sequence[WorkerView], role: Role) -> str:
    views = [view for view in workers if view.role == role or view.embeds]
    role = "prefill" if any(view.embeds for view in views) else role  # such a model has no others
    troubles = [f"{view.address} {view.trouble}" for view in views]
    if troubles:
        return f"no {role} worker is alive: " + "; ".join(troubles)
    return f"no {role} worker is known: name one with --{role}; the log says which names DNS does not know"
