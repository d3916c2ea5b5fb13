"""GET /status: the fleet, for people and scripts. Knows links, not requests."""

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from gateway.api.http.json_answer import json_response
from gateway.ring.fleet import Fleet
from gateway.ring.worker_link import WorkerLink


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker in the answer."""

    role: str
    address: str
    pid: int
    incarnation: str
    ranks: int  # processes that compute its model together
    transport: str  # in use with its peers; "none" before the first hand-off
    free_pages: int  # cached ones included
    used_pages: int
    cached_pages: int
    prefix_hits: float  # share of the prompt tokens looked up that were there
    running: int
    alive: bool
    trouble: str


def build_fleet_router(fleet: Fleet) -> APIRouter:
    """The route, at the root."""
    router = APIRouter()

    @router.get("/status")
    async def status() -> Response:
        """Every worker, as of its last answer to the gateway."""
        workers = [_describe(link) for link in fleet.links()]
        return json_response({"workers": workers})

    return router


def _describe(link: WorkerLink) -> WorkerStatus:
    status = link.status
    trouble = link.find_trouble()
    return WorkerStatus(
        role=link.state.role,
        address=link.address,
        pid=status.peer.pid,
        incarnation=status.peer.incarnation,
        ranks=len(status.peer.ranks),
        transport="+".join(sorted(set(status.transports.values()))) or "none",
        free_pages=status.free_pages,
        used_pages=status.used_pages,
        cached_pages=status.cached_pages,
        prefix_hits=round(status.prefix_hits / max(status.prefix_queries, 1), 3),
        running=status.num_running,
        alive=trouble is None,
        trouble=trouble or "",
    )
