"""Answers as protobuf messages. Must not know gRPC's calls or where values come from."""

from collections import defaultdict
from typing import Any

from gateway.answer.choice_text import Piece
from gateway.answer.choices import Totals, timing_fields
from gateway.tools.collect import CallCollector
from protos import inference_pb2
from wire.logprobs import TokenLogprobs
from wire.timing import Timing


class AnswerMessages:
    """Writes the choices of one request."""

    def __init__(self, totals: Totals, *, with_timing: bool) -> None:
        """`totals` must count a piece before it is written here."""
        self._totals = totals
        self._with_timing = with_timing
        self._calls: defaultdict[int, CallCollector] = defaultdict(CallCollector)

    def generate(self, index: int, piece: Piece) -> inference_pb2.GenerateResponse:
        """A piece of a choice."""
        return inference_pb2.GenerateResponse(
            text=piece.text,
            token_ids=piece.token_ids,
            finish_reason=piece.finish_reason or "",
            usage=self._usage(),
            index=index,
            logprobs=logprob_messages(piece),
            timing=self._timing(piece),
            **_stop(piece),
        )

    def chat(self, index: int, piece: Piece) -> inference_pb2.ChatResponse:
        """A piece of a choice, with the tool calls that it completes."""
        calls = self._calls[index].push(piece.calls)
        return inference_pb2.ChatResponse(
            text=piece.text,
            token_ids=piece.token_ids,
            finish_reason=piece.ending or "",
            usage=self._usage(),
            index=index,
            logprobs=logprob_messages(piece),
            timing=self._timing(piece),
            tool_calls=[inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls],
            reasoning=piece.reasoning,
            **_stop(piece),
        )

    def _usage(self) -> inference_pb2.Usage | None:
        """Token counts; only in the request's last message."""
        totals = self._totals
        if totals.num_open:
            return None
        return inference_pb2.Usage(
            prompt_tokens=totals.num_prompt,
            completion_tokens=totals.num_completion,
            cached_tokens=totals.num_cached,
            reasoning_tokens=totals.num_reasoning,
        )

    def _timing(self, piece: Piece) -> inference_pb2.Timing | None:
        return timing_message(piece.timing) if self._with_timing and piece.timing else None


def _stop(piece: Piece) -> dict[str, Any]:
    """The field of `stop_reason` that is set, if any."""
    if piece.stop is None:
        return {}
    return {"stop_string" if isinstance(piece.stop, str) else "stop_token_id": piece.stop}


def logprob_messages(piece: Piece) -> list[inference_pb2.TokenLogprob]:
    """One per token of the piece; none if they were not requested."""
    if not piece.logprobs:
        return []
    return [_logprob(token_id, told) for token_id, told in zip(piece.token_ids, piece.logprobs, strict=True)]


def timing_message(timing: Timing) -> inference_pb2.Timing:
    """Where one choice's time went."""
    return inference_pb2.Timing(**timing_fields(timing, inference_pb2.Timing.DESCRIPTOR.fields_by_name))


def _logprob(token_id: int, told: TokenLogprobs) -> inference_pb2.TokenLogprob:
    pairs = zip(told.top_ids, told.top_logprobs, strict=True)
    top = [inference_pb2.TokenLogprob(token_id=other, logprob=logprob) for other, logprob in pairs]
    return inference_pb2.TokenLogprob(token_id=token_id, logprob=told.logprob, top=top)
