"""Request bodies of OpenAI's embeddings, and of rerankers, scores and classes as vLLM, Cohere and Jina have them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.http.body import CACHE_SALT_FIELD, USER_FIELD, Body, Many, OrderFields, TextOr, Texts, any_value
from gateway.api.openai.types import TextsOrIds
from gateway.embeddings.embed import MAX_TEXTS, EmbedRequest
from gateway.errors import bad_request

TRUNCATE_FIELD: Any = Field(
    None,
    description="Cut longer texts to so many tokens; -1: to what the model takes.",
    json_schema_extra={"minimum": -1},
)


class _TextBody(OrderFields):
    ignored = any_value("request_id")

    model: str | None = None
    truncate_prompt_tokens: int | None = TRUNCATE_FIELD
    cache_salt: str | None = CACHE_SALT_FIELD
    user: str | None = USER_FIELD

    def common(self) -> dict[str, Any]:
        """Fields of EmbedRequest."""
        return {
            "model": self.model, "truncate": self.truncate_prompt_tokens, "cache_salt": self.cache_salt or "",
            "priority": self.priority, "deadline_ms": self.deadline_ms,
        }  # fmt: skip


class _InputBody(_TextBody):
    takes_ids = True

    input: TextsOrIds = Field(description=f"A text or its token ids, or a list of up to {MAX_TEXTS} such.")

    def texts(self) -> dict[str, Any]:
        """Fields of EmbedRequest."""
        given: Any = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return {"texts": [given], "params": ["input"]}
        return {"texts": given, "params": [f"input[{at}]" for at in range(len(given))]}


class EmbeddingRequest(_InputBody):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        None, description="The first so many numbers of each vector (Matryoshka).", json_schema_extra={"minimum": 1}
    )
    prompt_name: str | None = Field(None, description="Name of a prompt of the model's that goes before each text.")

    def raw(self) -> EmbedRequest:
        """The request without its wire format."""
        return EmbedRequest(dimensions=self.dimensions, prompt_name=self.prompt_name, **self.texts(), **self.common())


class ClassifyRequest(_InputBody):
    """Body of POST /classify."""

    def raw(self) -> EmbedRequest:
        """The request without its wire format."""
        return EmbedRequest(tasks=("classify", "score"), **self.texts(), **self.common())


class TextPart(Body):
    """A document as an object."""

    ignored = {}

    text: str


class RerankRequest(_TextBody):
    """Body of POST /rerank."""

    query: str
    documents: Many[
        Annotated[
            Annotated[str, Tag("~text")] | Annotated[TextPart, Tag("~part")],
            Discriminator(lambda value: "~text" if isinstance(value, str) else "~part"),
        ]
    ]
    top_n: int | None = Field(None, description="How many of the best to return; all if not given.")
    return_documents: bool | None = Field(None, description="Whether results have their documents; true if not given.")
    instruction: str | None = Field(None, description="What relevance means, for models that take an instruction.")

    def raw(self) -> EmbedRequest:
        """The request without its wire format and its pairs."""
        params = [f"documents[{at}]" for at in range(len(self.documents))]
        return EmbedRequest(texts=(), params=params, instruction=self.instruction, **self.common())

    def pairs(self) -> Sequence[tuple[str, str]]:
        """The query with each document. Raises ApiError."""
        if not self.query or not self.documents:
            name = "documents" if self.query else "query"
            raise bad_request(f"{name} is empty; send at least one text", name)
        if self.top_n is not None and self.top_n < 1:
            raise bad_request(f"top_n is {self.top_n}; it must be at least 1", "top_n")
        return [(self.query, one if isinstance(one, str) else one.text) for one in self.documents]


class ScoreRequest(_TextBody):
    """Body of POST /score: one text against one or many, or two lists of equal length."""

    text_1: TextOr[Texts]
    text_2: TextOr[Texts]
    instruction: str | None = Field(None, description="What relevance means, for models that take an instruction.")

    def raw(self) -> EmbedRequest:
        """The request without its wire format and its pairs."""
        params = [f"text_2[{at}]" for at in range(len(self.pairs()))]
        return EmbedRequest(texts=(), params=params, instruction=self.instruction, **self.common())

    def pairs(self) -> Sequence[tuple[str, str]]:
        """Raises ApiError."""
        ones, others = ([given] if isinstance(given, str) else given for given in (self.text_1, self.text_2))
        ones = ones * len(others) if len(ones) == 1 else ones
        if not ones or len(ones) != len(others):
            message = f"text_1 has {len(ones)} texts and text_2 has {len(others)}; send as many, or one text_1"
            raise bad_request(message, "text_2")
        return list(zip(ones, others, strict=True))
