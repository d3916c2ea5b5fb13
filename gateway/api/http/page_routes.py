"""The page at `/`, where a person can try the service: serves its files, and knows no requests."""

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

_FILES = {"style.css": "text/css; charset=utf-8", "app.js": "text/javascript; charset=utf-8"}
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})  # served without a key
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build_page_router() -> APIRouter:
    """Routes of the page, which calls the API like any other client."""
    router = APIRouter(include_in_schema=False)
    router.add_api_route("/", _serve("index.html", "text/html; charset=utf-8"), methods=["GET", "HEAD"])
    for name, media_type in _FILES.items():
        router.add_api_route(f"/page/{name}", _serve(name, media_type), methods=["GET"])
    return router


def _serve(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (resources.files("gateway") / "page" / name).read_bytes()

    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve
