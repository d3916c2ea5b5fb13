"""Request bodies of OpenAI's chats and completions, and of vLLM's /tokenize and /detokenize."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from gateway.api.http.body import (
    CACHE_SALT_FIELD,
    MAX_REASONING_FIELD,
    SEED_FIELD,
    SESSION_FIELD,
    USER_FIELD,
    Body,
    Ids,
    Ignored,
    Many,
    OrderFields,
    TextOr,
    Texts,
    any_value,
    check_metadata,
    given_sampling,
    only_null,
    warned,
    with_sampling,
)
from gateway.api.openai.chat_types import (
    TOOLS_FIELD,
    Message,
    ResponseFormat,
    StructuredOutputs,
    TemplateFields,
    ToolChoice,
    Tools,
    raw_tools,
)
from gateway.errors import bad_request
from gateway.request.rules import MAX_BIAS, MAX_BIASED_TOKENS, MAX_CHOICES, MAX_MESSAGES, MAX_STOP_STRINGS
from gateway.request.types import GenerateRequest, Prompt
from runtime.peer_input import MAX_LOGPROBS
from wire.names import Speculate
from wire.sampling import MAX_DRAFT_TOKENS

_TO_THE_END = "max_tokens is not given: an answer may take the rest of the context; 16 is what OpenAI's API would take"
_IGNORED: Ignored = {
    **any_value("safety_identifier"),
    "best_of": (1,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
}
# fields that GenerateRequest has under the same name
_SAME = ("model", "n", "min_tokens", "stop_token_ids", "ignore_eos", "speculation", "max_draft_tokens", "cache_salt")


def _few_biases(value: object) -> object:
    """Refuses a large dict before pydantic checks it, which would make one error per entry."""
    if isinstance(value, dict) and len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"{len(value)} entries; at most {MAX_BIASED_TOKENS} are allowed")
    return value


def _token_id(key: str) -> str:
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key):
        raise ValueError("keys must be token ids in decimal digits")
    return key


class StreamOptions(Body):
    """How an answer is streamed."""

    ignored = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="Send a last chunk with token counts and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: counts so far in each chunk.")


StreamedUsage = Literal["none", "last", "continuous"]


@with_sampling
class _SampledBody(Body):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, json_schema_extra={"minimum": 1, "maximum": MAX_CHOICES})
    max_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    min_tokens: int | None = Field(None, json_schema_extra={"minimum": 0})


class _GenerationBody(_SampledBody, OrderFields):
    """Fields that chats and plain completions share; null means not given."""

    logit_bias: (
        Annotated[dict[Annotated[str, AfterValidator(_token_id)], float], BeforeValidator(_few_biases)] | None
    ) = Field(None, description=f"Token id to what is added to its logit, from {-MAX_BIAS:g} to {MAX_BIAS:g}.")
    seed: int | None = SEED_FIELD
    stop: TextOr[Texts] | None = Field(None, json_schema_extra={"maxItems": MAX_STOP_STRINGS, "minLength": 1})
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Speculate | None = None
    max_draft_tokens: int | None = Field(None, json_schema_extra={"minimum": 1, "maximum": MAX_DRAFT_TOKENS})
    cache_salt: str | None = CACHE_SALT_FIELD
    user: str | None = USER_FIELD
    prompt_cache_key: str | None = SESSION_FIELD
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
        """Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs come with whole answers only; set stream to false", "prompt_logprobs")
        stop = self.stop if self.stop is not None else []
        form = self.response_format.form() if self.response_format else None
        if self.structured_outputs is not None:
            if form is not None:
                why = "structured_outputs and response_format are both given; drop one"
                raise bad_request(why, "structured_outputs")
            form = self.structured_outputs.form()
        return {
            **{name: value for name in _SAME if (value := getattr(self, name)) is not None},
            **self.order(),
            "session": self.prompt_cache_key or "",
            "sampling": given_sampling(self),
            "stop": [stop] if isinstance(stop, str) else stop,
            "logit_bias": {int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
            "form": form,
            "with_timing": bool(self.include_timing),
            "with_token_ids": bool(self.return_token_ids),
            "num_prompt_logprobs": self.prompt_logprobs,
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
        **warned("prompt_cache_options", "prompt_cache_retention"),
    }

    messages: Many[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    tools: Tools | None = TOOLS_FIELD
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may call several functions.")
    max_reasoning_tokens: int | None = MAX_REASONING_FIELD
    store: bool | None = Field(None, description="Keep the answer; false if not given.")
    metadata: dict[str, Any] | None = Field(None, description="Of an answer that is kept: up to 16 texts.")

    def check_stored(self) -> None:
        """Raises ApiError if it cannot be kept as it is."""
        check_metadata(self.metadata or {})
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            why = "continuous_usage_stats depend on when tokens arrive, which cannot be repeated; drop it, or store"
            raise bad_request(why, "stream_options.continuous_usage_stats", "unsupported_field")

    def raw(self) -> GenerateRequest:
        """The request without its wire format. Raises ApiError."""
        max_tokens, param = self.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, param = self.max_tokens, "max_tokens"
        elif self.max_tokens not in (None, max_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return GenerateRequest(
            prompts=[self.chat_prompt(self.messages)],
            prompts_param="messages",
            max_reasoning_tokens=self.max_reasoning_tokens,
            max_tokens=max_tokens,
            max_tokens_param=param,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_param="top_logprobs",
            tools=raw_tools(self.tools, self.tool_choice, self.parallel_tool_calls),
            **self._common(),
        )


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list):
        return "~one"
    first = value[0] if value else None
    return "~texts" if isinstance(first, str) else "~id_lists" if isinstance(first, list) else "~list"


TextsOrIds = Annotated[  # a text or its token ids, or a list of such
    Annotated[str, Tag("~one")]
    | Annotated[Ids, Tag("~list")]
    | Annotated[Texts, Tag("~texts")]
    | Annotated[Many[Ids], Tag("~id_lists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(_GenerationBody):
    """Body of POST /v1/completions."""

    ignored = {
        **_IGNORED,
        **any_value("metadata"),
        "store": (False,),
        **warned("prompt_cache_retention"),
    }
    takes_ids = True

    prompt: TextsOrIds = Field(description="A text or its token ids, or a list of such.")
    echo: bool | None = Field(None, description="Begin each answer with its prompt; max_tokens may then be 0.")
    logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})

    def warnings(self, path: str = "") -> Iterator[str]:
        yield from super().warnings(path)
        if self.max_tokens is None:
            yield _TO_THE_END

    def raw(self) -> GenerateRequest:
        """The request without its wire format. Raises ApiError."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            prompts = [Prompt(given, "prompt")]
        else:
            prompts = [Prompt(prompt, f"prompt[{index}]") for index, prompt in enumerate(given)]
        return GenerateRequest(
            prompts=prompts,
            max_tokens=self.max_tokens,
            num_logprobs=self.logprobs,
            is_echoed=bool(self.echo),
            **self._common(),
        )


class TokenizeRequest(TemplateFields):
    """Body of POST /tokenize: a prompt or messages."""

    ignored = {"chat_template": (), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
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
            prompt = self.chat_prompt(self.messages)
        else:
            for name in ("tools", *TemplateFields.model_fields):
                if getattr(self, name):
                    raise bad_request(f"{name} is for messages; leave it out or send them instead of a prompt", name)
            prompt = Prompt(self.prompt or "", "prompt")
        tools = raw_tools(self.tools, None, None)
        return GenerateRequest(self.model, [prompt], tools=tools, add_special_tokens=self.add_special_tokens)


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    ignored = {}
    takes_ids = True

    model: str | None = None
    tokens: Ids
