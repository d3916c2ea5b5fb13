"""The endpoints that load and unload adapters (LoRA), as in vLLM."""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from gateway.adapters.loader import AdapterLoader
from gateway.api.http.access import admin_only
from gateway.api.http.body import Body, any_value
from gateway.api.http.read_body import limited_route
from gateway.errors import bad_request, check_count
from gateway.request.prepare import ServedModels
from runtime.config_parts import MAX_NAME_CHARS

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_PATH_CHARS = 4096  # Linux's PATH_MAX


class LoadRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    ignored = any_value()

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    base_model_name: str = ""  # of several models; empty: the first


class UnloadRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    ignored = any_value("lora_int_id")

    lora_name: str = ""


def build_adapter_router(served: ServedModels, loaders: Mapping[str, AdapterLoader]) -> APIRouter:
    """`loaders`: of each model by its first name."""
    router = APIRouter(route_class=limited_route(served))

    @router.post(LOAD_PATH)
    @admin_only
    async def load(body: LoadRequest, request: Request) -> PlainTextResponse:
        """Loads the adapter in a folder of the workers' hosts, or with load_inplace what it has now."""
        name, path = body.lora_name, body.lora_path
        if not name or not path:
            param = "lora_path" if name else "lora_name"
            raise bad_request("Both 'lora_name' and 'lora_path' must be provided.", param, "missing_field")
        check_count("lora_name", len(name), MAX_NAME_CHARS, "characters")
        check_count("lora_path", len(path), MAX_PATH_CHARS, "characters")
        base = served.find(body.base_model_name or None, request.state.key).names
        base.check(body.base_model_name or None)
        if any(name in one.names.listed for one in served.models):
            raise bad_request(f"lora_name '{name}' is the model's own name; choose another", "lora_name")
        if any(name in one.names.adapters for one in served.models if one.names is not base):
            raise bad_request(f"lora_name '{name}' is an adapter of another model; choose another", "lora_name")
        await loaders[base.listed[0]].load(name, path, body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post(UNLOAD_PATH)
    @admin_only
    async def unload(body: UnloadRequest, request: Request) -> PlainTextResponse:
        """Unloads an adapter; requests that run keep it to their end."""
        if not body.lora_name:
            raise bad_request("'lora_name' must be provided.", "lora_name", "missing_field")
        base = served.find(body.lora_name, request.state.key).names
        await loaders[base.listed[0]].unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
