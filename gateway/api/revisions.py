"""GET and POST /v1/revisions: which revisions the workers are of, and what share of new requests each gets."""

from collections.abc import Callable, Sequence

import msgspec
import structlog
from fastapi import APIRouter
from pydantic import RootModel, StrictFloat
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.http.access import admin_only
from gateway.api.http.answer import json_response
from gateway.api.http.read_body import limited_route
from gateway.errors import bad_request
from gateway.policies.rollout import Rollout
from gateway.request.prepare import ServedModels
from gateway.router.worker_view import WorkerView
from runtime.config_parts import check_shares

log = structlog.get_logger()
REVISIONS_PATH = "/v1/revisions"


class RevisionStatus(msgspec.Struct, frozen=True):
    """One revision in the answer."""

    share: float | None  # of new requests; null: it shares with others what is left
    prefill: int  # workers that are alive
    decode: int
    running: int  # requests of this gateway on decode workers


class Shares(RootModel[dict[str, StrictFloat]]):
    """Body of POST /v1/revisions: revision |-> its share of new requests. Others share what is left."""


def build_revisions_router(
    served: ServedModels,
    rollout: Rollout,
    find_views: Callable[[], Sequence[WorkerView]],
) -> APIRouter:
    """`find_views`: of the workers of all models."""
    router = APIRouter(route_class=limited_route(served))

    @router.get(REVISIONS_PATH)
    async def show() -> Response:
        """The revisions of the workers that this gateway knows, and their shares."""
        return json_response({"revisions": describe_revisions(rollout, find_views())})

    @router.post(REVISIONS_PATH)
    @admin_only
    async def change(body: Shares, request: Request) -> Response:
        """Give revisions shares of new requests, in place of the shares before; {} ends a rollout."""
        shares = body.root
        if wrong := check_shares(shares):
            raise bad_request(wrong, None)
        known = {view.revision for view in find_views() if view.revision}
        if unknown := sorted(shares.keys() - known - rollout.shares.keys()):
            have = ", ".join(sorted(known)) or "none yet"
            raise bad_request(f"no worker has the revision '{unknown[0]}'; there are: {have}", unknown[0])
        await rollout.give(shares)
        log.info("new requests are shared out", shares=shares)
        return await show()

    return router


def describe_revisions(rollout: Rollout, views: Sequence[WorkerView]) -> dict[str, RevisionStatus]:
    """The status of each revision by name, those included that have a share but no worker."""
    names = sorted({view.revision for view in views} | rollout.shares.keys())
    found = {}
    for name in names:
        alive = [view for view in views if view.revision == name and view.is_alive]
        decodes = [view for view in views if view.revision == name and view.answers]
        found[name] = RevisionStatus(
            rollout.shares.get(name),
            sum(view.role == "prefill" for view in alive),
            sum(view.role == "decode" for view in alive),
            sum(view.num_mine for view in decodes),
        )
    return found
