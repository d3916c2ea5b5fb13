"""The OpenAI wire format of requests: names and types.

Values and limits are checked in validate.py. Must not know HTTP, answers or who generates.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag

from gateway.errors import bad_request
from gateway.validate import MAX_STOP_STRINGS, MAX_TEMPERATURE, Chat, RawRequest

MAX_MESSAGES = 4096


def _kind(value: object) -> str:
    """Which member of a union a value is meant as. The tags start with "~" so that error paths can leave them out."""
    if not isinstance(value, list):
        return "~one"
    first = value[0] if value else None
    return "~texts" if isinstance(first, str) else "~id_lists" if isinstance(first, list) else "~list"


def _one_or_list(value: object) -> str:
    return "~list" if isinstance(value, list) else "~one"


class _FirstErrorOnly(FailFast):
    """A list of a million wrong elements makes one error. Hashable, which members of unions must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


_Ids = Annotated[list[int], _FirstErrorOnly()]
_Texts = Annotated[list[str], _FirstErrorOnly()]
_TextOrTexts = Annotated[Annotated[str, Tag("~one")] | Annotated[_Texts, Tag("~list")], Discriminator(_one_or_list)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


_Parts = Annotated[list[TextPart], _FirstErrorOnly()]


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("~one")] | Annotated[_Parts, Tag("~list")],
        Discriminator(_one_or_list),
    ]
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": text} | {
            name: value for name, value in given.items() if value is not None
        }


class StreamOptions(_Body):
    """How an answer is streamed."""

    include_usage: bool | None = Field(None, description="Send a last chunk with token counts and no choices.")


class _GenerationBody(_Body):
    """What chat and plain completions have in common; null means not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    temperature: float | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_TEMPERATURE})
    top_p: float | None = Field(None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    top_k: int | None = Field(None, description="0 keeps all tokens.", json_schema_extra={"minimum": 0})
    min_p: float | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 1})
    seed: int | None = Field(None, json_schema_extra={"minimum": -(2**63), "maximum": 2**64 - 1})
    stop: _TextOrTexts | None = Field(None, json_schema_extra={"maxItems": MAX_STOP_STRINGS, "minLength": 1})
    stop_token_ids: _Ids | None = None
    ignore_eos: bool | None = None

    def check_stream_options(self) -> None:
        """`stream_options` makes sense with `stream` only."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")

    @property
    def is_usage_streamed(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _common(self) -> dict[str, Any]:
        names = ("model", "temperature", "top_p", "top_k", "min_p", "seed")
        stop = self.stop if self.stop is not None else []
        return {name: getattr(self, name) for name in names} | {
            "stop": [stop] if isinstance(stop, str) else stop,
            "stop_token_ids": self.stop_token_ids or [],
            "ignore_eos": bool(self.ignore_eos),
        }


class ChatCompletionRequest(_GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], _FirstErrorOnly()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})

    def raw(self) -> RawRequest:
        """The request without its wire format."""
        max_tokens, param = self.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, param = self.max_tokens, "max_tokens"
        elif self.max_tokens not in (None, max_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        prompt = Chat([message.plain() for message in self.messages])
        return RawRequest(
            prompt=prompt, prompt_param="messages", max_tokens=max_tokens, max_tokens_param=param, **self._common()
        )


class CompletionRequest(_GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("~one")]
        | Annotated[_Ids, Tag("~list")]
        | Annotated[_Texts, Tag("~texts")]
        | Annotated[list[_Ids], _FirstErrorOnly(), Tag("~id_lists")],
        Discriminator(_kind),
    ] = Field(description="A text or its token ids, or a list that holds exactly one such.")

    def raw(self) -> RawRequest:
        """The request without its wire format."""
        prompt = self._one_prompt()
        return RawRequest(prompt=prompt, prompt_param="prompt", max_tokens=self.max_tokens, **self._common())

    def _one_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, str):
            return self.prompt
        ids_or_prompts: list[Any] = list(self.prompt)
        if not ids_or_prompts or isinstance(ids_or_prompts[0], int):
            return ids_or_prompts
        if len(ids_or_prompts) > 1:
            raise bad_request(f"prompt holds {len(ids_or_prompts)} prompts; send one request for each", "prompt")
        first: str | list[int] = ids_or_prompts[0]
        return first
