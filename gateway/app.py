"""Assembles the REST API around the served models."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from gateway.access.allowance import LIMIT_HEADERS
from gateway.adapters.registry import Adapter
from gateway.api.access import REQUEST_ID_HEADER, WARNING_HEADER
from gateway.api.embeddings.routes import add_embeddings
from gateway.api.http.access import Access
from gateway.api.http.errors import add_error_handlers
from gateway.api.http.middleware import RequestScope
from gateway.api.http.service_routes import build_page_router, build_status_router
from gateway.api.ollama.routes import add_ollama
from gateway.api.openapi import add_document
from gateway.api.routes import Keeper, build_api_router
from gateway.images.families import find_family
from gateway.images.fetch import ImageFetcher
from gateway.images.reader import Images
from gateway.metrics import RequestMetrics
from gateway.request.prepare import ApiOptions, ServedModel, ServedModels
from gateway.request.rules import ServedNames
from gateway.router.engine_client import EngineClient
from gateway.text.offload import Offload
from gateway.text.segments import SegmentEncoder
from gateway.text.tokenizer import Tokenizer
from gateway.tools.dialect import find_dialect
from gateway.tools.reasoning import REASONING_FORMATS, resolve_reasoning
from gateway.tracing import Tracing

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {}}  # replaces FastAPI's own 422, which is never sent


def add_model(
    served: ServedModels,
    ring: EngineClient,
    tokenizer: Tokenizer,
    served_names: Sequence[str],
    registry: CollectorRegistry | None = None,
    tracing: Tracing | None = None,
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
) -> ServedModel:
    """Adds a model to the service, which closes it.

    `adapters`: by the names that requests may have now. `registry`: of the model's metrics, if not the service's; one
    model for each.
    """
    options = served.options
    dialect = find_dialect(options.tool_format, tokenizer.tried.probes)
    tokenizer.add_ends(dialect.format.ends if dialect.format else ())
    reasoning = resolve_reasoning(options.reasoning_format, tokenizer.chat_templates, tokenizer.has_token)
    if dialect.format and dialect.format.has_channels:
        reasoning = REASONING_FORMATS["harmony"]  # which also reads what is not reasoning
    model = ServedModel(
        tokenizer=tokenizer,
        segments=SegmentEncoder(tokenizer),
        offload=served.offload,
        templates=served.templates,
        template=served.templates.add(tokenizer.template),
        images=_build_images(tokenizer, options, served.offload),
        dialect=dialect,
        reasoning=reasoning,
        ring=ring,
        names=ServedNames(served_names, adapters, served.find_names),
        options=options,
        metrics=RequestMetrics(registry or served.registry, options.itl_goal_s, served.live_gaps),
        created_s=int(time.time()),
        waiting=served.waiting,
        tracing=tracing,
    )
    served.models.append(model)
    return model


def _build_images(tokenizer: Tokenizer, options: ApiOptions, offload: Offload) -> Images | None:
    """Builds what reads images for the model; None if it takes none."""
    config = tokenizer.config
    family, token_id = find_family(config), config.get("image_token_id", config.get("image_token_index"))
    if family is None or not isinstance(token_id, int):
        return None
    fetcher = ImageFetcher(options.image_hosts)
    return Images(tokenizer.folder, family, token_id, options.max_image_pixels, fetcher, offload)


def build_app(served: ServedModels, keeper: Keeper | None = None) -> FastAPI:
    """The REST API, to be served by uvicorn. `keeper`: keeps answers; None: none are kept."""
    app = FastAPI(title="Baton", version="1", openapi_url=None, redirect_slashes=False, responses=_ERRORS)
    access = app.state.access = Access(served.keys, served.options.cors_origins, served.options.hosts)
    app.router.default = access.refuse_path
    app.include_router(build_api_router(served, keeper))
    app.include_router(build_status_router(served))
    app.include_router(build_page_router(served.models[0].tokenizer.examples))
    add_error_handlers(app)
    app.add_middleware(  # around all routes: preflights need no key
        CORSMiddleware,
        allow_origins=served.options.cors_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER, WARNING_HEADER, "retry-after", *LIMIT_HEADERS],
    )
    app.add_middleware(RequestScope)
    add_document(app, needs_key=not served.keys.is_open)
    add_ollama(app, served)
    add_embeddings(app, served)
    return app
