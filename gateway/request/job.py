"""A request after validation: what to generate and what to show. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.router.engine_client import TokenizedRequest
from gateway.tools.reasoning import ReasoningFormat, ReasoningStart
from gateway.tools.request import ToolUse


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its answer."""

    text: str
    offsets: Sequence[int]  # character at which each prompt token begins; empty without log-probabilities


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, and how its answers begin."""

    ids: tuple[int, ...]
    before: tuple[int, ...] = ()  # its last tokens with text, if its answers continue that text
    reasoning: ReasoningStart = "off"


@dataclass(frozen=True, slots=True)
class Job:
    """All choices of one request, complete at birth."""

    model: str  # its name, as the request has it
    generations: tuple[TokenizedRequest, ...]  # by choice: n for the first prompt, then n for the second
    num_per_prompt: int  # n
    prompts: tuple[EncodedPrompt, ...]
    echoes: tuple[Echo | None, ...]  # by prompt
    stop_strings: tuple[str, ...] = ()  # text that ends a choice early
    is_prompt_only: bool = False  # max_tokens was 0: the one token generated is not shown
    stop_token_ids: frozenset[int] = frozenset()  # named by the request
    reasoning: ReasoningFormat | None = None  # how answers reason; None: all of an answer is content
    tools: ToolUse | None = None  # what answers may call
    is_json: bool = False  # answers are JSON, unless they call
    visible_controls: frozenset[str] = frozenset()  # texts of control tokens that answers show

    warnings: tuple[str, ...] = ()  # about parts of the request without effect, for the client

    def prompt_of(self, choice: int) -> int:
        """Index of the prompt that a choice answers."""
        return choice // self.num_per_prompt

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once."""
        return sum(len(prompt.ids) for prompt in self.prompts)
