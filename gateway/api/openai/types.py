"""Request bodies of OpenAI's chats and completions: names and types. gateway/request checks values."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from gateway.api.http.body import (
    CACHE_SALT_FIELD,
    Body,
    FirstErrorOnly,
    Ids,
    TextOr,
    Texts,
    any_value,
    given_sampling,
    joined,
    only_null,
    sampling_field,
)
from gateway.api.openai.forms import ResponseFormat, StructuredOutputs, pick_form
from gateway.api.openai.tool_types import TOOLS_FIELD, MessageToolCalls, ToolChoice, Tools, raw_tools
from gateway.errors import bad_request
from gateway.request.left_out import FIELDS, Ignored
from gateway.request.rules import MAX_BIAS, MAX_BIASED_TOKENS, MAX_CHOICES, MAX_MESSAGES, MAX_STOP_STRINGS
from gateway.request.types import Chat, GenerateRequest, Prompt
from gateway.tools.template_options import Option, check_options, effort_options
from runtime.peer_input import MAX_LOGPROBS
from wire.sampling import MAX_DRAFT_TOKENS


def _kind(value: object) -> str:
    if not isinstance(value, list):
        return "~one"
    first = value[0] if value else None
    return "~texts" if isinstance(first, str) else "~id_lists" if isinstance(first, list) else "~list"


def _few_biases(value: object) -> object:
    """Refuses a large dict before pydantic checks it, which would make one error per entry."""
    if isinstance(value, dict) and len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"{len(value)} entries; at most {MAX_BIASED_TOKENS} are allowed")
    return value


def _token_id(key: str) -> str:
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key):
        raise ValueError("keys must be token ids in decimal digits")
    return key


_Biases = Annotated[dict[Annotated[str, AfterValidator(_token_id)], float], BeforeValidator(_few_biases)]


class TextPart(Body):
    """A part of a message."""

    ignored = {}
    types, types_rule = ("text",), "this service takes text only"

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    ignored = {
        **only_null("function_call", "refusal", "audio"),
        **any_value("provider_specific_fields"),  # where litellm keeps fields of answers that it does not know
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[Annotated[list[TextPart], FirstErrorOnly()]]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: MessageToolCalls | None = None
    reasoning_content: str | None = Field(None, description="For templates that show earlier reasoning.")

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_text(cls, given: Any) -> Any:
        has_calls_only = isinstance(given, dict) and given.get("content") is None and given.get("tool_calls")
        return {**given, "content": ""} if has_calls_only else given

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        calls = [call.plain() for call in self.tool_calls or ()]
        given: dict[str, Any] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
            "reasoning_content": self.reasoning_content,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return {"role": self.role, "content": joined(self.content), **given}


class TemplateFields(Body):
    """Fields of a chat for the chat template, besides messages and tools."""

    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    reasoning_effort: str | None = Field(None, description="none switches reasoning off, other levels on.")
    add_generation_prompt: bool | None = Field(None, description="End with where the answer begins; true by default.")
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message's text.")

    def options(self) -> dict[str, Option]:
        """Variables for the template; the client's own override those of the effort. Raises ApiError."""
        given = check_options(self.chat_template_kwargs or {}, "chat_template_kwargs")
        effort = {} if self.reasoning_effort is None else effort_options(self.reasoning_effort, "reasoning_effort")
        return {**effort, **given}


def chat_prompt(messages: Sequence[Message], options: TemplateFields) -> Prompt:
    """The conversation, without its wire format. Raises ApiError."""
    results = [f"messages[{index}].tool_call_id" for index, message in enumerate(messages) if message.role == "tool"]
    chat = Chat(
        [message.plain() for message in messages],
        results,
        options=options.options(),
        wishes={"reasoning_effort": ""} if options.reasoning_effort not in (None, "none") else {},
        add_generation_prompt=options.add_generation_prompt is not False,
        is_open=bool(options.continue_final_message),
    )
    if chat.is_open and options.add_generation_prompt:
        raise bad_request("continue_final_message needs add_generation_prompt to be false", "add_generation_prompt")
    return Prompt(chat, "messages")


StreamedUsage = Literal["none", "last", "continuous"]


class StreamOptions(Body):
    """How an answer is streamed."""

    ignored = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="Send a last chunk with token counts and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: counts so far in each chunk.")


_IGNORED: Ignored = {
    **any_value("user", "metadata", "safety_identifier"),
    "best_of": (1,),
    "priority": (0,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "store": (False,),
}


class _GenerationBody(Body):
    """Fields that chats and plain completions share; null means not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, json_schema_extra={"minimum": 1, "maximum": MAX_CHOICES})
    max_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    min_tokens: int | None = Field(None, json_schema_extra={"minimum": 0})
    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = Field(None, description="0 and -1 keep all tokens.", json_schema_extra={"minimum": -1})
    min_p: float | None = sampling_field("min_p")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    logit_bias: _Biases | None = Field(
        None, description=f"Token id to what is added to its logit, from {-MAX_BIAS:g} to {MAX_BIAS:g}."
    )
    seed: int | None = Field(None, json_schema_extra={"minimum": -(2**63), "maximum": 2**64 - 1})
    stop: TextOr[Texts] | None = Field(None, json_schema_extra={"maxItems": MAX_STOP_STRINGS, "minLength": 1})
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Literal["auto", "off", "ngram", "draft"] | None = None
    max_draft_tokens: int | None = Field(None, json_schema_extra={"minimum": 1, "maximum": MAX_DRAFT_TOKENS})
    cache_salt: str | None = CACHE_SALT_FIELD
    include_timing: bool | None = Field(None, description="Report where each choice's time went.")
    return_token_ids: bool | None = Field(None, description="Report token ids of prompt and answer.")
    prompt_logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})

    @property
    def streamed_usage(self) -> StreamedUsage:
        """Which token counts a stream has."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "continuous" if options.continuous_usage_stats else "last"

    def _common(self) -> dict[str, Any]:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        stop = self.stop if self.stop is not None else []
        return {
            "model": self.model,
            "n": self.n,
            "min_tokens": self.min_tokens,
            "sampling": given_sampling(self),
            "stop": [stop] if isinstance(stop, str) else stop,
            "stop_token_ids": self.stop_token_ids or [],
            "ignore_eos": bool(self.ignore_eos),
            "logit_bias": {int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
            "form": pick_form(self.response_format, self.structured_outputs),
            "speculation": self.speculation,
            "max_draft_tokens": self.max_draft_tokens,
            "with_timing": bool(self.include_timing),
            "with_token_ids": bool(self.return_token_ids),
            "num_prompt_logprobs": self.prompt_logprobs,
            "cache_salt": self.cache_salt or "",
            "warnings": tuple(self.warnings()),
        }


class ChatCompletionRequest(_GenerationBody, TemplateFields):
    """Body of POST /v1/chat/completions."""

    ignored = {
        **_IGNORED,
        **only_null("audio", "prediction", "web_search_options", "moderation"),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "verbosity": ("medium",),
    }
    left_out = FIELDS["chat"]

    messages: Annotated[list[Message], FirstErrorOnly()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    tools: Tools | None = TOOLS_FIELD
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may call several functions.")

    def raw(self) -> GenerateRequest:
        """The request without its wire format."""
        max_tokens, param = self.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, param = self.max_tokens, "max_tokens"
        elif self.max_tokens not in (None, max_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return GenerateRequest(
            prompts=[chat_prompt(self.messages, self)],
            prompts_param="messages",
            max_tokens=max_tokens,
            max_tokens_param=param,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_param="top_logprobs",
            tools=raw_tools(self.tools, self.tool_choice, self.parallel_tool_calls),
            **self._common(),
        )


class CompletionRequest(_GenerationBody):
    """Body of POST /v1/completions."""

    ignored = _IGNORED
    left_out = FIELDS["completions"]

    prompt: Annotated[
        Annotated[str, Tag("~one")]
        | Annotated[Ids, Tag("~list")]
        | Annotated[Texts, Tag("~texts")]
        | Annotated[list[Ids], FirstErrorOnly(), Tag("~id_lists")],
        Discriminator(_kind),
    ] = Field(description="A text or its token ids, or a list of such.")
    echo: bool | None = Field(None, description="Begin each answer with its prompt; max_tokens may then be 0.")
    logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})

    def raw(self) -> GenerateRequest:
        """The request without its wire format."""
        return GenerateRequest(
            prompts=self._prompts(),
            max_tokens=self.max_tokens,
            num_logprobs=self.logprobs,
            is_echoed=bool(self.echo),
            **self._common(),
        )

    def _prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [Prompt(self.prompt, "prompt")]
        ids_or_prompts: list[Any] = list(self.prompt)
        if ids_or_prompts and isinstance(ids_or_prompts[0], int):
            return [Prompt(ids_or_prompts, "prompt")]
        return [Prompt(prompt, f"prompt[{index}]") for index, prompt in enumerate(ids_or_prompts)]
