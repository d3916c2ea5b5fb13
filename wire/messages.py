"""Converts the values of this package to messages and back. Fields have the same names where possible."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import decode_pb2, kv_pb2, prefill_pb2
from wire.images import ImageSpan
from wire.logprobs import TokenLogprobs
from wire.retention import MAX_KEEP_S, MAX_KEPT_PARTS, KeptPart, Retention
from wire.sampling import SCALARS, SamplingParams
from wire.timing import ReadTokens, Timing

_TOKEN = np.dtype("<i4")
_SESSION_TIMING = {  # field of SessionTiming |-> of Timing
    "kv_seconds": "prefill_s",
    "first_step_seconds": "first_step_s",
    "decode_seconds": "decode_s",
    "grammar_seconds": "grammar_s",
} | {name: name for name in ("draft_tokens", "accepted_tokens", "steps", "preemptions", "cached_tokens")}


def pack_tokens(token_ids: "NDArray[np.int32]") -> bytes:
    """Token ids as in ReserveRequest.prompt: 4 bytes each, little-endian."""
    return np.asarray(token_ids, _TOKEN).tobytes()


def unpack_tokens(packed: bytes) -> "NDArray[np.int32]":
    """[n] int32, a view of `packed`. ValueError if it is not a whole number of tokens."""
    return np.frombuffer(packed, _TOKEN)


def unpack_images(images: Iterable[kv_pb2.Image]) -> tuple[ImageSpan, ...]:
    return tuple(ImageSpan(one.begin, one.end, one.digest, one.rows, one.columns) for one in images)


def pack_retention(retention: Retention | None) -> kv_pb2.Retention | None:
    if retention is None:
        return None
    parts = [kv_pb2.KeptPart(tokens=tokens, seconds=seconds) for tokens, seconds in retention.parts]
    return kv_pb2.Retention(owner=retention.owner, parts=parts)


def unpack_retention(message: kv_pb2.Retention) -> Retention | None:
    """Reads a retention; None if it has no part that lasts."""
    parts = [KeptPart(one.tokens, min(one.seconds, MAX_KEEP_S)) for one in message.parts[:MAX_KEPT_PARTS]]
    parts = [part for part in parts if part.seconds > 0]
    return Retention(message.owner, parts) if parts else None


def pack_sampling(params: SamplingParams) -> decode_pb2.SamplingParams:
    return decode_pb2.SamplingParams(
        **{name: getattr(params, name) for name in SCALARS},
        logit_bias=[decode_pb2.TokenBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
    )


def unpack_sampling(message: decode_pb2.SamplingParams) -> SamplingParams:
    """ValueError names a value out of range."""
    scalars: dict[str, Any] = {name: getattr(message, name) for name in SCALARS}
    return SamplingParams(**scalars, logit_bias=tuple((bias.token_id, bias.bias) for bias in message.logit_bias))


def pack_logprobs(one: TokenLogprobs) -> decode_pb2.TokenLogprobs:
    return decode_pb2.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)


def unpack_logprobs(message: decode_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(message.top_ids), tuple(message.top_logprobs))


def pack_decode_timing(timing: Timing) -> decode_pb2.SessionTiming:
    """The decode worker's part; `prefill_s` is its wait for the prompt's KV, computed here or read."""
    fields = {theirs: getattr(timing, ours) for theirs, ours in _SESSION_TIMING.items()}
    return decode_pb2.SessionTiming(read_tokens=pack_read(timing.read_tokens), **fields)


def pack_read(tokens: ReadTokens) -> kv_pb2.ReadTokens:
    return kv_pb2.ReadTokens(**tokens._asdict())


def unpack_read(message: kv_pb2.ReadTokens) -> ReadTokens:
    return ReadTokens(message.files, message.prefill, message.decode)


def unpack_decode_timing(message: decode_pb2.SessionTiming) -> Timing:
    fields = {ours: getattr(message, theirs) for theirs, ours in _SESSION_TIMING.items()}
    return Timing(read_tokens=unpack_read(message.read_tokens), **fields)


def unpack_prefill_timing(message: prefill_pb2.RunResponse) -> Timing:
    """The prefill worker's part."""
    return Timing(
        prefill_s=message.queue_seconds + message.prefill_seconds,
        transfer_s=message.transfer_seconds,
        transfer_bytes=message.transfer_bytes,
        transport=message.transport,
        cached_tokens=message.cached_tokens,
        read_tokens=unpack_read(message.read_tokens),
    )
