"""Endpoints for probes and dashboards: liveness, readiness, version, metrics. Must not know requests."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from gateway.api.http.json_answer import json_response
from gateway.errors import not_ready
from gateway.request.prepare import ServedModel
from runtime.version import OWN_VERSION


def build_status_router(served: ServedModel) -> APIRouter:
    """Routes at the root."""
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
