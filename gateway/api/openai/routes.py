"""OpenAI's REST endpoints. Must not know how requests are checked or answers written."""

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from gateway.answer.choices import Totals
from gateway.api.http.json_answer import encode, json_response
from gateway.api.http.json_body import limited_route
from gateway.api.http.respond import respond
from gateway.api.openai.answers import ModelCard, ModelList
from gateway.api.openai.choices import ChatWriter, ChoiceWriter, Extras, TextWriter
from gateway.api.openai.count_types import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from gateway.api.openai.types import ChatCompletionRequest, CompletionRequest
from gateway.api.openai.wire import AnswerWriter
from gateway.errors import bad_request
from gateway.request.prepare import ServedModel, detokenize, tokenize


def build_openai_router(served: ServedModel) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=limited_route(served))

    @router.post("/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await _respond(served, request, body, ChatWriter)

    @router.post("/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        return await _respond(served, request, body, TextWriter)

    @router.get("/models")
    async def list_models() -> Response:
        """The names of the model served."""
        return json_response(ModelList([_card(served, name) for name in served.names.listed]))

    @router.get("/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        """The model, if it is served under this name."""
        return json_response(_card(served, served.names.check(model_id)))

    return router


def build_count_router(served: ServedModel) -> APIRouter:
    """POST /tokenize and /detokenize."""
    router = APIRouter(route_class=limited_route(served))
    tokenizer = served.tokenizer

    @router.post("/tokenize")
    async def to_tokens(body: TokenizeRequest) -> Response:
        """Turns a prompt or a conversation into token ids."""
        ids = await tokenize(served, body.raw())

        def write() -> bytes:
            token_strs = tokenizer.pieces(ids) if body.return_token_strs else UNSET
            return encode(TokenizeAnswer(len(ids), tokenizer.context_tokens, ids, token_strs))

        return json_response(await served.offload.run(len(ids), write))  # cheaper per token than tokenising a character

    @router.post("/detokenize")
    async def to_text(body: DetokenizeRequest) -> Response:
        """Turns token ids into text, control tokens as they are written."""
        text = await detokenize(served, body.model, body.tokens, "tokens", with_control_tokens=True)
        return json_response(DetokenizeAnswer(text))

    return router


async def _respond(
    served: ServedModel, request: Request, body: ChatCompletionRequest | CompletionRequest, kind: type[ChoiceWriter]
) -> Response:
    raw = body.raw()
    if body.stream and raw.num_prompt_logprobs is not None:
        raise bad_request("prompt_logprobs come with whole answers only; set stream to false", "prompt_logprobs")
    extras = Extras(served.tokenizer.token_bytes, raw.num_logprobs is not None, raw.with_timing, raw.with_token_ids)

    def new_writer(totals: Totals) -> AnswerWriter:
        return AnswerWriter(kind, totals, extras, body.streamed_usage)

    return await respond(served, request, raw, new_writer, is_streamed=bool(body.stream))


def _card(served: ServedModel, name: str) -> ModelCard:
    return ModelCard(name, served.created_s, served.tokenizer.context_tokens, served.names.listed[0])
