"""The process that renders chat templates: `python -m gateway.text.template_process FD`.

It keeps forks warm, each with limits of CPU time and memory. A fork renders one conversation after the other; it ends
when a template breaks its limits or the request is cancelled, and another takes its place.

    gateway ◄── calls and answers ──► this process ◄──► forks
"""

import asyncio
import gc
import os
import sys
from collections.abc import Sequence

import msgspec

from gateway.text.template import ChatTemplate, Conversation, TemplateRefusalError
from runtime.child import serve_parent
from runtime.fork import Busy, Fork, Limits, Refused, as_answer

FORKS = 3  # conversations rendered at once
CPU_S = 2.0  # for one conversation; a long one takes 0.02 s
WALL_S = 20.0  # the same where the CPU is shared with others
MEMORY_BYTES = 256 << 20
MAX_REASON_CHARS = 300


class TemplateStart(msgspec.Struct, tag=True):
    """The first call; answered by TemplatesReady."""

    templates: list[ChatTemplate]  # of which all compile: trial.py has tried


class Render(msgspec.Struct, tag=True):
    """Answered by Rendered, Refused or Busy."""

    conversation: bytes  # of `pack_conversation`


class TemplatesReady(msgspec.Struct, tag=True):
    """Forks wait for calls."""


class Rendered(msgspec.Struct, tag=True):
    """The text of the prompt."""

    text: str


Call = TemplateStart | Render
Answer = TemplatesReady | Rendered | Refused | Busy


def pack_conversation(template: int, conversation: Conversation) -> bytes:
    """`template`: its place in TemplateStart. TemplateRefusalError if the conversation has values that JSON lacks."""
    try:
        return msgspec.json.encode((template, conversation))
    except (ValueError, TypeError, RecursionError) as error:
        raise TemplateRefusalError(f"they have values that it cannot be given: {error}") from error


class Renderer:
    """Answers the gateway's calls."""

    def __init__(self, fd: int) -> None:
        """fd: of the gateway's calls."""
        self._fd = fd
        self._idle: list[Fork] = []
        self._decoder = msgspec.json.Decoder(tuple[int, Conversation])

    async def answer(self, call: Call) -> Answer | msgspec.Raw:
        if isinstance(call, TemplateStart):
            self._templates: Sequence[ChatTemplate] = call.templates
            for template in call.templates:
                template.compile()
            gc.collect()
            gc.freeze()
            self._idle = [self._fork() for _ in range(FORKS)]
            return TemplatesReady()
        fork = self._idle.pop() if self._idle else self._fork()
        try:
            answer = await fork.ask(call.conversation)
        finally:
            self._idle.append(fork if fork.pid else self._fork())
        slow, crashed = f"it takes longer than {CPU_S:g} s to render them", "it needs too much memory, or crashes"
        return as_answer(answer, slow=slow, crashed=crashed)

    def _fork(self) -> Fork:
        return Fork(Limits(CPU_S, WALL_S, MEMORY_BYTES), self._render, self._fd)

    def _render(self, packed: bytes) -> Rendered | Refused:
        """Runs in a fork."""
        template, conversation = self._decoder.decode(packed)
        try:
            return Rendered(self._templates[template].render(conversation))
        except TemplateRefusalError as error:
            return Refused(str(error)[:MAX_REASON_CHARS])


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # rendering needs none
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would warn of that
    asyncio.run(serve_parent(int(sys.argv[1]), Call, Renderer(int(sys.argv[1])).answer))
