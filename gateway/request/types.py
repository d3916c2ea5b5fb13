"""A request before its rules (`GenerateRequest`: types are right, values unchecked) and after them (`PreparedRequest`).

Neither has a wire format. Values only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.access.keys import Key
from gateway.images.parts import ImagePart
from gateway.request.marks import Mark
from gateway.router.engine_client import Grammar, PromptImage, TokenizedRequest
from gateway.tools.reasoning import ReasoningFormat, ReasoningStart
from gateway.tools.request import RawTools, ToolUse
from gateway.tools.template_options import Option
from wire.retention import KeptPart


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. Each message has the text `role`, and `content`: a text, or a list of texts and `ImagePart`s.

    Optional: `name`, `tool_call_id`, `reasoning_content` and, as chat templates take them, `tool_calls` (history.py).
    """

    messages: Sequence[Mapping[str, Any]]
    # field of the call's id in each message of the role "tool", for errors; None: `tool_call_id` of messages
    result_params: Sequence[str] | None = None
    calls_param: str | None = None  # field of the calls, for errors; None: `tool_calls` of messages
    options: Mapping[str, Option] = field(default_factory=dict)  # variables for the template
    reasoning_param: str | None = None  # the field that requires reasoning, if any
    wishes: Mapping[str, str] = field(default_factory=dict)  # field |-> the variable it sets; "": it asks for reasoning
    add_generation_prompt: bool = True  # end with the start of the answer
    is_open: bool = False  # the answer continues the last message, an assistant's
    marks: Sequence[Mark] = ()  # of what is kept, the longest first
    context: Sequence[int] = ()  # tokens before it

    @property
    def images(self) -> list[ImagePart]:
        """The images of all messages, in order."""
        contents = [message["content"] for message in self.messages if not isinstance(message["content"], str)]
        return [part for content in contents for part in content if isinstance(part, ImagePart)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its field, for errors."""

    content: str | Sequence[int] | Chat
    param: str


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that answers must have, as the client wrote it."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    value: Any  # a schema as an object or as JSON text; an expression; a grammar; a list of texts
    param: str
    is_strict: bool = True  # of a schema: refuse parts that cannot be enforced; False: leave them to the model


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request. None: not given."""

    model: str | None
    prompts: Sequence[Prompt]
    prompts_param: str = "prompt"  # their field, for errors
    n: int | None = None  # answers per prompt
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    is_max_tokens_clamped: bool = False  # to the rest of the context, where the API's clients send a constant
    min_tokens: int | None = None
    max_reasoning_tokens: int | None = None  # then the answer follows
    max_reasoning_param: str = "max_reasoning_tokens"
    sampling: Mapping[str, float] = field(default_factory=dict)  # the given ones of wire.sampling.SCALARS
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_param: str = "stop"
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    logprobs_param: str = "logprobs"
    num_prompt_logprobs: int | None = None
    is_echoed: bool = False  # the answer begins with its prompt; max_tokens may then be 0
    form: AnswerForm | None = None
    speculation: str | None = None
    max_draft_tokens: int | None = None
    with_timing: bool = False
    with_token_ids: bool = False
    add_special_tokens: bool | None = None  # when only counted: begin with the start token; None: as in answers
    cache_salt: str = ""
    priority: int | None = None
    deadline_ms: int | None = None  # from its arrival to its first token
    user: str = ""  # whose share of the service it counts for, among those with the same API key
    session: str = ""  # the conversation that it is a turn of, among those with the same API key; empty: unknown
    session_param: str = "prompt_cache_key"  # its field, for errors
    tools: RawTools = field(default_factory=RawTools)
    warnings: Sequence[str] = ()  # what was left out of it

    @property
    def is_chat(self) -> bool:
        """Whether it has a conversation, and not prompts."""
        return any(isinstance(prompt.content, Chat) for prompt in self.prompts)

    @property
    def begins_message(self) -> bool:
        """Whether answers are messages of a conversation, and not the rest of one."""
        return any(isinstance(prompt.content, Chat) and not prompt.content.is_open for prompt in self.prompts)

    @property
    def has_images(self) -> bool:
        return any(isinstance(prompt.content, Chat) and prompt.content.images for prompt in self.prompts)


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
    echo: Echo | None = None
    images: tuple[PromptImage, ...] = ()
    kept: tuple[KeptPart, ...] = ()  # that its client marks, the longest first


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """All choices of one request, complete at birth."""

    model: str  # its name, as the request has it
    key: Key  # that sent it
    call_seed: str  # ids of its calls follow from it
    generations: tuple[TokenizedRequest, ...]  # by choice: n for the first prompt, then n for the second
    num_per_prompt: int  # n
    prompts: tuple[EncodedPrompt, ...]
    stop_strings: tuple[str, ...] = ()  # text that ends a choice early
    is_prompt_only: bool = False  # max_tokens was 0: the one token generated is not shown
    stop_token_ids: frozenset[int] = frozenset()  # named by the request
    reasoning: ReasoningFormat | None = None  # how answers reason; None: all of an answer is content
    tools: ToolUse | None = None  # what answers may call
    form: Grammar | None = None  # of answers, unless they call
    visible_controls: frozenset[str] = frozenset()  # texts of control tokens that answers show

    warnings: tuple[str, ...] = ()  # about parts of the request without effect, for the client

    def prompt_of(self, choice: int) -> int:
        """Index of the prompt that a choice answers."""
        return choice // self.num_per_prompt

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts; each prompt counts once."""
        return sum(len(prompt.ids) for prompt in self.prompts)
