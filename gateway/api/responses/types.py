"""Request bodies of OpenAI's Responses API."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from gateway.api.http.body import (
    CACHE_SALT_FIELD,
    MAX_REASONING_FIELD,
    SEED_FIELD,
    SESSION_FIELD,
    USER_FIELD,
    Body,
    Ignored,
    Many,
    OrderFields,
    TextOr,
    Texts,
    WordOr,
    any_value,
    given_sampling,
    joined,
    needs_store,
    only_null,
    warned,
    with_sampling,
)
from gateway.api.openai.chat_types import STRICT
from gateway.api.responses.item_types import (
    AnyChoice,
    CalledByName,
    CallOutput,
    CustomCallItem,
    InputMessage,
    Items,
    ReasoningItem,
    ResponsesTool,
    flat_name,
    flat_tools,
    raw_choice,
)
from gateway.errors import bad_request
from gateway.request.types import AnswerForm, Chat, GenerateRequest, Prompt
from gateway.tools.history import read_arguments, template_call
from gateway.tools.json_text import JsonTexts
from gateway.tools.request import MAX_TOOLS, Choice, RawTools
from gateway.tools.template_options import effort_options
from runtime.peer_input import MAX_LOGPROBS


class TextFormat(Body):
    """The form that the text must match."""

    ignored = {}

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Not used.")
    description: str | None = Field(None, description="Not used.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description=STRICT)

    def form(self) -> AnswerForm | None:
        """None: any text. Raises ApiError if type and schema do not match."""
        path = "text.format.schema"
        if (self.type == "json_schema") != (self.schema_ is not None):
            verb = "is missing, which the type json_schema needs" if self.schema_ is None else "needs that type"
            raise bad_request(f"{path} {verb}", path, "missing_field" if self.schema_ is None else "invalid_value")
        if self.type == "json_schema":
            return AnswerForm("json_schema", self.schema_, path, bool(self.strict))
        return None if self.type == "text" else AnswerForm("json_object", None, "text.format")


class TextConfig(Body):
    """How text is written."""

    ignored = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class Reasoning(Body):
    """How the model reasons before it answers."""

    ignored = {"generate_summary": (), "summary": ("auto", "concise", "detailed")}  # answers contain all reasoning

    effort: str | None = Field(None, description="none switches reasoning off, other levels on.")


_LOGPROBS = "message.output_text.logprobs"


class CountInputRequest(Body):
    """Body of POST /v1/responses/input_tokens; null means not given."""

    ignored: ClassVar[Ignored] = {
        **only_null("conversation", instead="go on with an answer by previous_response_id"),
        "truncation": ("disabled",),
    }

    _root: str = PrivateAttr("")  # id of the conversation's first answer, where it goes on from a stored one

    model: str
    previous_response_id: str | None = Field(
        None, description="A stored answer: its conversation, and then it, come before the input."
    )
    input: TextOr[Items]
    instructions: str | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Many[ResponsesTool] | None = Field(None, json_schema_extra={"maxItems": MAX_TOOLS})
    tool_choice: WordOr[Choice, AnyChoice] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may call several functions.")

    def raw(self) -> GenerateRequest:
        """The request without its wire format. Raises ApiError."""
        items = () if isinstance(self.input, str) else self.input
        results = [f"input[{at}].call_id" for at, item in enumerate(items) if isinstance(item, CallOutput)]
        effort = self.reasoning.effort if self.reasoning else None
        options = {} if effort is None else effort_options(effort, "reasoning.effort")
        wishes = {} if effort in (None, "none") else {"reasoning.effort": ""}
        tools = RawTools(
            [tool for tool, _ in flat_tools(self.tools or (), "tools")],
            choice=raw_choice(self.tool_choice),
            is_parallel=self.parallel_tool_calls,
        )
        prompt = Prompt(Chat(self._messages(), results, "input", options, wishes=wishes), "input")
        return GenerateRequest(self.model, [prompt], "input", tools=tools, warnings=tuple(self.warnings()))

    def continue_from(self, root: str) -> None:
        """Notes the first answer of the stored conversation that this request continues."""
        self._root = root

    def check_stateless(self) -> None:
        """Raises ApiError if it has a field that only a store of answers can satisfy."""
        for name in ("store", "background", "previous_response_id"):
            if getattr(self, name, None):
                raise needs_store(name)

    def called(self) -> CalledByName:
        """The client's names of the tools that the model sees."""
        return {tool.name: called for tool, called in flat_tools(self.tools or (), "tools")}

    def _messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: calls and reasoning belong to an assistant's message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        texts = JsonTexts()
        reasoning: dict[str, str] = {}  # for the assistant's next message
        for index, item in enumerate(self.input):
            if isinstance(item, InputMessage):
                said = {"role": item.role, "content": joined(item.content, f"input[{index}].content")}
                messages.append(said | reasoning if item.role == "assistant" else said)
            elif isinstance(item, CallOutput):
                result = joined(item.output, f"input[{index}].output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": result})
            elif isinstance(item, ReasoningItem):
                reasoning = {"reasoning_content": "".join(part.text for part in item.content or item.summary or ())}
                continue
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": "", **reasoning})
                calls = messages[-1].setdefault("tool_calls", [])
                if isinstance(item, CustomCallItem):
                    arguments: dict[str, Any] = {"input": item.input}
                else:
                    arguments = read_arguments(item.arguments, f"input[{index}].arguments", texts)
                calls.append(template_call(item.call_id, flat_name(item.name, item.namespace), arguments))
            reasoning = {}
        return messages


@with_sampling
class _SampledInput(CountInputRequest):
    max_output_tokens: int | None = Field(None, json_schema_extra={"minimum": 1})
    max_reasoning_tokens: int | None = MAX_REASONING_FIELD


class ResponsesRequest(_SampledInput, OrderFields):
    """Body of POST /v1/responses; null means not given."""

    ignored = {
        **CountInputRequest.ignored,
        **any_value("safety_identifier"),
        **only_null("context_management", "image", "max_tool_calls", "moderation", "prompt"),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        **warned("prompt_cache_options", "prompt_cache_retention", "client_metadata"),
    }

    store: bool | None = Field(None, description="Keep the answer; where a store is configured, true if not given.")
    background: bool | None = Field(
        None, description="Answer at once with the id; GET it while and after it is computed."
    )
    seed: int | None = SEED_FIELD
    include: Texts | None = Field(None, description=f"{_LOGPROBS}; what else OpenAI names, answers here do not have.")
    top_logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
    stream: bool | None = None
    metadata: dict[str, str] | None = Field(None, description="Comes back with the answer.")
    cache_salt: str | None = CACHE_SALT_FIELD
    user: str | None = USER_FIELD
    prompt_cache_key: str | None = SESSION_FIELD

    def raw(self) -> GenerateRequest:
        has_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not has_logprobs:
            raise bad_request(f"top_logprobs needs {_LOGPROBS} in include", "top_logprobs")
        return replace(
            super().raw(),
            max_tokens=self.max_output_tokens,
            max_tokens_param="max_output_tokens",
            max_reasoning_tokens=self.max_reasoning_tokens,
            num_logprobs=(self.top_logprobs or 0) if has_logprobs else None,
            logprobs_param="top_logprobs",
            sampling=given_sampling(self),
            cache_salt=self.cache_salt or "",
            **self.order(),
            session=self._root or self.prompt_cache_key or "",
            form=self.text.format.form() if self.text and self.text.format else None,
        )
