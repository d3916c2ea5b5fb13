"""The endpoints of OpenAI's and Anthropic's APIs. `types.py` says what they take, `writer.py` what they answer."""

from typing import Protocol, TypeVar

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from gateway.answer.choices import Totals
from gateway.api.anthropic.types import CountTokensRequest, MessagesRequest
from gateway.api.anthropic.writer import CountAnswer, MessageWriter
from gateway.api.http.answer import encode, json_response, respond, while_connected
from gateway.api.http.body import needs_store
from gateway.api.http.errors import MESSAGES_PATH, RESPONSES_PATH
from gateway.api.http.read_body import limited_route
from gateway.api.openai.answers import DetokenizeAnswer, ModelCard, ModelList, TokenizeAnswer
from gateway.api.openai.types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.api.openai.writer import AnswerWriter
from gateway.api.responses.answers import InputTokens
from gateway.api.responses.types import CountInputRequest, ResponsesRequest
from gateway.api.responses.writer import ResponseWriter
from gateway.request.prepare import ServedModel, ServedModels, detokenize, tokenize
from gateway.request.types import GenerateRequest

Asked = TypeVar("Asked", bound=CountInputRequest)


class Keeper(Protocol):
    """Keeps answers."""

    async def complete(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a chat, and keeps the answer. Raises as `respond`."""

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Answers, and keeps the answer if that is asked for. Raises as `respond`."""

    async def with_history(self, body: Asked, request: Request) -> Asked:
        """The request with all of its conversation as its input. Raises ApiError."""


def build_api_router(served: ServedModels, keeper: Keeper | None = None) -> APIRouter:
    """`keeper`: None keeps nothing."""
    router = APIRouter(route_class=limited_route(served))

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation."""
        if not body.store:
            return await _complete(served, request, body)
        if keeper is None:
            raise needs_store("store")
        return await keeper.complete(body, request)

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        return await _complete(served, request, body)

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The names of the models served, and their adapters."""
        return json_response(ModelList([_card(one, name) for name, one in served.names(request.state.key)]))

    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str, request: Request) -> Response:
        """The model, if it is served under this name."""
        one = served.find(model_id, request.state.key)
        return json_response(_card(one, one.names.check(model_id)))

    @router.post(MESSAGES_PATH)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await respond(
            served.find(body.model, request.state.key),
            request,
            await _raw(body, request),
            MessageWriter,
            is_streamed=bool(body.stream),
        )

    @router.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Counts a conversation's tokens."""
        return json_response(CountAnswer(len(await _tokenize(served, request, body))))

    @router.post(RESPONSES_PATH)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation."""
        if keeper is not None:
            return await keeper.create(body, request)
        body.check_stateless()
        return await answer_once(served, body, request)

    @router.post(f"{RESPONSES_PATH}/input_tokens")
    async def count_input_tokens(body: CountInputRequest, request: Request) -> Response:
        """Counts the tokens of a request's prompt."""
        if keeper is not None:
            body = await keeper.with_history(body, request)
        body.check_stateless()
        return json_response(InputTokens(len(await _tokenize(served, request, body))))

    @router.post("/tokenize")
    async def to_tokens(body: TokenizeRequest, request: Request) -> Response:
        """Turns a prompt or a conversation into token ids."""
        one = served.find(body.model, request.state.key)
        ids, tokenizer = await _tokenize(served, request, body), one.tokenizer

        def write(_: object) -> bytes:
            token_strs = tokenizer.pieces(ids) if body.return_token_strs else UNSET
            return encode(TokenizeAnswer(len(ids), tokenizer.context_tokens, ids, token_strs))

        return json_response(
            await one.offload.run(len(ids), write, request.state.key.name)
        )  # a token costs less than a character

    @router.post("/detokenize")
    async def to_text(body: DetokenizeRequest, request: Request) -> Response:
        """Turns token ids into text, control tokens as they are written."""
        key = request.state.key
        one = served.find(body.model, key)
        await request.state.turn.last_step()
        text = await detokenize(one, body.model, body.tokens, "tokens", key, with_control_tokens=True)
        return json_response(DetokenizeAnswer(text))

    return router


async def answer_once(served: ServedModels, body: ResponsesRequest, request: Request) -> Response:
    """An answer that is not kept. Raises as `respond`."""
    one = served.find(body.model, request.state.key)
    return await respond(
        one,
        request,
        await _raw(body, request),
        lambda totals: ResponseWriter(totals, body, one.tokenizer.token_bytes),
        is_streamed=bool(body.stream),
    )


async def _raw(
    body: ChatCompletionRequest
    | CompletionRequest
    | CountInputRequest
    | CountTokensRequest
    | MessagesRequest
    | ResponsesRequest
    | TokenizeRequest,
    request: Request,
) -> GenerateRequest:
    """The request without its wire format."""
    await request.state.turn.step()
    return body.raw()


async def _tokenize(
    models: ServedModels, request: Request, body: CountTokensRequest | CountInputRequest | TokenizeRequest
) -> tuple[int, ...]:
    raw, key = await _raw(body, request), request.state.key
    await request.state.turn.last_step()
    return await while_connected(request, raw, tokenize(models.find(raw.model, key), raw, key))


async def _complete(
    models: ServedModels, request: Request, body: ChatCompletionRequest | CompletionRequest
) -> Response:
    raw = await _raw(body, request)
    served = models.find(raw.model, request.state.key)

    def new_writer(totals: Totals) -> AnswerWriter:
        return AnswerWriter(totals, raw, body.streamed_usage, served.tokenizer.token_bytes)

    return await respond(served, request, raw, new_writer, is_streamed=bool(body.stream))


def _card(served: ServedModel, name: str) -> ModelCard:
    base, adapter = served.names.listed[0], served.names.adapters.get(name)
    card = ModelCard(name, served.created_s, served.tokenizer.context_tokens, adapter.path if adapter else base)
    if adapter:
        card.parent = base
    card.tool_format = served.tool_format.name if served.tool_format else None
    card.tool_format_reason = served.dialect.why
    card.reasoning_format = served.reasoning.name if served.reasoning else None
    if (pooling := served.tokenizer.pooling) is not None:
        card.task, card.max_model_len = pooling.task, served.tokenizer.context_tokens - 1
    if served.images:
        card.input_modalities = ("text", "image")
    return card
