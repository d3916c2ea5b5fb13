"""Request bodies of Ollama's API."""

import binascii
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from gateway.api.http.body import (
    SEED_FIELD,
    Body,
    Many,
    TextOr,
    Texts,
    WarningBody,
    WordOr,
    any_value,
    given_sampling,
    only_null,
    sampling_field,
    warned,
)
from gateway.api.openai.chat_types import TOOLS_FIELD, Tools, raw_tools
from gateway.embeddings.embed import MAX_TEXTS, EmbedRequest
from gateway.errors import bad_request
from gateway.images.parts import ImagePart
from gateway.request.rules import MAX_MESSAGES, MAX_STOP_STRINGS
from gateway.request.types import AnswerForm, Chat, GenerateRequest, Prompt
from gateway.tools.history import check_arguments, join_parts, template_call
from gateway.tools.template_options import effort_options, switch_options
from runtime.peer_input import MAX_LOGPROBS
from wire.image_formats import TAKEN, find_type

_HEAD_CHARS = 64  # of an image in base64: its first bytes say its type
_RANDOM_SEED = -1
_NO_LIMITS = (-1, -2)  # values of num_predict: endless, and to the end of the context


class Options(WarningBody):
    """How to sample, and how long."""

    ignored = {
        **any_value(  # how a model is loaded, which was decided when the service started
            "draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch",
            "num_gpu", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
        ),
        "typical_p": (1,),
        **warned(  # the last five are those that Ollama's own service no longer reads
            "num_ctx", "num_keep", "repeat_last_n", "mirostat", "mirostat_eta", "mirostat_tau", "penalize_newline",
            "tfs_z",
        ),
    }  # fmt: skip

    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    repetition_penalty: float | None = Field(
        None, alias="repeat_penalty", gt=0, le=2, description="Over all tokens of prompt and answer."
    )
    seed: int | None = SEED_FIELD
    num_predict: int | None = Field(None, description="Most tokens of the answer; -1 and -2: the rest of the context.")
    stop: TextOr[Texts] | None = Field(None, json_schema_extra={"maxItems": MAX_STOP_STRINGS, "minLength": 1})

    def fields(self) -> dict[str, Any]:
        """Fields of GenerateRequest that the options set."""
        sampling, stop = given_sampling(self), self.stop or ()
        if self.seed == _RANDOM_SEED:
            del sampling["seed"]
        return {
            "sampling": sampling,
            "stop": [stop] if isinstance(stop, str) else stop,
            "stop_param": "options.stop",
            "max_tokens": None if self.num_predict in _NO_LIMITS else self.num_predict,
            "max_tokens_param": "options.num_predict",
            "is_max_tokens_clamped": True,
        }


class _AskedBody(WarningBody):
    """Fields that chats and plain prompts share; null means not given."""

    model: str
    stream: bool | None = Field(None, description="true if not given.")
    options: Options | None = None
    format: WordOr[Literal["", "json"], dict[str, Any]] | None = Field(
        None, description='What the answer must match: "json", or a JSON schema.'
    )
    think: WordOr[Literal["low", "medium", "high", "max"], bool] | None = Field(
        None, description="Whether the model reasons, or how much; if not given, as its template has it."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})

    def _common(self) -> dict[str, Any]:
        """Fields of GenerateRequest. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        form = None
        if self.format == "json":
            form = AnswerForm("json_object", None, "format")
        elif self.format:
            form = AnswerForm("json_schema", self.format, "format", is_strict=False)
        return {
            **(self.options.fields() if self.options else {}),
            "form": form,
            "num_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "logprobs_param": "top_logprobs",
            "warnings": tuple(self.warnings()),
        }

    def _chat(self, messages: Sequence[Mapping[str, Any]], context: Sequence[int] = ()) -> Chat:
        """Raises ApiError."""
        think, options, wishes = self.think, {}, {}
        if isinstance(think, str):
            options, wishes = {**effort_options(think, "think")}, {"think": "reasoning_effort"}
        elif think is not None:
            options = {**switch_options(think)}
        return Chat(
            messages,
            options=options,
            reasoning_param="think" if think else None,
            wishes=wishes,
            is_open=bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            context=context,
        )


class CalledFunction(Body):
    """The called function and its arguments."""

    ignored = any_value("index")

    name: str = Field(min_length=1)
    arguments: dict[str, Any]


class MessageCall(Body):
    """A call in an assistant's message."""

    ignored = {"type": ("function",)}

    id: str | None = Field(None, min_length=1)
    function: CalledFunction


class _OpenCalls:
    """Calls that wait for results. Without an id, a result is that of the first of its name, or of the first."""

    def __init__(self) -> None:
        self._ids: dict[str, deque[str]] = defaultdict(deque)  # by name; "": of any
        self._answered = set[str]()

    def add(self, call_id: str, name: str) -> None:
        self._ids[name].append(call_id)
        self._ids[""].append(call_id)

    def take(self, name: str | None) -> str | None:
        """The id of the call that has a result now. None: none is open."""
        waiting = self._ids[name or ""]
        while waiting and waiting[0] in self._answered:
            waiting.popleft()
        if not waiting:
            return None
        self._answered.add(waiting[0])
        return waiting.popleft()


class ChatMessage(Body):
    """One message of a conversation."""

    ignored = {}

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Texts | None = Field(None, description="Files in base64.")
    tool_calls: Many[MessageCall] | None = None
    tool_name: str | None = Field(None, description="Whose result this is.")
    tool_call_id: str | None = Field(None, description="The same, by the call's id.")

    def plain(self, path: str, waiting: _OpenCalls) -> dict[str, Any]:
        """The message for chat templates. `waiting`: of the messages before it, then also of it. Raises ApiError."""
        calls = []
        for rank, call in enumerate(self.tool_calls or ()):
            arguments = check_arguments(call.function.arguments, f"{path}.tool_calls[{rank}].function.arguments")
            calls.append(template_call(call.id or f"{path} {rank}", call.function.name, arguments))
            waiting.add(calls[-1]["id"], call.function.name)
        given = {
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id or (waiting.take(self.tool_name) if self.role == "tool" else None),
            "tool_calls": calls or None,
            "reasoning_content": self.thinking or None,
        }
        images = read_images(self.images, path)
        content = join_parts([*images, *([self.content] if self.content else [])])
        return {"role": self.role, "content": content, **{name: value for name, value in given.items() if value}}


class ChatRequest(_AskedBody):
    """Body of POST /api/chat. Without messages it asks whether the model is there."""

    ignored = {**any_value("shift", "truncate"), **warned("keep_alive"), "_debug_render_only": (False,)}

    messages: Many[ChatMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: Tools | None = TOOLS_FIELD

    def raw(self, name: str) -> GenerateRequest:
        """The request without its wire format. `name`: of the model. Raises ApiError."""
        waiting = _OpenCalls()
        plain = [one.plain(f"messages[{index}]", waiting) for index, one in enumerate(self.messages or ())]
        return GenerateRequest(
            name,
            [Prompt(self._chat(plain), "messages")],
            "messages",
            tools=raw_tools(self.tools, None, None),
            **self._common(),
        )


class PlainRequest(_AskedBody):
    """Body of POST /api/generate. Without a prompt it asks whether the model is there."""

    ignored = {
        **ChatRequest.ignored,
        **only_null("width", "height", "steps", instead="this service makes no images"),
        "suffix": ("",),
        "template": ("",),
    }
    takes_ids = True

    prompt: str | None = None
    system: str | None = None
    images: Texts | None = Field(None, description="Files in base64.")
    is_raw: bool | None = Field(None, alias="raw", description="The prompt is taken as it is, without a template.")
    context: Many[int] | None = Field(None, description="That of an answer, which this one follows.")

    def raw(self, name: str, *, has_template: bool) -> GenerateRequest:
        """The request without its wire format. `name`: of the model. Raises ApiError."""
        prompt, images, context = self.prompt or "", read_images(self.images, ""), self.context or ()
        content: str | Chat = prompt
        if self.is_raw and (self.system or context or images):
            raise bad_request("raw takes the prompt alone, without system, context and images; drop one", "raw")
        if not self.is_raw and (has_template or self.system or context or images):
            user = {"role": "user", "content": join_parts([*images, prompt])}
            system = [{"role": "system", "content": self.system}] if self.system else []
            content = self._chat([*system, user], context)
        return GenerateRequest(name, [Prompt(content, "prompt")], **self._common())


class ShowRequest(Body):
    """Body of POST /api/show."""

    ignored = any_value("verbose", "system", "template", "options")

    model: str | None = None
    name: str | None = Field(None, description="What older clients call it.")


class EmbedBody(WarningBody):
    """Body of POST /api/embed. Without texts it asks whether the model is there."""

    ignored = {**any_value("options"), **warned("keep_alive")}

    model: str
    input: TextOr[Texts] | None = Field(None, description=f"A text, or up to {MAX_TEXTS}.")
    truncate: bool | None = Field(None, description="Cut texts that are too long; true if not given.")
    dimensions: int | None = Field(None, description="The first so many numbers of each vector (Matryoshka).")

    def raw(self, name: str) -> EmbedRequest:
        """The request without its wire format. `name`: of the model."""
        texts = [self.input] if isinstance(self.input, str) else self.input or []
        params = ["input"] if isinstance(self.input, str) else [f"input[{at}]" for at in range(len(texts))]
        truncate = None if self.truncate is False else -1
        return EmbedRequest(name, texts, params, dimensions=self.dimensions, truncate=truncate)


class OldEmbedBody(WarningBody):
    """Body of POST /api/embeddings, of older clients."""

    ignored = EmbedBody.ignored

    model: str
    prompt: str | None = None

    def raw(self, name: str) -> EmbedRequest:
        """The request without its wire format. `name`: of the model."""
        return EmbedRequest(name, [self.prompt] if self.prompt else [], ["prompt"] if self.prompt else [], truncate=-1)


def read_images(files: Sequence[str] | None, path: str) -> list[ImagePart]:
    """Images as their files in base64. `path`: of what has them. Raises ApiError."""
    found = []
    for index, file in enumerate(files or ()):
        param = f"{path}.images[{index}]".removeprefix(".")
        try:
            kind = find_type(binascii.a2b_base64(file[:_HEAD_CHARS]))
        except ValueError as error:
            raise bad_request(f"{param}: it is no base64: {str(error)[:80]}", param) from error
        if kind is None:
            raise bad_request(f"{param}: it is no image in base64; images are {TAKEN}", param)
        found.append(ImagePart(f"data:{kind};base64,{file}", param))
    return found
