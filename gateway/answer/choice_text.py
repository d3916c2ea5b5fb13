"""Turns a choice's tokens into deltas of its text. Pure."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from gateway.router.engine_client import FinishReason, Tokens
from gateway.text.stops import StopStrings
from gateway.text.tokenizer import IncrementalDetokenizer
from gateway.tools.parse import CallEvent
from gateway.tools.reasoning import Parts, Phase, Reader
from wire.logprobs import TokenLogprobs
from wire.timing import Timing

Phases = tuple[tuple[int, Phase | None], ...]  # where messages begin in a text, and their phases
Ending = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text is shown, with its log-probability."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for a prompt's first token
    offset: int  # of its text in the choice's text, in characters
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """More of a choice, in this order: reasoning, text, calls."""

    text: str  # whole characters; what may be the start of a stop string is held back
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()  # up to and including the one that completed a stop string
    num_reasoning_tokens: int = 0  # of token_ids
    finish_reason: FinishReason | None = None  # set on the last delta only
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token of token_ids, if requested
    shown_tokens: tuple[ShownToken, ...] = ()  # tokens whose text begins in this delta, if requested
    prompt_tokens: tuple[ShownToken, ...] = ()  # next tokens of the prompt, before all else, if requested
    timing: Timing | None = None  # on the last delta: the latest received
    calls: tuple[CallEvent, ...] = ()  # tool calls
    stop: str | int | None = None  # on the last delta: the request's stop string or token id that ended it
    phases: Phases = ()  # of the messages that begin in the text
    is_calling: bool = False  # on the last delta: the client must answer its calls

    @property
    def ending(self) -> Ending | None:
        """The finish reason that clients see."""
        return "tool_calls" if self.is_calling else self.finish_reason


class OutputReader:
    """Reads the deltas of a choice from its tokens. The stop token has no text, and nothing follows a stop string.

    A token is shown with its first character; one without text, with the next text or at the end. A stop string hides
    the tokens that begin at its start or later. Stop strings are not searched in reasoning.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: StopStrings,
        stop_token_ids: frozenset[int],
        *,
        with_logprobs: bool,
        reasoning: Reader | None = None,
        text_offset: int = 0,
    ) -> None:
        """`text_offset`: number of characters before the answer."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self._with_logprobs = with_logprobs
        self._reasoning = reasoning
        self._text_offset = text_offset
        self._num_decoded = text_offset
        self._num_content = 0  # characters of text returned
        self._num_pushed = 0  # the same, with those held back
        self._phases: list[tuple[int, Phase | None]] = []  # of messages that begin there, not returned yet
        self._phase: Phase | None = None  # the last one
        self._texts: list[str] = []  # of the tokens being read
        self._reasonings: list[str] = []
        self._unshown: deque[ShownToken] = deque()
        self._timing: Timing | None = None

    def read(self, tokens: Tokens) -> OutputDelta:
        """Returns the next delta. Must not be called after one with a finish reason."""
        if self._with_logprobs and len(tokens.logprobs) != len(tokens.token_ids):
            raise ValueError(f"{len(tokens.token_ids)} tokens came with {len(tokens.logprobs)} log-probabilities")
        self._timing = tokens.timing or self._timing
        self._texts, self._reasonings, num_reasoning = [], [], 0
        is_stopped = tokens.finish_reason == "stop" and self._stop_token_ids.issuperset(tokens.token_ids[-1:])
        num_with_text = len(tokens.token_ids) - is_stopped  # an answer that its grammar ends has no stop token
        for rank, token_id in enumerate(tokens.token_ids):
            before, text = self._detokenizer.push_token(token_id) if rank < num_with_text else ("", "")
            if self._with_logprobs:
                self._unshown.append(ShownToken(token_id, tokens.logprobs[rank], self._num_decoded + len(before)))
            if self._show(before + text):
                cut = replace(tokens, token_ids=tokens.token_ids[: rank + 1], logprobs=tokens.logprobs[: rank + 1])
                return self._delta(cut, num_reasoning, "stop", self._stops.met)
            num_reasoning += self._reasoning.count() if self._reasoning else 0
        if tokens.finish_reason is None:
            return self._delta(tokens, num_reasoning)
        if self._show(self._detokenizer.flush()) or (self._reasoning and self._add(self._reasoning.flush())):
            return self._delta(tokens, num_reasoning, "stop", self._stops.met)
        self._texts.append(self._stops.flush())
        self._num_content += len(self._texts[-1])
        last_id = tokens.token_ids[-1] if is_stopped and tokens.token_ids else None
        shown = self._take_shown(is_last=True)
        return replace(self._delta(tokens, num_reasoning, tokens.finish_reason, last_id), shown_tokens=shown)

    def _delta(
        self, tokens: Tokens, num_reasoning: int, reason: FinishReason | None = None, stop: str | int | None = None
    ) -> OutputDelta:
        """`tokens`: those that the delta counts."""
        text, end = "".join(self._texts), self._num_content
        begun = tuple((place - end + len(text), phase) for place, phase in self._phases if place < end)
        self._phases = self._phases[len(begun) :]
        return OutputDelta(
            text,
            "".join(self._reasonings),
            tokens.token_ids,
            num_reasoning,
            reason,
            tokens.logprobs,
            self._take_shown() if self._unshown else (),
            timing=None if reason is None else self._timing,
            stop=stop,
            phases=begun,
        )

    def _show(self, decoded: str) -> bool:
        """Adds the text that may be shown. Returns True at a stop string."""
        self._num_decoded += len(decoded)
        return self._add(self._reasoning.push(decoded) if self._reasoning else Parts("", decoded))

    def _add(self, part: Parts) -> bool:
        self._reasonings.append(part.reasoning)
        if part.content and self._reasoning is not None and self._reasoning.phase != self._phase:
            self._phase = self._reasoning.phase
            self._phases.append((self._num_pushed, self._phase))
        self._num_pushed += len(part.content)
        text, is_stopped = self._stops.push(part.content)
        self._num_content += len(text)
        self._texts.append(text)
        return is_stopped

    def _take_shown(self, *, is_last: bool = False) -> tuple[ShownToken, ...]:
        """Removes and returns the tokens that begin in the text shown so far; all of them if it `is_last`."""
        reader, begin = self._reasoning, self._text_offset
        end = begin + (reader.num_taken if reader else 0) + self._num_content
        shown: list[ShownToken] = []
        while self._unshown and (is_last or self._unshown[0].offset < end):
            token = self._unshown.popleft()
            is_reasoning = reader is not None and reader.has_taken(token.offset - begin)
            shown.append(replace(token, is_reasoning=True) if is_reasoning else token)
        return tuple(shown)
