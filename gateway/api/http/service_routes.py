"""Endpoints for probes, dashboards and people: liveness, readiness, version, metrics, fleet, and the page at `/`."""

from collections.abc import Mapping, Sequence
from importlib import resources

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from gateway.api.http.access import CheckedRoute, open_to_all
from gateway.api.http.answer import encode, json_response
from gateway.errors import not_ready
from gateway.request.prepare import ServedModels
from gateway.router.fleet import Fleet
from gateway.router.router import Router
from gateway.router.worker_client import WorkerClient
from runtime.hardware import OWN_VERSION
from wire.messages import unpack_read

_SCRIPTS = ("app.js", "chats.js", "elements.js", "markdown.js", "messages.js", "prompt.js", "service.js", "workers.js")
_FILES = {"style.css": "text/css; charset=utf-8", **dict.fromkeys(_SCRIPTS, "text/javascript; charset=utf-8")}
_EXAMPLES = "/page/examples.json"
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build_status_router(served: ServedModels) -> APIRouter:
    router = APIRouter(route_class=CheckedRoute)

    @router.get("/live")
    @open_to_all
    async def live() -> Response:
        """The process answers. Needs no API key."""
        return json_response({"status": "alive"})

    @router.get("/ready")
    async def ready() -> Response:
        """Requests can be served; 503 with the reason when not."""
        if reason := served.readiness():
            raise not_ready(reason)
        return json_response({"status": "ready"})

    @router.get("/health")
    @open_to_all
    async def health() -> Response:
        """Requests can be served, as for /ready. Needs no API key."""
        return await ready()

    @router.get("/version")
    async def get_version() -> Response:
        """The version of this software."""
        return json_response({"version": OWN_VERSION})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(served.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def build_page_router(examples: Sequence[str]) -> APIRouter:
    """The page, which calls the API like any other client. `examples`: prompts that the model can answer."""
    router = APIRouter(route_class=CheckedRoute, include_in_schema=False)
    page = resources.files("gateway") / "page"

    def add(path: str, content: bytes, media_type: str) -> None:
        @open_to_all
        async def serve() -> Response:
            return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

        router.add_api_route(path, serve, methods=["GET", "HEAD"])

    add("/", (page / "index.html").read_bytes(), "text/html; charset=utf-8")
    for name, media_type in _FILES.items():
        add(f"/page/{name}", (page / name).read_bytes(), media_type)
    add(_EXAMPLES, encode(examples), "application/json")
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
    kv_token_bytes: int  # that a token takes in pages of one rank
    head_token_bytes: int  # that its heads would take, where pages keep one latent for them; 0: pages keep the heads
    saved_bytes: int  # of KV in its files
    restored_tokens: int  # of prompts, whose KV it read: the sum of read_tokens
    read_tokens: dict[str, int]  # the same by where: files, prefill, decode
    prefix_hits: float  # share of the prompt tokens looked up that were there
    running: int
    takes_images: bool  # it computes prompts with images
    alive: bool
    trouble: str
    weaknesses: dict[str, str]  # what works worse than it could |-> why, and what to change
    adapters: dict[str, str]  # name |-> "loaded", or why it is not
    revision: str  # requests go to workers of one
    source: str  # the DNS name that it has; empty: named by its address
    model: str | UnsetType = UNSET  # that it serves, where the gateway has several


_COPIED = (  # fields of the worker's own answer
    "free_pages", "used_pages", "cached_pages", "free_slots", "used_slots", "cached_slots", "saved_bytes",
    "restored_tokens", "takes_images", "kv_token_bytes", "head_token_bytes",
)  # fmt: skip


def build_fleet_router(fleet: Fleet, routers: Mapping[str, Router], served: ServedModels) -> APIRouter:
    """GET /status. `routers`: of each model by its first name."""
    routes = APIRouter(route_class=CheckedRoute)

    @routes.get("/status")
    async def status() -> Response:
        """Every worker, as of its last answer to the gateway."""
        states = {router.model.name: router.model.describe() for router in routers.values() if router.model.name}
        goals = [one.metrics.describe_goals() for one in served.models]
        return json_response(
            {
                "workers": [_describe(worker, with_model=bool(fleet.parts)) for worker in fleet.workers()],
                "trouble": _join({name: router.find_trouble() for name, router in routers.items()}),
                "no_hand_off": _join({name: router.explain_no_hand_off() for name, router in routers.items()}),
                "goals": goals[0] if len(goals) == 1 else dict(zip(routers, goals, strict=True)),
                **({"models": states} if states else {}),
            }
        )

    return routes


def _join(texts: Mapping[str, str | None]) -> str:
    """Joins what there is to say of each model, with the models' names where there are several."""
    given = {name: text for name, text in texts.items() if text}
    return "; ".join(f"{name}: {text}" if len(texts) > 1 else text for name, text in given.items())


def _describe(worker: WorkerClient, with_model: bool) -> WorkerStatus:
    status, trouble = worker.status, worker.find_trouble()
    return WorkerStatus(
        role=worker.role,
        address=worker.address,
        pid=status.peer.pid,
        incarnation=status.peer.incarnation,
        ranks=len(status.peer.ranks),
        transport="+".join(sorted(set(status.transports.values()))) or "none",
        prefix_hits=round(status.prefix_hits / max(status.prefix_queries, 1), 3),
        running=status.num_running,
        alive=trouble is None,
        trouble=trouble or "",
        read_tokens=unpack_read(status.read_tokens)._asdict(),
        weaknesses=dict(status.weaknesses),
        adapters=worker.adapters.describe(),
        revision=status.peer.revision,
        source=worker.source,
        model=status.peer.model if with_model else UNSET,
        **{name: getattr(status, name) for name in _COPIED},
    )
