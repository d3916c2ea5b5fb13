"""Rules for a request's lengths, counts, stops, sampling and form, the same for REST and gRPC. Pure.

Each returns checked values or raises ApiError naming the field. Rules for tools: tools/request.py. The decode worker
checks whether a schema, expression or grammar is valid.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar, cast, get_args

import pydantic_core

from gateway.adapters.registry import Adapter
from gateway.errors import ApiError, bad_request, check_count, model_not_found
from gateway.request.types import AnswerForm, GenerateRequest
from gateway.router.engine_client import Grammar, Speculation
from gateway.tools.json_schema import check_enforced
from runtime.config_parts import ANY_NAME, MAX_NAME_CHARS
from runtime.peer_input import MAX_LOGPROBS
from wire.names import Speculate
from wire.sampling import MAX_DRAFT_TOKENS, SCALARS, SamplingParams

MAX_LISTED = 20  # names of adapters in an error
MAX_MESSAGES = 4096  # of a conversation
MAX_CHOICES = 128  # of all prompts together: each takes a place in the queue
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of one stop string
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_CHARS = 1024
MAX_SESSION_CHARS = 512
MAX_TOLD_LOGPROBS = 2**21  # of all choices together, if there are several; each takes about 100 bytes while it waits
LAST_PRIORITY = 9  # 0 goes first
MAX_DEADLINE_MS = 86_400_000  # a day
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_GRAMMAR_BYTES = 64 * 2**10
DRAFTERS = get_args(Speculate)
TEXT_BYTES_OF_TOKEN = 4  # of English and code, about: for errors of text that is not tokenised
TEXT_BYTES_PER_TOKEN = 16  # four times what English needs; longer text cannot fit the context and is not tokenised

Number = TypeVar("Number", int, float)


def check_range(name: str, value: Number, lowest: Number, highest: Number) -> Number:
    """Returns the value if it is from `lowest` to `highest`. Raises ApiError naming the field."""
    if not lowest <= value <= highest:  # also true for NaN
        raise bad_request(f"{name} is {shown(value)}; it must be a number from {lowest:g} to {highest:g}", name)
    return value


def shown(number: float) -> str:
    """A number for an error message: as the client wrote it, unless it is long."""
    text = f"{number:g}" if isinstance(number, float) else str(number)
    return text if len(text) <= 40 else f"a number of {len(text)} digits"


class ServedNames:
    """A model's names in requests."""

    def __init__(
        self,
        given: Sequence[str],
        adapters: Mapping[str, Adapter],
        find_all: "Callable[[], Iterable[ServedNames]]" = lambda: (),
    ) -> None:
        """`given`: at least one name, and perhaps ANY_NAME. Requests that name none are answered under the first.

        `adapters`: by names, which come and go. `find_all`: the names of all models of the service.
        """
        self.listed = tuple(name for name in given if name != ANY_NAME)
        self._takes_any = ANY_NAME in given
        self.adapters = adapters
        self._find_all = find_all

    def has(self, name: str | None) -> bool:
        """Whether it is the model's own name, or that of one of its adapters."""
        return name in self.listed or name in self.adapters

    def check(self, model: str | None) -> str:
        """The name under which a request for `model` is answered. Raises ApiError if it is not served."""
        name = model or self.listed[0]
        if self.has(name) or (self._takes_any and len(name) <= MAX_NAME_CHARS):
            return name
        table = list(self._find_all())
        listed = [name for names in table for name in names.listed]
        adapters = islice((name for names in table for name in names.adapters), MAX_LISTED)
        raise model_not_found(name[:MAX_NAME_CHARS], [*listed, *adapters])


def check_choices(raw: GenerateRequest) -> int:
    """The number of answers per prompt."""
    n = 1 if raw.n is None else raw.n
    if not raw.prompts:
        raise bad_request(f"{raw.prompts_param} is empty; send at least one prompt", raw.prompts_param)
    check_range("n", n, 1, MAX_CHOICES)
    if n * len(raw.prompts) > MAX_CHOICES:
        raise bad_request(
            f"{len(raw.prompts)} prompts with {n} answers each are more than {MAX_CHOICES}; send several requests",
            "n" if n > 1 else raw.prompts_param,
        )
    return n


def check_stops(raw: GenerateRequest) -> None:
    param = raw.stop_param
    check_count(param, len(raw.stop), MAX_STOP_STRINGS, "strings")
    for stop in raw.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise bad_request(
                f"a string of {param} has {len(stop)} characters; it must have between 1 and {MAX_STOP_CHARS}", param
            )


def check_stop_ids(raw: GenerateRequest, eos_token_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """Returns the token ids that end the answer: the request's and, unless `ignore_eos`, the model's own."""
    check_count("stop_token_ids", len(raw.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    check_vocabulary(raw.stop_token_ids, "stop_token_ids", vocab_size)
    own = frozenset[int]() if raw.ignore_eos else eos_token_ids
    return own | frozenset(raw.stop_token_ids)


def check_vocabulary(ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raises ApiError for an id that is not in the model's vocabulary."""
    if not ids:
        return
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < vocab_size:
            raise bad_request(
                f"{param} holds token id {shown(worst)}; the model's ids go from 0 to {vocab_size - 1}", param
            )


def check_text_bytes(num_bytes: int, param: str, context_tokens: int) -> None:
    """Refuses text that cannot fit the context before it is tokenised."""
    limit = TEXT_BYTES_PER_TOKEN * context_tokens
    if num_bytes > limit:
        message = f"{param} has {num_bytes} bytes of text; at most {limit} are read for this model"
        raise _too_long(message, param, (num_bytes // TEXT_BYTES_OF_TOKEN, context_tokens - 1))


def check_prompt_tokens(num_prompt: int, param: str, context_tokens: int) -> None:
    """A prompt must have a token and leave room for one more."""
    if num_prompt < 1:
        raise bad_request(f"{param} is empty; it must have at least one token", param)
    if num_prompt >= context_tokens:
        raise _too_long(
            f"{param} has {num_prompt} tokens; the model's context is {context_tokens} tokens and the answer needs "
            f"at least one, so shorten it to {context_tokens - 1} or fewer",
            param,
            (num_prompt, context_tokens - 1),
        )


def check_lengths(raw: GenerateRequest) -> None:
    """Checks of max_tokens and min_tokens that do not need the prompt's length."""
    lowest = 0 if raw.is_echoed else 1
    if raw.max_tokens is not None and raw.max_tokens < lowest:
        raise bad_request(
            f"{raw.max_tokens_param} is {shown(raw.max_tokens)}; it must be at least {lowest}", raw.max_tokens_param
        )
    if raw.min_tokens is not None and raw.min_tokens < 0:
        raise bad_request(f"min_tokens is {shown(raw.min_tokens)}; it must be at least 0", "min_tokens")


def check_budget(raw: GenerateRequest) -> int | None:
    """How many tokens an answer may reason; None: as many as it may have."""
    budget, param = raw.max_reasoning_tokens, raw.max_reasoning_param
    if budget is not None and budget < 0:
        raise bad_request(f"{param} is {shown(budget)}; it must be at least 0", param)
    return None if budget is None or (raw.max_tokens is not None and budget >= raw.max_tokens) else budget


def check_ends(raw: GenerateRequest, grammar: Grammar | None) -> None:
    """A grammar decides where the answer ends: min_tokens and ignore_eos cannot."""
    if grammar is not None and (raw.min_tokens or raw.ignore_eos):
        name = "min_tokens" if raw.min_tokens else "ignore_eos"
        raise bad_request(f"{name} cannot be combined with {grammar.param}, which says where the answer ends", name)


def resolve_lengths(raw: GenerateRequest, num_prompt: int, context_tokens: int) -> tuple[int, int]:
    """(the most tokens to generate: as requested, or the rest of the context, 0 only with echo; the fewest)."""
    rest = context_tokens - num_prompt
    if raw.max_tokens is not None and raw.max_tokens > rest and not raw.is_max_tokens_clamped:
        raise _too_long(
            f"{raw.max_tokens_param} is {shown(raw.max_tokens)}, but the prompt's {num_prompt} tokens leave {rest} of "
            f"the model's context of {context_tokens}; ask for {rest} or fewer",
            raw.max_tokens_param,
        )
    max_tokens, min_tokens = rest if raw.max_tokens is None else min(raw.max_tokens, rest), raw.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens is {shown(min_tokens)}; it must not exceed the {max_tokens} tokens that the answer may have",
            "min_tokens",
        )
    return max_tokens, min_tokens


def check_logprobs(raw: GenerateRequest) -> None:
    """Checks how many likely tokens are reported at each position."""
    if raw.num_logprobs is not None:
        check_range(raw.logprobs_param, raw.num_logprobs, 0, MAX_LOGPROBS)
    if raw.num_prompt_logprobs is not None:
        check_range("prompt_logprobs", raw.num_prompt_logprobs, 0, MAX_LOGPROBS)
        if raw.is_echoed:
            raise bad_request("prompt_logprobs and echo are both given; drop one", "prompt_logprobs")


def check_num_logprobs(raw: GenerateRequest, num_choices: int, num_places: int) -> None:
    """Limits the memory of several choices; the context limits one. `num_places`: tokens of all choices."""
    if num_choices == 1 or (raw.num_logprobs is None and raw.num_prompt_logprobs is None):
        return
    num_told = num_places * (max(raw.num_logprobs or 0, raw.num_prompt_logprobs or 0) + 1)
    if num_told > MAX_TOLD_LOGPROBS:
        raise bad_request(
            f"{num_choices} answers could tell {num_told} log-probabilities; at most {MAX_TOLD_LOGPROBS} are allowed, "
            f"so lower {raw.max_tokens_param} or the number of answers",
            "prompt_logprobs" if raw.num_logprobs is None else raw.logprobs_param,
        )


def check_sampling(raw: GenerateRequest, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
    """The given parameters, with defaults for the rest."""
    given: dict[str, Any] = dict(raw.sampling)
    for name, value in given.items():
        allowed = SCALARS[name].clients
        if allowed is None:
            continue
        given[name] = check_range(name, float(value), allowed.lowest, allowed.highest)
        if allowed.excludes_lowest and value <= allowed.lowest:
            raise bad_request(f"{name} is {value:g}; it must be above {allowed.lowest:g}", name)
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


def check_speculation(raw: GenerateRequest) -> Speculation:
    """How tokens are drafted."""
    drafter = raw.speculation or "auto"
    if drafter not in DRAFTERS:
        raise bad_request(f"speculation is {drafter[:40]!r}; it must be one of {', '.join(DRAFTERS)}", "speculation")
    if raw.max_draft_tokens is not None:
        check_range("max_draft_tokens", raw.max_draft_tokens, 1, MAX_DRAFT_TOKENS)
    return Speculation(cast(Speculate, drafter), raw.max_draft_tokens or 0)


def check_order(raw: GenerateRequest) -> None:
    """When the request is to be answered."""
    if raw.priority is not None:
        check_range("priority", raw.priority, 0, LAST_PRIORITY)
    if raw.deadline_ms is not None:
        check_range("deadline_ms", raw.deadline_ms, 1, MAX_DEADLINE_MS)


def check_form(form: AnswerForm | None) -> Grammar | None:
    """Returns the grammar that the client asks for, if any. Raises ApiError naming the field."""
    if form is None:
        return None
    value, param = form.value, form.param
    match form.kind:
        case "json_object":
            return Grammar("json_object", "", param)
        case "json_schema":
            try:
                schema = pydantic_core.from_json(_checked(value, param)) if isinstance(value, str) else value
                if not isinstance(schema, Mapping):
                    raise bad_request(f"{param} must be a JSON schema, which is an object", param, "invalid_type")
                text = _checked(json.dumps(schema, ensure_ascii=False, allow_nan=False), param)
            except ValueError as error:
                raise bad_request(f"{param} is not valid JSON: {str(error)[:200]}", param) from error
            return Grammar("json_schema", text, param, check_enforced(schema, param, is_strict=form.is_strict))
        case "choice":
            check_count(param, sum([len(text.encode()) for text in value]), MAX_GRAMMAR_BYTES, "bytes")
            if not value or not all(value):
                raise bad_request(f"{param} must hold at least one text, and none that is empty", param)
            return Grammar("ebnf", _checked("root ::= " + " | ".join(map(_quoted, value)), param), param)
    if not value:
        raise bad_request(f"{param} is empty", param)
    return Grammar("regex" if form.kind == "regex" else "ebnf", _checked(value, param), param)


def _quoted(text: str) -> str:
    return '"' + re.sub(r'["\\\x00-\x1f\x7f]', lambda found: f"\\u{ord(found[0]):04x}", text) + '"'


def _checked(text: str, param: str) -> str:
    check_count(param, len(text.encode()), MAX_GRAMMAR_BYTES, "bytes")
    if "\0" in text:
        raise bad_request(f"{param} holds a NUL character", param)
    return text


def _check_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    check_count("logit_bias", len(bias), MAX_BIASED_TOKENS, "entries")
    check_vocabulary(list(bias), "logit_bias", vocab_size)
    for token_id, value in bias.items():
        check_range(f"logit_bias.{token_id}", value, -MAX_BIAS, MAX_BIAS)
    return tuple((token_id, float(value)) for token_id, value in sorted(bias.items()))


def _too_long(message: str, param: str, overflow: tuple[int, int] | None = None) -> ApiError:
    return replace(bad_request(message, param, "context_length_exceeded"), overflow=overflow)
