"""A checkpoint's chat template: a conversation |-> the text of a prompt.

What a template computes is up to the checkpoint's author: `render` runs in forks with limits only (template_process.py,
and at the start trial.py).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jinja2
import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

_FEW = 16  # texts that may stand in any order


class TemplateRefusalError(Exception):
    """The chat template cannot render these messages; the text says why."""


class Conversation(msgspec.Struct):
    """The input of a template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, str | int | float | bool | None] = {}
    add_generation_prompt: bool = True
    is_open: bool = False  # the text ends inside the last message
    shown: Sequence[str] = ()  # texts that it must not leave out


class ChatTemplate(msgspec.Struct):
    """A template of a checkpoint, and the one that it has for conversations with tools, often the same."""

    plain: str
    with_tools: str
    special: Mapping[str, str | list[str]]  # names of special tokens |-> the tokens
    max_bytes: int  # of what it renders

    def compile(self) -> None:
        """Compiles, so that the first chat does not wait. A template that does not compile refuses all of them."""
        for source in (self.plain, self.with_tools):
            with suppress(jinja2.TemplateError, RecursionError, MemoryError):
                render_jinja_template(conversations=[], chat_template=source)

    def render(self, conversation: Conversation) -> str:
        """Runs the template in Jinja's sandbox, which limits neither time nor memory. Raises TemplateRefusalError."""
        is_open = conversation.is_open
        given: dict[str, Any] = {**self.special, **conversation.options}
        messages: list[Any] = [_without_nulls(one) for one in conversation.messages]
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                chat_template=self.with_tools if conversation.tools else self.plain,
                tools=list(map(dict, conversation.tools)) or None,
                add_generation_prompt=conversation.add_generation_prompt and not is_open,
                continue_final_message=is_open,
                **given,
            )
        except MemoryError as error:
            raise TemplateRefusalError("it needs too much memory") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            reason = str(error) or type(error).__name__
            if reason.startswith("continue_final_message"):  # transformers' check, which quotes the prompt
                reason = "it drops or changes the text of the last message, so that no answer can go on with it"
            raise TemplateRefusalError(reason) from error
        except RecursionError as error:
            raise TemplateRefusalError("it nests too deep") from error
        text = str(rendered[0][0])
        if len(text.encode()) > self.max_bytes:
            raise TemplateRefusalError(f"it makes more than {self.max_bytes} bytes of text of them")
        if not are_shown(conversation.shown, text):
            raise TemplateRefusalError("it leaves out a system message")
        return text


def are_shown(texts: Sequence[str], rendered: str) -> bool:
    """Whether all are in the rendered chat. Many are looked for in their order only: in any takes quadratic time."""
    begin = 0
    for text in texts:
        begin = rendered.find(text, begin)
        if begin < 0:
            return len(texts) <= _FEW and all(text in rendered for text in texts)
        begin += len(text)
    return True


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}
