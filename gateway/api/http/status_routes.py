"""Endpoints for probes, dashboards and people: liveness, readiness, version, metrics, fleet. Must not know requests."""

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from gateway.api.http.json_answer import json_response
from gateway.errors import not_ready
from gateway.request.prepare import ServedModel
from gateway.router.fleet import Fleet
from gateway.router.router import Router
from gateway.router.worker_client import WorkerClient
from runtime.hardware import OWN_VERSION


def build_status_router(served: ServedModel) -> APIRouter:
    router = APIRouter()

    @router.get("/live")
    async def live() -> Response:
        """The process answers. Needs no API key."""
        return json_response({"status": "alive"})

    @router.get("/ready")
    @router.get("/health")
    async def ready() -> Response:
        """Requests can be served; 503 with the reason when not."""
        if reason := served.ring.check_ready():
            raise not_ready(reason)
        return json_response({"status": "ready"})

    @router.get("/version")
    async def get_version() -> Response:
        """The version of this software."""
        return json_response({"version": OWN_VERSION})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(served.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


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
    free_slots: int  # of states, for models whose layers keep some; checkpoints included
    used_slots: int
    cached_slots: int
    prefix_hits: float  # share of the prompt tokens looked up that were there
    running: int
    alive: bool
    trouble: str
    weaknesses: dict[str, str]  # what works worse than it could |-> why, and what to change
    source: str  # the DNS name that it has; empty: named by its address


def build_fleet_router(fleet: Fleet, router: Router) -> APIRouter:
    """GET /status."""
    routes = APIRouter()

    @routes.get("/status")
    async def status() -> Response:
        """Every worker, as of its last answer to the gateway."""
        return json_response(
            {
                "workers": [_describe(worker) for worker in fleet.workers()],
                "trouble": router.find_trouble() or "",
                "no_hand_off": router.explain_no_hand_off(),
            }
        )

    return routes


def _describe(worker: WorkerClient) -> WorkerStatus:
    status = worker.status
    trouble = worker.find_trouble()
    return WorkerStatus(
        role=worker.role,
        address=worker.address,
        pid=status.peer.pid,
        incarnation=status.peer.incarnation,
        ranks=len(status.peer.ranks),
        transport="+".join(sorted(set(status.transports.values()))) or "none",
        free_pages=status.free_pages,
        used_pages=status.used_pages,
        cached_pages=status.cached_pages,
        free_slots=status.free_slots,
        used_slots=status.used_slots,
        cached_slots=status.cached_slots,
        prefix_hits=round(status.prefix_hits / max(status.prefix_queries, 1), 3),
        running=status.num_running,
        alive=trouble is None,
        trouble=trouble or "",
        weaknesses=dict(status.weaknesses),
        source=worker.source,
    )
