"""Makes a client's request a prepared one, in two verbs: `check` before its prompts are encoded, `build` after."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import product

from gateway.access.keys import Key
from gateway.errors import bad_request, check_count
from gateway.request import rules
from gateway.request.prompts import Prompts
from gateway.request.types import EncodedPrompt, GenerateRequest, PreparedRequest
from gateway.router.engine_client import DEFAULT_PRIORITY, Grammar, PromptMemo, Speculation, TokenizedRequest
from gateway.tools.grammar import after_reasoning, call_grammar, hidden_tokens, in_dialect
from gateway.tools.reasoning import ReasoningFormat
from gateway.tools.request import ToolUse, check_tools
from wire.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Rules:
    """A request whose rules hold, as far as they need no tokens: what all its answers have in common."""

    request: GenerateRequest
    num_answers: int  # per prompt
    tools: ToolUse | None
    form: Grammar | None  # of answers, as the client asked
    grammar: Grammar | None  # of answers that do not reason, calls included
    reasoning: ReasoningFormat | None
    budget: int | None  # tokens of reasoning
    dialect: str  # name of the calls' format, where answers are messages
    sampling: SamplingParams
    stop_token_ids: frozenset[int]  # the model's own, unless ignored, and the request's
    speculation: Speculation
    cache_salt: str
    priority: int
    session: str  # name of the conversation that it is a turn of; empty: unknown
    owner: str  # name for the request's key and user that metrics and logs may show

    def find_controls(self, model: Prompts) -> frozenset[str]:
        """Texts of control tokens that answers show: those that calls, reasoning or the grammar use."""
        shown = model.tokenizer.control_tokens_in(self.grammar.text) if self.grammar else frozenset[str]()
        shown -= hidden_tokens(self.dialect)
        for format in (self.reasoning, self.tools.format if self.tools else None):
            shown |= model.tokenizer.controls_of(format.markers) if format else frozenset[str]()
        return shown

    def warnings(self) -> Iterator[str]:
        """Warnings about tools and the answer's form."""
        yield from self.form.warnings if self.form else ()
        yield from self.tools.warnings if self.tools else ()


def check(request: GenerateRequest, model: Prompts, key: Key, *, salts_by_key: bool) -> Rules:
    """Checks a request, cheap rules first. Raises ApiError."""
    cache_salt = key.salted(request.cache_salt) if salts_by_key else request.cache_salt
    priority = key.order(request.priority)
    num_answers = rules.check_choices(request)
    rules.check_lengths(request)
    rules.check_logprobs(request)
    rules.check_stops(request)
    rules.check_order(request)
    tools = check_tools(request.tools, model.tool_format)
    form = rules.check_form(request.form)
    if tools and tools.is_required and form is not None:
        message = f"{form.param} and a tool_choice that requires a call are both given; drop one"
        raise bad_request(message, form.param)
    reasoning = model.reasoning if request.is_chat else None
    dialect = model.tool_format.name if model.tool_format and request.begins_message else ""
    budget = rules.check_budget(request)
    if tools:
        grammar = call_grammar(tools, form, reasoning if budget is not None else None)
    else:
        grammar = in_dialect(form, dialect) if form else None
    rules.check_ends(request, grammar)
    tokenizer = model.tokenizer
    sampling = rules.check_sampling(request, tokenizer.sampling_defaults, tokenizer.vocab_size)
    stop_token_ids = rules.check_stop_ids(request, tokenizer.eos_token_ids, tokenizer.vocab_size)
    speculation = rules.check_speculation(request)
    check_count("cache_salt", len(request.cache_salt), rules.MAX_CACHE_SALT_CHARS, "characters")
    check_count(request.session_param, len(request.session), rules.MAX_SESSION_CHARS, "characters")
    return Rules(
        request, num_answers, tools, form, grammar, reasoning, budget, dialect, sampling, stop_token_ids, speculation,
        cache_salt, DEFAULT_PRIORITY if priority is None else priority, key.session_of(request.session),
        _find_owner(request, key),
    )  # fmt: skip


def _find_owner(request: GenerateRequest, key: Key) -> str:
    if request.user:
        return "user-" + blake2b(f"{key.name} {request.user!r}".encode(), digest_size=4).hexdigest()
    return key.name


def build(
    prompts: Sequence[EncodedPrompt],
    checked: Rules,
    model: Prompts,
    key: Key,
    name: str,
    *,
    adapter: str,
    request_id: str,
    age_s: float,
    warnings: Sequence[str],
) -> PreparedRequest:
    """Builds all choices of the request. `name`: of the model, in the answer; `warnings`: about its prompts."""
    request, tokenizer = checked.request, model.tokenizer
    lengths = [rules.resolve_lengths(request, len(prompt.ids), tokenizer.context_tokens) for prompt in prompts]
    memos = [PromptMemo() for _ in prompts]
    controls = checked.find_controls(model)
    grammars = [_find_grammar(checked, prompt, controls) for prompt in prompts]
    choices = list(product(range(len(prompts)), range(checked.num_answers)))
    tokenized = tuple(
        TokenizedRequest(
            request_id=request_id if len(choices) == 1 else f"{request_id}-{number}",
            prompt_ids=prompts[at].ids,
            max_tokens=max(lengths[at][0], 1),
            sampling=_with_seed(checked, rank),
            stop_token_ids=checked.stop_token_ids,
            min_tokens=lengths[at][1],
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_logprobs if request.is_echoed else request.num_prompt_logprobs,
            grammar=grammars[at],
            speculation=checked.speculation,
            cache_salt=checked.cache_salt,
            priority=checked.priority,
            age_s=age_s,
            deadline_s=None if request.deadline_ms is None else request.deadline_ms / 1000,
            call=request_id,
            session=checked.session,
            owner=checked.owner,
            images=prompts[at].images,
            kept=prompts[at].kept,
            adapter=adapter,
            memo=memos[at],
        )
        for number, (at, rank) in enumerate(choices)
    )
    num_prompt_places = sum(len(one.prompt_ids) for one in tokenized if one.num_prompt_logprobs is not None)
    rules.check_num_logprobs(request, len(tokenized), sum(one.max_tokens for one in tokenized) + num_prompt_places)
    own_stops = frozenset[int]() if request.ignore_eos else tokenizer.eos_token_ids
    return PreparedRequest(
        model=name,
        key=key,
        call_seed=request_id,
        generations=tokenized,
        num_per_prompt=checked.num_answers,
        prompts=tuple(prompts),
        stop_strings=tuple(request.stop),
        stop_token_ids=frozenset(request.stop_token_ids) - own_stops,
        is_prompt_only=request.max_tokens == 0,
        reasoning=checked.reasoning,
        tools=checked.tools,
        form=checked.form,
        warnings=(*request.warnings, *warnings, *_find_lowered(request, lengths), *checked.warnings()),
        visible_controls=controls,
    )


def _find_lowered(request: GenerateRequest, lengths: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Warnings of prompts that leave less room than was asked for."""
    for most, _ in lengths:
        if request.max_tokens is not None and most < request.max_tokens:
            yield f"{request.max_tokens_param} is lowered to {most}, the rest of the context"


def _with_seed(checked: Rules, rank: int) -> SamplingParams:
    """Sampling parameters with a seed. If none is given, equal prompts of one request get different seeds."""
    given = "seed" in checked.request.sampling
    return replace(checked.sampling, seed=(checked.sampling.seed + rank) % 2**64 if given else secrets.randbits(63))


def _find_grammar(checked: Rules, prompt: EncodedPrompt, controls: frozenset[str]) -> Grammar | None:
    """The grammar of answers to the prompt, which may begin inside reasoning."""
    grammar, reasoning = checked.grammar, checked.reasoning
    if reasoning is None:
        return grammar
    return after_reasoning(grammar, reasoning, prompt.reasoning, checked.dialect, checked.budget, controls)
