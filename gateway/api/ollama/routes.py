"""The endpoints of Ollama's API. Those that would fetch, change or delete models are refused."""

import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.access import warning_headers
from gateway.api.embeddings.routes import FIELD_COST, Asked
from gateway.api.http.answer import encode, json_response, respond
from gateway.api.http.errors import OLLAMA_PATH
from gateway.api.http.read_body import limited_route
from gateway.api.ollama.types import ChatRequest, EmbedBody, OldEmbedBody, PlainRequest, ShowRequest
from gateway.api.ollama.writer import OllamaAnswer, OllamaWriter, build_answer
from gateway.embeddings.embed import Floats, embed, find_pooling
from gateway.errors import bad_request
from gateway.request.check import check
from gateway.request.prepare import ServedModel, ServedModels
from gateway.request.types import GenerateRequest

API_VERSION = "0.32.15"  # of Ollama, whose API this is: clients ask for a lowest one
_TAG = ":latest"  # that a name without one has
_FOREVER = "9999-12-31T23:59:59Z"
_BY_CURL = ("application/x-www-form-urlencoded",)  # curl's type of a body, if none is given
_WEIGHTS = ("*.safetensors", "*.gguf")
_INFO = {  # names in model_info, behind the family |-> in config.json
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_CHOSEN = "models are chosen when the service starts, by baton serve --model"
_REFUSED = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")


def add_ollama(app: FastAPI, served: ServedModels) -> None:
    """Adds the endpoints to an app that has its document."""
    router = APIRouter(route_class=limited_route(served, _BY_CURL), prefix=OLLAMA_PATH)

    @router.post("/chat")
    async def answer_ollama_chat(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        one, name = _find(served, body.model, request)
        return await _answer(one, request, body, body.raw(name), asks=bool(body.messages))

    @router.post("/generate")
    async def answer_ollama_prompt(body: PlainRequest, request: Request) -> Response:
        """Answers a prompt."""
        one, name = _find(served, body.model, request)
        raw = body.raw(name, has_template=bool(one.tokenizer.chat_templates))
        return await _answer(one, request, body, raw, asks=bool(body.prompt))

    @router.get("/tags", include_in_schema=False)
    async def list_models(request: Request) -> Response:
        return json_response({"models": [_describe(*named) for named in served.names(request.state.key)]})

    @router.get("/ps", include_in_schema=False)
    async def list_loaded(request: Request) -> Response:
        names = served.names(request.state.key)
        ready = [(name, one) for name, one in names if one.ring.can_serve(name if name in one.names.adapters else "")]
        more = [{"expires_at": _FOREVER, "context_length": one.tokenizer.context_tokens} for _, one in ready]
        return json_response({"models": [_describe(*named) | some for named, some in zip(ready, more, strict=True)]})

    @router.post("/show", include_in_schema=False)
    async def show_model(body: ShowRequest, request: Request) -> Response:
        given = body.model or body.name
        if not given:
            raise bad_request("model is missing; name one", "model", "missing_field")
        one, name = _find(served, given, request)
        return json_response(_show(name, one))

    @router.get("/version", include_in_schema=False)
    async def get_version() -> Response:
        return json_response({"version": API_VERSION})

    @router.post("/embed", include_in_schema=False)
    async def embed_texts(body: EmbedBody, request: Request) -> Response:
        def build(rows: list[list[float]], num_tokens: int) -> dict[str, Any]:
            total = int((time.perf_counter() - request.state.arrived_s) * 1e9)
            durations = {"total_duration": total, "load_duration": 1, "prompt_eval_count": num_tokens}
            return {"model": body.model, "embeddings": rows, **(durations if rows else {})}

        return await _embed(served, request, body, build)

    @router.post("/embeddings", include_in_schema=False)
    async def embed_text(body: OldEmbedBody, request: Request) -> Response:
        return await _embed(served, request, body, lambda rows, _: {"embedding": rows[0] if rows else []})

    for path in _REFUSED:
        _refuse(router, path)
    app.include_router(router)
    app.state.answers |= dict.fromkeys((f"{OLLAMA_PATH}/chat", f"{OLLAMA_PATH}/generate"), OllamaAnswer)


async def _embed(
    served: ServedModels, request: Request, body: EmbedBody | OldEmbedBody,
    build: Callable[[list[list[float]], int], dict[str, Any]],
) -> Response:  # fmt: skip
    """`build`: the answer, of all vectors and how many tokens were read. Raises ApiError, ClientDisconnect."""
    _, name = _find(served, body.model, request)
    asked, rows, num_tokens = Asked(served, request, body.raw(name)), list[Floats](), 0
    if asked.raw.texts:
        found = await asked.run(lambda: embed(asked.served, asked.raw, asked.id, *asked.usual, asked.hold))
        rows, num_tokens = found.rows, found.num_tokens
    else:
        find_pooling(asked.served, name, asked.raw.tasks)

    def write(_: object) -> bytes:
        return encode(build([row.tolist() for row in rows], num_tokens))

    cost = FIELD_COST * sum(map(len, rows))
    return json_response(await asked.served.offload.run(cost, write, request.state.key.name))


def _refuse(router: APIRouter, path: str) -> None:
    @router.api_route(f"/{path}", methods=["DELETE" if path == "delete" else "POST"], include_in_schema=False)
    async def refuse() -> Response:
        raise bad_request(f"{OLLAMA_PATH}/{path} is not supported: {_CHOSEN}", None, "unsupported")


def _find(served: ServedModels, given: str, request: Request) -> tuple[ServedModel, str]:
    """A model and its name; it may be named with the tag that is meant where there is none. Raises ApiError."""
    is_known = any(one.names.has(given) for one in served.models)
    one = served.find(name := given if is_known else given.removesuffix(_TAG), request.state.key)
    return one, one.names.check(name)


async def _answer(
    one: ServedModel, request: Request, body: ChatRequest | PlainRequest, raw: GenerateRequest, *, asks: bool
) -> Response:
    """Unless it `asks` anything, it wants to know whether the model is there."""
    is_chat = isinstance(body, ChatRequest)
    if not asks:
        check(raw, one, request.state.key, salts_by_key=one.options.salts_by_key)
        answer = build_answer(body.model, is_chat=is_chat)
        answer.done, answer.done_reason = True, "load"
        response = json_response(answer)
        response.headers.update(warning_headers(raw.warnings))
        return response
    await request.state.turn.step()
    with_context = not is_chat and raw.is_chat and not raw.has_images
    response = await respond(
        one,
        request,
        raw,
        lambda totals: OllamaWriter(
            totals, body.model, one.tokenizer.token_bytes, is_chat=is_chat, with_context=with_context
        ),
        is_streamed=body.stream is not False,
    )
    if body.stream is not False:
        response.headers["content-type"] = "application/x-ndjson"
    return response


@cache
def _weigh(folder: Path) -> tuple[int, str, bytes]:
    """A model's weights, as far as the gateway has them: bytes, format; and its configuration."""
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    config = (folder / "config.json").read_bytes()
    return sum([file.stat().st_size for file in files]), files[0].suffix[1:] if files else "", config


def _describe(name: str, one: ServedModel) -> dict[str, Any]:
    """Describes a model as Ollama does. Values that the gateway does not know are empty or 0."""
    tokenizer, tagged = one.tokenizer, name if ":" in name else name + _TAG
    size, format, config = _weigh(tokenizer.folder)
    family, quantised = str(tokenizer.config.get("model_type", "")), tokenizer.config.get("quantization_config")
    is_chat = tokenizer.pooling is None
    abilities = {
        "completion": is_chat, "embedding": not is_chat, "tools": is_chat and one.tool_format, "vision": one.images,
        "thinking": is_chat and one.reasoning,
    }  # fmt: skip
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": datetime.fromtimestamp(one.created_s, UTC),
        "size": size,
        "digest": hashlib.sha256(name.encode() + config).hexdigest(),
        "details": {
            "parent_model": one.names.listed[0] if name in one.names.adapters else "",
            "format": format,
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": str(quantised.get("quant_method", "")) if isinstance(quantised, dict) else "",
        },
        "capabilities": [ability for ability, is_there in abilities.items() if is_there],
    }


def _show(name: str, one: ServedModel) -> dict[str, Any]:
    told, tokenizer = _describe(name, one), one.tokenizer
    family, config = told["details"]["family"], tokenizer.config.get("text_config") or tokenizer.config
    info = {f"{family}.{shown}": config[key] for shown, key in _INFO.items() if isinstance(config.get(key), int)}
    return {
        **{shown: told[shown] for shown in ("details", "capabilities", "modified_at")},
        "template": tokenizer.chat_templates,
        "modelfile": f"FROM {told['name']}\n",
        "parameters": "",
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": tokenizer.context_tokens,
            **info,
        },
    }
