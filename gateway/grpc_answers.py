"""Values of an answer as protobuf messages. Must not know calls or where values come from."""

from gateway.generation import Timing, TokenLogprobs
from gateway.pieces import Piece
from protos import inference_pb2


def logprob_messages(piece: Piece) -> list[inference_pb2.TokenLogprob]:
    """One for each of the piece's tokens; none when they were not asked for."""
    if not piece.logprobs:
        return []
    return [_logprob(token_id, told) for token_id, told in zip(piece.token_ids, piece.logprobs, strict=True)]


def timing_message(timing: Timing) -> inference_pb2.Timing:
    """Where one choice's time went."""
    return inference_pb2.Timing(
        queue_seconds=timing.queue_s,
        prefill_seconds=timing.prefill_s,
        transfer_seconds=timing.transfer_s,
        transfer_bytes=timing.transfer_bytes,
        transport=timing.transport,
        first_step_seconds=timing.first_step_s,
        decode_seconds=timing.decode_s,
        cached_tokens=timing.cached_tokens,
        draft_tokens=timing.draft_tokens,
        accepted_tokens=timing.accepted_tokens,
        attempts=timing.attempts,
    )


def _logprob(token_id: int, told: TokenLogprobs) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TokenLogprob(token_id=other, logprob=logprob) for other, logprob in told.top]
    return inference_pb2.TokenLogprob(token_id=token_id, logprob=told.logprob, top=top)
