"""Turns prompts into token ids, and back if they are echoed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.errors import ApiError, bad_request
from gateway.images.reader import FoundImage, Images
from gateway.request.image_places import find_images, put_images
from gateway.request.marks import find_end
from gateway.request.rules import check_prompt_tokens, check_text_bytes, check_vocabulary
from gateway.request.types import Chat, Echo, EncodedPrompt, Prompt
from gateway.text.offload import Check, Offload
from gateway.text.segments import SegmentEncoder
from gateway.text.template import TemplateRefusalError
from gateway.text.template_process import pack_conversation
from gateway.text.templates import Templates
from gateway.text.tokenizer import Tokenizer
from gateway.tools import history
from gateway.tools.dialect import Dialect
from gateway.tools.reasoning import ReasoningFormat, reasoning_start
from gateway.tools.request import ToolUse
from wire.dialects import Format
from wire.retention import KeptPart

TemplateInput = Mapping[str, Any]  # a tool as chat templates take it

# fields of a message that a template may print, besides its content
_TEXTS = ("name", "tool_call_id", "reasoning_content")
_IMAGE_ROLES = ("user", "tool")
_MARKER_CHARS = 16  # a role and its markers
DECODE_COST = 4  # detokenising a token costs as much as tokenising this many characters


@dataclass(frozen=True, slots=True)
class Prompts:
    """Encodes the prompts of one model."""

    tokenizer: Tokenizer
    segments: SegmentEncoder  # of the same
    offload: Offload
    templates: Templates  # renders chats
    template: int  # the model's number there
    images: Images | None  # None: the model takes none
    dialect: Dialect  # how the model writes calls
    reasoning: ReasoningFormat | None  # how the model reasons; None: it does not

    @property
    def tool_format(self) -> Format | None:
        """None: the model knows no tools."""
        return self.dialect.format

    async def encode(
        self,
        prompts: Sequence[Prompt],
        tools: ToolUse | None = None,
        *,
        add_special_tokens: bool | None = None,
        must_fit: bool = True,
        salt: str = "",
        owner: str = "",
    ) -> list[EncodedPrompt]:
        """Encodes prompts, which must fit the context unless they are only counted. `tools` go into chats.

        `add_special_tokens`: None as in answers. `salt`: as in SegmentEncoder; `owner`: as in Shared.
        Raises ApiError naming the prompt.
        """
        inputs = [tool.as_template_input() for tool in tools.tools] if tools else []
        cost = sum([self._check_size(prompt, inputs) for prompt in prompts])
        images = [await self._read_images(prompt, owner) for prompt in prompts]
        chats = await self.offload.run(cost, lambda _: [self._pack(prompt, inputs) for prompt in prompts], owner)
        texts = [await self._render(chat, prompt.param, owner) for chat, prompt in zip(chats, prompts, strict=True)]
        cost += sum([len(image.read.text) for found in images for image in found])
        encoded = await self.offload.run(
            max(cost, sum(map(len, texts))),
            lambda check: [
                self._encode(prompt, text, add_special_tokens, salt, found, check)
                for prompt, text, found in zip(prompts, texts, images, strict=True)
            ],
            owner,
        )
        for prompt, found in zip(prompts, encoded, strict=True):
            if must_fit:
                check_prompt_tokens(len(found.ids), prompt.param, self.tokenizer.context_tokens)
        return encoded

    async def with_echoes(
        self, prompts: Sequence[Prompt], encoded: Sequence[EncodedPrompt], with_offsets: bool, owner: str = ""
    ) -> list[EncodedPrompt]:
        """The encoded prompts with their echoes: texts as given, token ids as their text. `owner`: as in Shared."""
        pairs = list(zip(prompts, encoded, strict=True))
        num_ids = sum(len(found.ids) for prompt, found in pairs if with_offsets or not isinstance(prompt.content, str))
        return await self.offload.run(
            DECODE_COST * num_ids, lambda check: [self._echo(*pair, with_offsets, check) for pair in pairs], owner
        )

    def _check_size(self, prompt: Prompt, tools: Sequence[TemplateInput]) -> int:
        """Refuses a prompt that cannot fit. Returns how many characters to tokenise."""
        content, context = prompt.content, self.tokenizer.context_tokens
        if isinstance(content, str):
            check_text_bytes(len(content.encode()), prompt.param, context)
            return len(content)
        if isinstance(content, Chat):
            return self._check_chat(content, prompt.param, tools)
        check_prompt_tokens(len(content), prompt.param, context)
        check_vocabulary(content, prompt.param, self.tokenizer.vocab_size)
        return 0

    async def _read_images(self, prompt: Prompt, owner: str) -> Sequence[FoundImage]:
        """Raises ApiError."""
        parts = prompt.content.images if isinstance(prompt.content, Chat) else []
        if not parts:
            return ()
        if self.images is None:
            path = parts[0].param
            raise bad_request(f"{path}: this model takes no images; send text only", path, "unsupported_field")
        found = await self.images.read(parts, prompt.param, owner)
        check_text_bytes(sum([len(image.read.text) for image in found]), prompt.param, self.tokenizer.context_tokens)
        return found

    def _check_chat(self, chat: Chat, param: str, tools: Sequence[TemplateInput]) -> int:
        check_vocabulary(chat.context, "context", self.tokenizer.vocab_size)
        if not chat.messages:
            raise bad_request("messages is empty; send at least one message", param)
        if not self.tokenizer.chat_templates:
            raise bad_request("the model has no chat template; send its prompt to /v1/completions instead", param)
        history.check_results(chat.messages, chat.result_params)
        last = chat.messages[-1]
        if chat.is_open and last["role"] != "assistant":
            message = f"an answer goes on with a last message of the assistant's, not {last['role']}"
            raise bad_request(message, param)
        if chat.is_open and last.get("tool_calls"):
            raise bad_request("the last message has tool_calls, with which an answer cannot go on", param)
        if chat.reasoning_param is not None and self.reasoning is None:
            message = f"{chat.reasoning_param} asks for reasoning, which this model has not been taught; leave it out"
            raise bad_request(message, chat.reasoning_param, "unsupported_field")
        with_calls = [index for index, message in enumerate(chat.messages) if "tool_calls" in message]
        if with_calls and self.tool_format is None:
            path = chat.calls_param or f"{param}[{with_calls[0]}].tool_calls"
            why = f"{path}: the model knows no calls of functions, as {self.dialect.why}; leave them out"
            raise bad_request(why, path)
        texts = [message[name] for message in chat.messages for name in _TEXTS if name in message]
        for role, part in [(one["role"], part) for one in chat.messages for part in history.parts_of(one["content"])]:
            if isinstance(part, str):
                texts.append(part)
            elif role not in _IMAGE_ROLES:
                why = f"{part.param}: images are for messages of the role {' or '.join(_IMAGE_ROLES)}"
                raise bad_request(why, part.param, "unsupported_field")
        values = [*(chat.messages[index]["tool_calls"] for index in with_calls), *tools]
        texts += [json.dumps(value, ensure_ascii=False) for value in values]
        check_text_bytes(sum([len(text.encode()) for text in texts]), param, self.tokenizer.context_tokens)
        return sum([len(text) + _MARKER_CHARS for text in texts])

    def _encode(
        self,
        prompt: Prompt,
        text: str,
        add_special_tokens: bool | None,
        salt: str,
        images: Sequence[FoundImage],
        check: Check,
    ) -> EncodedPrompt:
        """`text`: of a chat."""
        content, model = prompt.content, self.tokenizer
        check()
        if isinstance(content, Chat):
            if self.images is not None and images:
                text = put_images(text, self.images.placeholder, images, prompt.param)
            ids = tuple(
                model.encode(text, add_special_tokens=True)
                if add_special_tokens
                else self.segments.encode(text, salt, check)
            )
            ids = (*content.context, *ids) if content.context else ids
            opened = content.messages[-1]["content"] if content.is_open else ""
            start = reasoning_start(self.reasoning, text, opened) if self.reasoning else "off"
            before = model.last_with_text(ids) if content.is_open else ()
            encoded = EncodedPrompt(ids, before, start, kept=tuple(self._count_kept(content, text, len(ids), salt)))
        else:
            if isinstance(content, str):
                content = model.encode(content, add_special_tokens=add_special_tokens is not False)
            encoded = EncodedPrompt(tuple(content), model.last_with_text(content))
        if self.images is None:
            return encoded
        (token,) = model.pieces([self.images.token_id])
        return replace(encoded, images=find_images(encoded.ids, self.images.token_id, token, images, prompt.param))

    def _count_kept(self, chat: Chat, text: str, num_tokens: int, salt: str) -> Iterator[KeptPart]:
        """`text`: the chat's, of so many tokens."""
        for mark in chat.marks:
            end = find_end(text, chat.messages, mark.num_messages)
            is_all = end == len(text)
            yield KeptPart(num_tokens if is_all else len(self.segments.encode(text[:end], salt)), mark.seconds)

    def _pack(self, prompt: Prompt, tools: Sequence[TemplateInput]) -> list[bytes]:
        """Input of `Templates.render` for a chat, twice if it has system messages that a template may refuse or leave
        out: then with these first. Empty for other prompts."""
        chat = prompt.content
        if not isinstance(chat, Chat):
            return []
        messages = [history.fit_reasoning(message, self.tokenizer.chat_templates) for message in chat.messages]
        if self.tool_format is not None:
            messages = history.fit_calls(messages, self.tool_format)
        later = [said.strip() for said in history.later_system_texts(messages)]
        packed = [
            self.tokenizer.conversation(
                one,
                tools,
                options=chat.options,
                add_generation_prompt=chat.add_generation_prompt,
                is_open=chat.is_open,
                shown=shown,
            )
            for one, shown in [(messages, later), *([(history.system_first(messages), [])] if later else [])]
        ]
        try:
            return [pack_conversation(self.template, one) for one in packed]
        except TemplateRefusalError as error:
            raise _refused(error, prompt.param) from error

    async def _render(self, chats: Sequence[bytes], param: str, owner: str) -> str:
        """The text of the first of `chats` that the template takes; empty for none."""
        refusal: TemplateRefusalError | None = None
        for packed in chats:
            try:
                return await self.templates.render(packed, owner)
            except TemplateRefusalError as error:
                refusal = error
        if refusal is not None:
            raise _refused(refusal, param) from refusal
        return ""

    def _echo(self, prompt: Prompt, encoded: EncodedPrompt, with_offsets: bool, check: Check) -> EncodedPrompt:
        check()
        given = prompt.content if isinstance(prompt.content, str) else None
        if given is not None and not with_offsets:
            return replace(encoded, echo=Echo(given, ()))
        shown = self.tokenizer.control_tokens_in(given or "")
        detokenizer, texts, offsets, num_chars = self.tokenizer.detokenizer(shown), list[str](), list[int](), 0
        for token_id in encoded.ids:
            before, text = detokenizer.push_token(token_id)
            offsets.append(num_chars + len(before))
            texts.append(before + text)
            num_chars += len(texts[-1])
        decoded = "".join(texts) + detokenizer.flush()
        return replace(encoded, echo=Echo(decoded if given is None else given, offsets if with_offsets else ()))


def _refused(error: TemplateRefusalError, param: str) -> ApiError:
    return bad_request(f"the model's chat template refuses these messages: {str(error)[:300]}", param)
