"""Rules for sampling and speculation, the same for REST and gRPC. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from gateway.errors import bad_request, check_count
from gateway.request.raw import RawRequest
from gateway.request.rules import check_range, check_vocabulary, shown
from gateway.router.engine_client import Drafter, Speculation
from wire.sampling import ABOVE_LOWEST, CLIENT_RANGES, MAX_DRAFT_TOKENS, SamplingParams

MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
DRAFTERS = ("auto", "off", "ngram", "draft")


def check_sampling(raw: RawRequest, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
    """Returns the given parameters, with defaults for the rest. Raises ApiError naming the field."""
    given: dict[str, Any] = dict(raw.sampling)
    for name, value in given.items():
        if name in CLIENT_RANGES:
            given[name] = check_range(name, float(value), *CLIENT_RANGES[name])
        if name in ABOVE_LOWEST and value <= CLIENT_RANGES[name][0]:
            raise bad_request(f"{name} is {value:g}; it must be above {CLIENT_RANGES[name][0]:g}", name)
    top_k, seed = given.pop("top_k", defaults.top_k), given.pop("seed", defaults.seed)
    if top_k < -1:
        raise bad_request(f"top_k is {shown(top_k)}; it must be at least 0, or -1; both keep all tokens", "top_k")
    if not -(2**63) <= seed < 2**64:
        raise bad_request(f"seed is {shown(seed)}; it must fit 64 bits", "seed")
    return replace(
        defaults,
        top_k=top_k if 0 <= top_k < vocab_size else 0,
        seed=seed % 2**64,
        logit_bias=_check_bias(raw.logit_bias, vocab_size),
        **given,
    )


def check_speculation(raw: RawRequest) -> Speculation:
    """Returns how tokens are drafted. Raises ApiError naming the field."""
    drafter = raw.speculation or "auto"
    if drafter not in DRAFTERS:
        raise bad_request(f"speculation is {drafter[:40]!r}; it must be one of {', '.join(DRAFTERS)}", "speculation")
    if raw.max_draft_tokens is not None:
        check_range("max_draft_tokens", raw.max_draft_tokens, 1, MAX_DRAFT_TOKENS)
    return Speculation(cast(Drafter, drafter), raw.max_draft_tokens or 0)


def _check_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    check_count("logit_bias", len(bias), MAX_BIASED_TOKENS, "entries")
    check_vocabulary(list(bias), "logit_bias", vocab_size)
    for token_id, value in bias.items():
        check_range(f"logit_bias.{token_id}", value, -MAX_BIAS, MAX_BIAS)
    return tuple((token_id, float(value)) for token_id, value in sorted(bias.items()))
