"""The endpoints of models without answers, and what they answer."""

import base64
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.answer.choices import HOLD_CHOICES, Hold
from gateway.api.access import unique_id
from gateway.api.embeddings.types import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from gateway.api.http.answer import encode, json_response, until_disconnect
from gateway.api.http.read_body import limited_route
from gateway.embeddings.embed import Embedded, EmbedRequest, activate, embed, find_pooling, score
from gateway.request.prepare import ServedModel, ServedModels
from gateway.request.rules import LAST_PRIORITY

FIELD_COST = 16  # writing a number costs as much as tokenising so many characters
T = TypeVar("T")


class TextUsage(msgspec.Struct):
    """The number of tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct):
    """A text's vector."""

    index: int
    embedding: list[float] | str  # the latter: float32, little-endian, in base64
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct):
    """All vectors."""

    data: list[EmbeddingItem]
    model: str
    usage: TextUsage
    object: Literal["list"] = "list"


class DocumentText(msgspec.Struct):
    """A document."""

    text: str


class RerankResult(msgspec.Struct):
    """The relevance of one document."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankAnswer(msgspec.Struct):
    """The answer of a rerank request: the best documents first."""

    id: str
    model: str
    usage: TextUsage
    results: list[RerankResult]


class ScoreItem(msgspec.Struct):
    """The score of one pair of texts."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ClassItem(msgspec.Struct):
    """The likeliest class of one text, and the probabilities of all."""

    index: int
    label: str  # of the likeliest class
    probs: list[float]
    num_classes: int


class ScoreList(msgspec.Struct):
    """All scores."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: TextUsage
    object: Literal["list"] = "list"


class ClassList(msgspec.Struct):
    """All texts' classes."""

    id: str
    created: int
    model: str
    data: list[ClassItem]
    usage: TextUsage
    object: Literal["list"] = "list"


class Asked:
    """One HTTP request, with the model and the key that answer it."""

    def __init__(self, served: ServedModels, request: Request, raw: EmbedRequest) -> None:
        """Raises ApiError."""
        state = request.state
        self.served: ServedModel = served.find(raw.model, state.key)
        self.hold: Hold | None = getattr(state, HOLD_CHOICES, None)
        if self.hold is not None:
            raw = replace(raw, priority=LAST_PRIORITY, deadline_ms=None)
        self.raw, self.id, self.usual = raw, unique_id(state.request_id), (state.arrived_s, state.key)
        self._request = request

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs the work; ends it where the client leaves, and raises ClientDisconnect then."""
        await self._request.state.turn.last_step()
        return await until_disconnect(self._request.receive, work())


def add_embeddings(app: FastAPI, served: ServedModels) -> None:
    """Adds the routes, and their answers to the OpenAPI document."""
    router = APIRouter(route_class=limited_route(served))
    kinds: dict[str, Any] = {}

    @router.post("/v1/embeddings")
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Turns texts into vectors."""
        asked = Asked(served, request, body.raw())
        found = await asked.run(lambda: embed(asked.served, asked.raw, asked.id, *asked.usual, asked.hold))
        is_coded = body.encoding_format == "base64"

        def write(_: object) -> bytes:
            items = [
                EmbeddingItem(at, base64.b64encode(row.astype("<f4").tobytes()).decode() if is_coded else row.tolist())
                for at, row in enumerate(found.rows)
            ]
            return encode(EmbeddingList(items, found.model, _usage(found)))

        cost = 0 if is_coded else FIELD_COST * sum(map(len, found.rows))
        return json_response(await asked.served.offload.run(cost, write, request.state.key.name))

    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Orders documents by what they have to do with a query."""
        pairs = body.pairs()
        asked = Asked(served, request, body.raw())
        scores, found = await asked.run(
            lambda: score(asked.served, asked.raw, pairs, asked.id, *asked.usual, asked.hold)
        )
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
        results = [RerankResult(at, scores[at]) for at in best]
        for one in results if body.return_documents is not False else ():
            one.document = DocumentText(pairs[one.index][1])
        return json_response(RerankAnswer(f"rerank-{asked.id}", found.model, _usage(found), results))

    async def score_pairs(body: ScoreRequest, request: Request) -> Response:
        """Says how much the texts of pairs have to do with each other."""
        asked = Asked(served, request, body.raw())
        scores, found = await asked.run(
            lambda: score(asked.served, asked.raw, body.pairs(), asked.id, *asked.usual, asked.hold)
        )
        items = [ScoreItem(at, one) for at, one in enumerate(scores)]
        return json_response(ScoreList(f"score-{asked.id}", int(time.time()), found.model, items, _usage(found)))

    @router.post("/classify")
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Says which classes texts belong to."""
        asked = Asked(served, request, body.raw())
        found = await asked.run(lambda: embed(asked.served, asked.raw, asked.id, *asked.usual, asked.hold))
        pooling = find_pooling(asked.served, found.model, ("classify", "score"))
        items = []
        for at, row in enumerate(found.rows):
            probs = activate(row, pooling)
            label = pooling.labels[int(probs.argmax())] if pooling.labels else ""
            items.append(ClassItem(at, label, probs.tolist(), len(probs)))
        return json_response(ClassList(f"classify-{asked.id}", int(time.time()), found.model, items, _usage(found)))

    endpoints: Sequence[tuple[Any, Any, Sequence[str]]] = (
        (rerank, RerankAnswer, ("/v1/rerank", "/v2/rerank", "/rerank")),
        (score_pairs, ScoreList, ("/v1/score", "/score")),
    )
    for endpoint, kind, paths in endpoints:
        for path in paths:
            router.post(path)(endpoint)
            kinds[path] = kind
    app.include_router(router)
    app.state.answers |= kinds | {"/v1/embeddings": EmbeddingList, "/classify": ClassList}


def _usage(found: Embedded) -> TextUsage:
    return TextUsage(found.num_tokens, found.num_tokens)
