"""Answers as protobuf messages. Must not know gRPC's calls or where values come from."""

from typing import Any

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals, timing_fields
from gateway.tools.parse import CallEnd
from protos import inference_pb2
from wire.logprobs import TokenLogprobs
from wire.timing import Timing


class AnswerMessages:
    """Writes the choices of one request."""

    def __init__(self, totals: Totals, *, with_timing: bool) -> None:
        """`totals` must count a piece before it is written here."""
        self._totals = totals
        self._with_timing = with_timing

    def generate(self, index: int, piece: OutputDelta) -> inference_pb2.GenerateResponse:
        """A piece of a choice."""
        return inference_pb2.GenerateResponse(finish_reason=piece.finish_reason or "", **self._shared(index, piece))

    def chat(self, index: int, piece: OutputDelta) -> inference_pb2.ChatResponse:
        """A piece of a choice, with the tool calls that it completes."""
        calls = [event for event in piece.calls if isinstance(event, CallEnd)]
        return inference_pb2.ChatResponse(
            finish_reason=piece.ending or "",
            tool_calls=[inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls],
            reasoning=piece.reasoning,
            **self._shared(index, piece),
        )

    def _shared(self, index: int, piece: OutputDelta) -> dict[str, Any]:
        """Fields of both messages."""
        fields = {
            "text": piece.text,
            "token_ids": piece.token_ids,
            "usage": None if self._totals.num_open else self._usage(),
            "index": index,
            "logprobs": _logprobs(piece) if piece.logprobs else None,
            "timing": _timing(piece.timing) if self._with_timing and piece.timing else None,
        }
        if piece.stop is not None:
            fields["stop_string" if isinstance(piece.stop, str) else "stop_token_id"] = piece.stop
        return fields

    def _usage(self) -> inference_pb2.Usage:
        """Token counts, for the request's last message."""
        totals = self._totals
        return inference_pb2.Usage(
            prompt_tokens=totals.num_prompt,
            completion_tokens=totals.num_completion,
            cached_tokens=totals.num_cached,
            reasoning_tokens=totals.num_reasoning,
        )


def _timing(timing: Timing) -> inference_pb2.Timing:
    return inference_pb2.Timing(**timing_fields(timing, inference_pb2.Timing.DESCRIPTOR.fields_by_name))


def _logprobs(piece: OutputDelta) -> list[inference_pb2.TokenLogprob]:
    """One per token of the piece."""
    return [_logprob(token_id, given) for token_id, given in zip(piece.token_ids, piece.logprobs, strict=True)]


def _logprob(token_id: int, given: TokenLogprobs) -> inference_pb2.TokenLogprob:
    pairs = zip(given.top_ids, given.top_logprobs, strict=True)
    top = [inference_pb2.TokenLogprob(token_id=other, logprob=logprob) for other, logprob in pairs]
    return inference_pb2.TokenLogprob(token_id=token_id, logprob=given.logprob, top=top)
