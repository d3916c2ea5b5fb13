"""The page at `/`, where a person can try the service: serves its files, and knows no requests."""

from collections.abc import Awaitable, Callable, Sequence
from importlib import resources

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

_FILES = {"style.css": "text/css; charset=utf-8", "app.js": "text/javascript; charset=utf-8"}
_EXAMPLES = "/page/examples.json"
PAGE_PATHS = frozenset({"/", _EXAMPLES, *(f"/page/{name}" for name in _FILES)})  # served without a key
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build_page_router(examples: Sequence[str]) -> APIRouter:
    """Routes of the page, which calls the API like any other client. `examples`: prompts that the model can answer."""
    router = APIRouter(include_in_schema=False)
    router.add_api_route("/", _serve(_read("index.html"), "text/html; charset=utf-8"), methods=["GET", "HEAD"])
    for name, media_type in _FILES.items():
        router.add_api_route(f"/page/{name}", _serve(_read(name), media_type), methods=["GET"])
    router.add_api_route(_EXAMPLES, _serve(msgspec.json.encode(examples), "application/json"), methods=["GET"])
    return router


def _read(name: str) -> bytes:
    return (resources.files("gateway") / "page" / name).read_bytes()


def _serve(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve
