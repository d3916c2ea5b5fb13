"""Bodies of /tokenize and /detokenize, as in vLLM: names and types. Must not know HTTP or how text becomes tokens."""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from gateway.api.http.body import Body, FirstErrorOnly, Ids
from gateway.api.openai.tool_types import TOOLS_FIELD, Tools, raw_tools
from gateway.api.openai.types import Message, TemplateFields, chat_prompt
from gateway.errors import bad_request
from gateway.request.rules import MAX_MESSAGES
from gateway.request.types import GenerateRequest, Prompt

_FOR_CHATS = ("tools", *TemplateFields.model_fields)


class TokenizeRequest(TemplateFields):
    """Body of POST /tokenize: a prompt or messages."""

    ignored = {"chat_template": (), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FirstErrorOnly()] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = Field(
        None, description="Begin with the start token; by default true for a prompt, false for messages."
    )
    return_token_strs: bool | None = Field(None, description="Report how the vocabulary writes each token.")
    tools: Tools | None = TOOLS_FIELD

    def raw(self) -> GenerateRequest:
        """The request without its wire format. Raises ApiError unless it has a prompt or messages, and not both."""
        if (self.prompt is None) == (self.messages is None):
            given = "neither prompt nor messages are" if self.prompt is None else "prompt and messages are both"
            raise bad_request(f"{given} given; send one of them", "prompt", "missing_field")
        if self.messages is not None:
            prompt = chat_prompt(self.messages, self)
        else:
            for name in _FOR_CHATS:
                if getattr(self, name):
                    raise bad_request(f"{name} is for messages; leave it out or send them instead of a prompt", name)
            prompt = Prompt(self.prompt or "", "prompt")
        tools = raw_tools(self.tools, None, None)
        return GenerateRequest(self.model, [prompt], tools=tools, add_special_tokens=self.add_special_tokens)


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    ignored = {}

    model: str | None = None
    tokens: Ids


class TokenizeAnswer(msgspec.Struct):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeAnswer(msgspec.Struct):
    """The text."""

    prompt: str
