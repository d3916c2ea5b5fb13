"""POST /v1/pause, /v1/resume and /v1/weights: the workers of a model stop for a while, and take other weights."""

import asyncio
from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.http.access import admin_only
from gateway.api.http.answer import json_response
from gateway.api.http.body import Body
from gateway.api.http.read_body import limited_route
from gateway.errors import bad_request, check_count
from gateway.request.prepare import ServedModels
from gateway.scaling.weights import WeightKeeper
from runtime.config_parts import MAX_NAME_CHARS
from runtime.rpc import MAX_PAUSE_S
from runtime.tasks import run_to_end

PAUSE_PATH, RESUME_PATH, WEIGHTS_PATH = "/v1/pause", "/v1/resume", "/v1/weights"
MAX_PATH_CHARS = 4096  # Linux's PATH_MAX
InFlight = Literal["wait", "end"]


class ResumeRequest(Body):
    """Body of POST /v1/resume."""

    model: str | None = None


class PauseRequest(ResumeRequest):
    """Body of POST /v1/pause."""

    in_flight: InFlight = "wait"
    for_s: float = 600.0


class WeightsRequest(ResumeRequest):
    """Body of POST /v1/weights."""

    path: str
    revision: str = ""
    in_flight: InFlight = "wait"
    timeout_s: float = 300.0


def build_weights_router(served: ServedModels, keepers: Mapping[str, WeightKeeper]) -> APIRouter:
    """`keepers`: of each model by its first name."""
    router = APIRouter(route_class=limited_route(served))

    def find(body: ResumeRequest, request: Request) -> WeightKeeper:
        names = served.find(body.model, request.state.key).names
        names.check(body.model)
        return keepers[names.listed[0]]

    def check_seconds(name: str, seconds: float) -> None:
        if not 0 < seconds <= MAX_PAUSE_S:
            raise bad_request(f"{name} is {seconds:g}; it must be above 0, and at most {MAX_PAUSE_S:g}", name)

    @router.post(PAUSE_PATH)
    @admin_only
    async def pause(body: PauseRequest, request: Request) -> Response:
        """Workers take nothing new for `for_s` seconds; requests wait. Answers that run go on, or with "end" later."""
        check_seconds("for_s", body.for_s)
        return json_response({"running": await find(body, request).pause(body.for_s, body.in_flight == "end")})

    @router.post(RESUME_PATH)
    @admin_only
    async def resume(body: ResumeRequest, request: Request) -> Response:
        """Ends the pause."""
        return json_response({"running": await find(body, request).pause(0.0)})

    @router.post(WEIGHTS_PATH)
    @admin_only
    async def change(body: WeightsRequest, request: Request) -> Response:
        """Workers take the weights in a folder of their hosts, below their --weights-dir, in place of their own."""
        check_seconds("timeout_s", body.timeout_s)
        check_count("path", len(body.path), MAX_PATH_CHARS, "characters")
        check_count("revision", len(body.revision), MAX_NAME_CHARS, "characters")
        if "=" in body.revision:
            raise bad_request("revision must be a name without =", "revision")
        work = find(body, request).change(body.path, body.revision, body.in_flight == "end", body.timeout_s)
        return json_response(await asyncio.shield(run_to_end(work)))  # a client that leaves stops nothing half-way

    return router
