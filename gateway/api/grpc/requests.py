"""Turns protobuf messages into raw requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from gateway.embeddings.embed import EmbedRequest
from gateway.errors import bad_request, check_count
from gateway.images.parts import ImagePart
from gateway.request.rules import MAX_MESSAGES
from gateway.request.types import AnswerForm, Chat, GenerateRequest, Prompt
from gateway.tools.history import join_parts, read_arguments, template_call
from gateway.tools.json_text import JsonTexts
from gateway.tools.request import MAX_TOOLS, MAX_TOOLS_BYTES, AllowedChoice, Choice, NamedChoice, RawTools, Tool
from gateway.tools.template_options import check_options
from protos import inference_pb2 as pb
from wire.sampling import SCALARS

_OPTIONAL_FIELDS = ("max_tokens", "min_tokens", "n", "speculation", "max_draft_tokens", "priority", "deadline_ms")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_CHOICES: Mapping[str, Choice | None] = {"": None, "none": "none", "auto": "auto", "required": "required"}
# Looking for unknown fields blocks the event loop: 1 us for each, which has at least 2 bytes.
_MAX_UNKNOWN_BYTES = 64 << 10
_MAX_SHOWN = 16


def check_known(request: Message) -> None:
    """Raises ApiError if a message has unknown fields, as newer clients may send: they would have no effect."""
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    num_unknown = request.ByteSize() - known.ByteSize()
    if num_unknown > _MAX_UNKNOWN_BYTES:
        why = f"{request.DESCRIPTOR.full_name} has {num_unknown} bytes in fields that are unknown here; leave them out"
        raise bad_request(why, None, "unknown_field")
    for path, message in _messages(request, "") if num_unknown else ():
        fields = UnknownFieldSet(message)
        numbers = sorted({fields[index].field_number for index in range(len(fields))})
        if numbers:
            why = f"{message.DESCRIPTOR.full_name} has fields that are unknown here, or of another type: "
            why += f"{', '.join(map(str, numbers[:_MAX_SHOWN]))}; leave them out"
            raise bad_request(why, f"{path}{numbers[0]}", "unknown_field")


def _messages(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """Yields (prefix of its field paths, message) for a message and all messages in it. Map entries contain none."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if isinstance(value, Message):
            yield from _messages(value, f"{path}{field.name}.")
        else:
            for index, each in enumerate(value):
                yield from _messages(each, f"{path}{field.name}[{index}].")


def generate_request(request: pb.GenerateRequest) -> GenerateRequest:
    """Raises ApiError if it has no prompt."""
    check_known(request)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise bad_request("the request has no prompt; set text or token_ids", "prompt", "missing_field")
    return _raw_request(request, Prompt(request.text if kind == "text" else tuple(request.token_ids.ids), kind))


def chat_request(request: pb.ChatRequest) -> GenerateRequest:
    """Raises ApiError if a message or a tool is invalid."""
    check_known(request)
    texts = JsonTexts()
    chat = _chat(request.messages, texts)
    options = check_options(
        read_arguments(request.chat_template_kwargs, "chat_template_kwargs", texts), "chat_template_kwargs"
    )
    chat = replace(chat, options=options, is_open=request.continue_final_message)
    tools = RawTools(
        _tools(request.tools, texts),
        _choice(request.tool_choice, request.allowed_tools),
        request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None,
    )
    budget = request.max_reasoning_tokens if request.HasField("max_reasoning_tokens") else None
    return replace(_raw_request(request, Prompt(chat, "messages")), tools=tools, max_reasoning_tokens=budget)


def tokenize_request(request: pb.TokenizeRequest) -> GenerateRequest:
    """Raises ApiError if text and messages are both given, or a field of one with the other."""
    check_known(request)
    if request.messages and request.text:
        raise bad_request("text and messages are both given; drop one", "text")
    if request.messages and request.add_special_tokens:
        message = "add_special_tokens is for text; the chat template writes those of a conversation"
        raise bad_request(message, "add_special_tokens")
    if request.tools and not request.messages:
        raise bad_request("tools go into a conversation; send messages, too", "tools")
    texts = JsonTexts()
    prompt = Prompt(_chat(request.messages, texts), "messages") if request.messages else Prompt(request.text, "text")
    return GenerateRequest(
        request.model or None,
        [prompt],
        tools=RawTools(_tools(request.tools, texts)),
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else None,
    )


def _raw_request(request: pb.GenerateRequest | pb.ChatRequest, prompt: Prompt) -> GenerateRequest:
    """Reads fields 4 to 23, 27 and 30 to 32, which both types have."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL_FIELDS if request.HasField(name)}
    return GenerateRequest(
        model=request.model or None,
        prompts=[prompt],
        prompts_param=prompt.param,
        sampling={name: getattr(request, name) for name in SCALARS if request.HasField(name)},
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logit_bias=dict(request.logit_bias),
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        form=_form(request.response_format) if request.HasField("response_format") else None,
        with_timing=request.include_timing,
        cache_salt=request.cache_salt,
        user=request.user,
        **given,
    )


def _form(given: pb.ResponseFormat) -> AnswerForm | None:
    kind = given.WhichOneof("form")
    if kind is None:
        raise bad_request("response_format has no form; set one of its fields", "response_format", "missing_field")
    if kind == "json_object" and not given.json_object:
        return None
    value = tuple(given.choice.texts) if kind == "choice" else getattr(given, kind)  # of json_object: not used
    return AnswerForm(kind, value, f"response_format.{kind}")


def _chat(messages: Sequence[pb.ChatMessage], texts: JsonTexts) -> Chat:
    """The conversation as chat templates take it. `texts`: of the request. Raises ApiError."""
    check_count("messages", len(messages), MAX_MESSAGES, "messages")
    plain: list[Mapping[str, Any]] = []
    for index, given in enumerate(messages):
        path = f"messages[{index}]"
        if given.role not in _ROLES:
            rule = f"it must be one of {', '.join(_ROLES)}"
            raise bad_request(f"{path}.role is {given.role[:40]!r}; {rule}", f"{path}.role")
        optional = {
            "name": given.name,
            "tool_call_id": given.tool_call_id,
            "tool_calls": [
                _call(call, f"{path}.tool_calls[{rank}]", texts) for rank, call in enumerate(given.tool_calls)
            ],
            "reasoning_content": given.reasoning,
        }
        fields = {name: value for name, value in optional.items() if value}
        images = [ImagePart(file, f"{path}.images[{rank}]") for rank, file in enumerate(given.images)]
        content = join_parts([*images, given.content] if given.content else images)
        plain.append({"role": given.role, "content": content, **fields})
    return Chat(plain)


def embed_request(request: pb.EmbedRequest) -> EmbedRequest:
    """Raises ApiError."""
    check_known(request)
    if request.texts and request.token_ids:
        raise bad_request("texts and token_ids are both given; send one of them", "token_ids")
    name, texts = ("texts", request.texts) if request.texts else ("token_ids", [one.ids for one in request.token_ids])
    names = {"dimensions": "dimensions", "truncate_prompt_tokens": "truncate", "priority": "priority"}
    given = {own: getattr(request, field) for field, own in names.items() if request.HasField(field)}
    return EmbedRequest(
        request.model or None, list(texts), [f"{name}[{at}]" for at in range(len(texts))],
        prompt_name=request.prompt_name or None, **given,
    )  # fmt: skip


def _choice(given: str, allowed: Sequence[str]) -> Choice | NamedChoice | AllowedChoice | None:
    if not allowed:
        return _CHOICES.get(given, NamedChoice(given, "tool_choice"))
    if given not in ("", "auto", "required"):
        raise bad_request(f"tool_choice is {given[:64]!r}; with allowed_tools it is auto or required", "tool_choice")
    return AllowedChoice(allowed, "required" if given == "required" else "auto", "allowed_tools")


def _call(given: pb.ToolCall, path: str, texts: JsonTexts) -> dict[str, Any]:
    for field in ("id", "name"):
        if not getattr(given, field):
            raise bad_request(f"{path}.{field} is empty", f"{path}.{field}", "missing_field")
    return template_call(given.id, given.name, read_arguments(given.arguments, f"{path}.arguments", texts))


def _tools(given: Sequence[pb.Tool], texts: JsonTexts) -> list[Tool]:
    """Raises ApiError if the parameters of a tool are not a JSON object."""
    check_count("tools", len(given), MAX_TOOLS, "tools")
    tools = []
    for index, tool in enumerate(given):
        path = f"tools[{index}]"
        param = f"{path}.parameters"
        if len(tool.parameters) > MAX_TOOLS_BYTES:
            raise bad_request(f"{param} has more than the {MAX_TOOLS_BYTES} bytes that all tools may have", param)
        parameters = read_arguments(tool.parameters, param, texts) if tool.parameters else None
        tools.append(Tool(tool.name, tool.description or None, parameters, tool.strict, path, param))
    return tools
