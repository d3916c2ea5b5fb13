"""Splits the calls of an answer from its text, piece by piece."""

from dataclasses import replace
from hashlib import blake2b
from itertools import count

from gateway.answer.choice_text import OutputDelta, Phases
from gateway.tools.parse import CallEvent, CallParser, Content, Event
from gateway.tools.request import ToolUse

_NUM_ID_CHARS = 24  # as many as OpenAI's


class CallReader:
    """Reads one choice. `id_seed`: the calls' ids follow from it; `is_trusted`, `begins`: as in CallParser."""

    def __init__(self, use: ToolUse, id_seed: str, *, is_trusted: bool, begins: bool = False) -> None:
        schemas, num_chars = {tool.name: tool.schema for tool in use.callable_tools}, use.format.num_id_chars
        numbers = count()

        def new_id() -> str:
            digest = blake2b(f"{id_seed} {next(numbers)}".encode()).hexdigest()
            return digest[:num_chars] if num_chars else f"call_{digest[:_NUM_ID_CHARS]}"

        self._parser = CallParser(use.format, schemas, new_id, is_trusted=is_trusted, begins=begins, schemas=schemas)
        self._is_named = use.named is not None
        self._is_required = use.is_required

    def read(self, piece: OutputDelta) -> list[OutputDelta]:
        """Returns the piece with its calls separated from its text. Text that may be part of a call is held back.

        Returns several pieces if text follows a call: the first has the tokens, the last the finish reason.
        """
        events: list[Event | Phases] = []
        begin = 0
        for place, phase in piece.phases:
            events += [*self._parser.push(piece.text[begin:place]), ((0, phase),)]
            begin = place
        events += self._parser.push(piece.text[begin:])
        if piece.finish_reason is not None:
            events += self._parser.flush()
        if self._is_required:  # the grammar allows only calls: content is a call that was cut off
            events = [event for event in events if not isinstance(event, Content)]
        # An answer with a named call ends with "stop", as in OpenAI's API.
        is_whole = piece.finish_reason == "stop" and not isinstance(piece.stop, str)
        is_calling = is_whole and self._parser.num_calls > 0 and self._parser.are_whole and not self._is_named
        runs: list[tuple[str, Phases, tuple[CallEvent, ...]]] = [("", (), ())]  # a text and the calls after it
        for event in events:
            text, phases, calls = runs[-1]
            if not isinstance(event, (Content, tuple)):
                runs[-1] = text, phases, (*calls, event)
                continue
            if calls:
                text, phases = "", ()
                runs.append((text, phases, ()))
            if isinstance(event, Content):
                runs[-1] = text + event.text, phases, ()
            else:
                runs[-1] = text, (*phases, *((len(text), phase) for _, phase in event)), ()
        *earlier, (text, phases, calls) = runs
        parts: list[OutputDelta] = []
        for before, begun, between in earlier:
            part = replace(piece, text=before, phases=begun, calls=between, finish_reason=None, timing=None, stop=None)
            parts.append(part)
            piece = replace(piece, reasoning="", token_ids=(), num_reasoning_tokens=0, logprobs=(), shown_tokens=())
        return [*parts, replace(piece, text=text, phases=phases, calls=calls, is_calling=is_calling)]
