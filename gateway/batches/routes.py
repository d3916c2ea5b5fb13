"""OpenAI's files and batches."""

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from math import ceil
from typing import Literal

import msgspec
from fastapi import APIRouter, FastAPI, Query
from pydantic import Field
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from gateway.access.keys import Key
from gateway.api.http.answer import json_response
from gateway.api.http.body import Body, check_metadata, only_null
from gateway.api.http.pages import cut_page
from gateway.api.http.read_body import in_time, limited_chunks, limited_route
from gateway.batches.objects import Batch, FileObject, Value
from gateway.batches.store import MAX_FILE_BYTES, BatchStore
from gateway.errors import ApiError, bad_request, check_count
from gateway.request.prepare import ServedModels

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_NAME_CHARS = 255
_FORM_BYTES = 64 << 10  # of an upload beside its file
_BOUNDARY = re.compile(r""";\s*boundary="?([\w'()+,./:=?-]{1,70})"?\s*(?:;|$)""", re.ASCII | re.IGNORECASE)


class BatchRequest(Body):
    """Body of POST /v1/batches."""

    ignored = only_null("output_expires_after")

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = Field(None, description="Comes back with the batch.")


class Page(msgspec.Struct):
    """Part of a list."""

    data: list[FileObject | Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Deleted(msgspec.Struct):
    """A file is gone."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


_ANSWERS: dict[str, type[msgspec.Struct]] = {  # as those of openapi.py
    "POST /v1/files": FileObject,
    "GET /v1/files": Page,
    "GET /v1/files/{file_id}": FileObject,
    "DELETE /v1/files/{file_id}": Deleted,
    "GET /v1/batches": Page,
    "POST /v1/batches": Batch,
    "/v1/batches/{batch_id}": Batch,
    "/v1/batches/{batch_id}/cancel": Batch,
}


def add_batches(app: FastAPI, served: ServedModels, store: BatchStore | None) -> None:
    """`store`: None refuses everything."""
    router = APIRouter(route_class=limited_route(served))

    def enter(request: Request) -> tuple[BatchStore, str]:
        """The store, and the owner that the request's key stands for."""
        if store is None:
            why = "start the gateway with --batch-dir DIR if files and batches should be kept and answered here"
            raise ApiError(403, why, None, "no_batch_dir")
        key: Key = request.state.key
        return store, key.owner

    @router.post("/v1/files")
    async def upload_file(request: Request) -> Response:
        """Keeps a file of requests for a batch, one as JSON in each line."""
        kept, owner = enter(request)
        await kept.count()
        with kept.upload(owner) as take:
            form = await _read_form(served, request, take)
            try:
                file = _check_form(form)
                return json_response(await kept.add_file(owner, file.file, file.filename or ""))
            finally:
                await form.close()

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        after: str | None = None,
        limit: int = Query(10_000, ge=1, le=10_000),
        purpose: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The files that this key may see."""
        kept, owner = enter(request)
        files = [file for file in await kept.list_own(FileObject, owner) if purpose in (None, file.purpose)]
        return _page(files[:: -1 if order == "asc" else 1], after, limit)

    @router.get("/v1/files/{file_id}")
    async def get_file(file_id: str, request: Request) -> Response:
        """Describes a file."""
        kept, owner = enter(request)
        return json_response(await kept.find(FileObject, file_id, owner))

    @router.get("/v1/files/{file_id}/content")
    async def get_content(file_id: str, request: Request) -> Response:
        """The file itself."""
        kept, owner = enter(request)
        file = await kept.find_content(file_id, owner)
        return FileResponse(kept.path(file.id), media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> Response:
        """Deletes a file; of a batch that is not over, the input stays."""
        kept, owner = enter(request)
        await kept.delete_file(await kept.find_content(file_id, owner))
        return json_response(Deleted(file_id))

    @router.post("/v1/batches")
    async def create_batch(body: BatchRequest, request: Request) -> Response:
        """Answers the requests of a file when others leave room."""
        kept, owner = enter(request)
        if body.endpoint not in ENDPOINTS:
            raise bad_request(
                f"endpoint is {body.endpoint[:100]!r}; batches are for {', '.join(ENDPOINTS)}", "endpoint"
            )
        check_metadata(body.metadata or {})
        file = await kept.find_content(body.input_file_id, owner)
        if file.purpose != "batch":
            raise bad_request("input_file_id names the output of a batch; upload a file", "input_file_id")
        return json_response(await kept.add_batch(owner, file.id, body.endpoint, body.metadata))

    @router.get("/v1/batches")
    async def list_batches(
        request: Request, after: str | None = None, limit: int = Query(20, ge=1, le=100)
    ) -> Response:
        """The batches that this key may see."""
        kept, owner = enter(request)
        return _page(await kept.list_own(Batch, owner), after, limit)

    @router.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str, request: Request) -> Response:
        """How far a batch is."""
        kept, owner = enter(request)
        return json_response(await kept.find(Batch, batch_id, owner))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        """Ends a batch; answers that are complete are in its output."""
        kept, owner = enter(request)
        batch = await kept.find(Batch, batch_id, owner)
        await kept.cancel(batch)
        return json_response(batch)

    app.include_router(router)
    app.state.answers |= _ANSWERS


async def _read_form(served: ServedModels, request: Request, take: Callable[[int], None]) -> FormData:
    """Raises ApiError 400, 408, 413 or 415. `take`: as BatchStore.upload yields it. Names are UTF-8."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(415, f"the body is {kind[:100]!r}; send multipart/form-data", None, "unsupported_media_type")
    boundary = _BOUNDARY.search(kind)
    if boundary is None:
        raise bad_request(f"the Content-Type {kind[:100]!r} has no boundary of 1 to 70 characters", None)
    options, limit = served.options, MAX_FILE_BYTES + _FORM_BYTES

    async def chunks() -> AsyncGenerator[bytes, None]:
        async with aclosing(limited_chunks(request, limit, "send fewer lines")) as parts:
            while True:
                async with in_time(options.body_timeout_s):  # nothing arrives
                    part = await anext(parts, None)
                if part is None:
                    return
                take(len(part))
                yield part

    headers = Headers({"content-type": f'multipart/form-data; boundary="{boundary[1]}"'})
    parser = MultiPartParser(headers, chunks(), max_files=1, max_fields=10, max_part_size=4096)
    try:
        async with in_time(options.body_timeout_s * ceil(limit / options.max_body_bytes)):
            return await parser.parse()
    except MultiPartException as error:
        raise bad_request(f"the body is not valid multipart/form-data: {error.message}", None) from error
    except ValueError as error:  # of a part's header
        raise bad_request("the body is not valid multipart/form-data: a part's header cannot be read", None) from error


def _check_form(form: FormData) -> UploadFile:
    """The file. Raises ApiError 400."""
    file, purpose = form.get("file"), form.get("purpose")
    for name in form.keys() - {"file", "purpose"}:
        raise bad_request(f"unknown field '{name[:100]}'; remove it", name[:100], "unknown_field")
    if not isinstance(file, UploadFile):
        raise bad_request("file is missing; send one as multipart/form-data", "file", "missing_field")
    if purpose != "batch":
        raise bad_request(f"purpose is {str(purpose)[:40]!r}; files are for a 'batch' here", "purpose")
    check_count("file", len(file.filename or ""), MAX_NAME_CHARS, "characters in its name")
    return file


def _page(values: list[Value], after: str | None, limit: int) -> Response:
    return json_response(Page(**cut_page(values, [value.id for value in values], after, limit)))
