"""POST /tokenize and /detokenize. Must not know how text becomes tokens."""

from fastapi import APIRouter
from msgspec import UNSET
from starlette.responses import Response

from gateway.api.http.json_answer import encode, json_response
from gateway.api.http.json_body import limited_route
from gateway.api.openai.count_types import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from gateway.request.counting import detokenize, tokenize
from gateway.request.prepare import ServedModel


def build_count_router(served: ServedModel) -> APIRouter:
    """Routes at the root."""
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
