"""The rules for how tokens are chosen and guessed ahead. Pure, the same for REST and gRPC."""

from collections.abc import Mapping
from typing import cast

from gateway.errors import bad_request
from gateway.generation import Drafter, Sampling, Speculation
from gateway.limits import check_positive, check_range, pick, shown
from gateway.raw_request import RawRequest
from gateway.text.checkpoint import SamplingDefaults
from gateway.validate import check_vocabulary
from runtime.peer_input import MAX_DRAFT_TOKENS

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
DRAFTERS = ("auto", "off", "ngram", "draft")


def check_sampling(raw: RawRequest, defaults: SamplingDefaults, vocab_size: int) -> Sampling:
    """Sampling parameters with the defaults filled in; the seed is 0 where none was given."""
    top_k = pick(raw.top_k, defaults.top_k)
    if top_k < 0:
        raise bad_request(f"top_k is {shown(top_k)}; it must be at least 0, which keeps all tokens", "top_k")
    repetition = pick(raw.repetition_penalty, defaults.repetition_penalty)
    return Sampling(
        temperature=_unit("temperature", pick(raw.temperature, defaults.temperature), MAX_TEMPERATURE),
        top_p=check_positive("top_p", _unit("top_p", pick(raw.top_p, defaults.top_p), 1.0)),
        top_k=top_k if top_k < vocab_size else 0,
        min_p=_unit("min_p", pick(raw.min_p, defaults.min_p), 1.0),
        seed=_unsigned(pick(raw.seed, 0)),
        frequency_penalty=_penalty("frequency_penalty", raw.frequency_penalty),
        presence_penalty=_penalty("presence_penalty", raw.presence_penalty),
        repetition_penalty=check_positive(
            "repetition_penalty", _unit("repetition_penalty", repetition, MAX_REPETITION_PENALTY)
        ),
        logit_bias=_check_bias(raw.logit_bias, vocab_size),
    )


def check_speculation(raw: RawRequest) -> Speculation:
    """How tokens are guessed ahead."""
    drafter = raw.speculation or "auto"
    if drafter not in DRAFTERS:
        raise bad_request(f"speculation is {drafter[:40]!r}; it must be one of {', '.join(DRAFTERS)}", "speculation")
    if raw.max_draft_tokens is not None:
        check_range("max_draft_tokens", raw.max_draft_tokens, 1, MAX_DRAFT_TOKENS)
    return Speculation(cast(Drafter, drafter), raw.max_draft_tokens or 0)


def _check_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_BIASED_TOKENS:
        raise bad_request(f"logit_bias has {len(bias)} entries; at most {MAX_BIASED_TOKENS} are allowed", "logit_bias")
    check_vocabulary(list(bias), "logit_bias", vocab_size)
    for token_id, value in bias.items():
        check_range(f"logit_bias.{token_id}", value, -MAX_BIAS, MAX_BIAS)
    return tuple((token_id, float(value)) for token_id, value in sorted(bias.items()))


def _unit(name: str, value: float, highest: float) -> float:
    return check_range(name, float(value), 0.0, highest)


def _penalty(name: str, value: float | None) -> float:
    return check_range(name, float(pick(value, 0.0)), -MAX_PENALTY, MAX_PENALTY)


def _unsigned(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise bad_request(f"seed is {shown(seed)}; it must fit 64 bits", "seed")
    return seed % 2**64
