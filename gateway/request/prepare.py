"""What REST and gRPC share: the served model, its options, and the way from a client's request to a prepared one."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import product

from prometheus_client import CollectorRegistry

from gateway.access.keys import Key, Keys
from gateway.batches.pace import Gaps
from gateway.errors import ApiError, bad_request, check_count, missed_deadline, overloaded
from gateway.fair_turns import LoopTurn
from gateway.held import Held
from gateway.metrics import RequestMetrics
from gateway.request import rules
from gateway.request.prompts import DECODE_COST, Prompts
from gateway.request.types import Chat, GenerateRequest, PreparedRequest
from gateway.router.engine_client import DEFAULT_PRIORITY, EngineClient, Load, TokenizedRequest
from gateway.shares import Shared, is_fair
from gateway.tools.formats import PLAIN
from gateway.tools.grammar import after_reasoning, call_grammar, hidden_tokens, in_dialect
from gateway.tools.request import check_tools
from gateway.tracing import ReadHeaders, RequestTrace, Tracing
from runtime.config_parts import MAX_NAME_CHARS

_PLAIN_WARNING = "calls are not read: the model writes them in a way not known here; --tool-format can name one"
_TRACED_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Settings of the public APIs, with defaults."""

    api_keys: tuple[str, ...] = ()  # each of them is accepted; empty: no key needed
    cors_origins: tuple[str, ...] = ()  # of web pages that may call the APIs, never with credentials
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0  # for a request's whole body to arrive
    stalled_client_s: float = 60.0  # for a gRPC client to read one message; REST: connection.py
    tool_format: str = "auto"  # how the model writes calls: a name of tools/formats.py, "auto" or "none"
    reasoning_format: str = "auto"  # how it reasons: a name of tools/reasoning.py, "auto" or "none"
    itl_goal_s: float = 0.0  # for the time between an answer's tokens; 0: none
    max_image_pixels: int = 1 << 26
    image_hosts: tuple[str, ...] = ()  # from which images are fetched: names, or *.SUFFIX
    max_queue: int = 1024  # choices that wait for a place
    admin_key: str = ""  # for loading and unloading adapters; empty: that is refused
    salts_by_key: bool = False  # keys do not share KV of equal prompts
    hosts: tuple[str, ...] = ()  # names by which the service is called where no key is asked for


@dataclass(frozen=True, slots=True)
class ServedModel(Prompts):
    """One served model: its prompts, and the ring that answers them."""

    ring: EngineClient
    names: rules.ServedNames
    options: ApiOptions
    metrics: RequestMetrics
    created_s: int  # Unix time at which the gateway started
    waiting: Shared  # choices that wait for their first token
    tracing: Tracing | None = None

    def begin_trace(
        self, raw: GenerateRequest, request_id: str, arrived_s: float, headers: ReadHeaders
    ) -> RequestTrace | None:
        """`arrived_s`, `headers`: as in Tracing.begin. None without tracing."""
        if self.tracing is None:
            return None
        served = raw.model if raw.model and raw.model in self.names.adapters else self.names.listed[0]
        operation = "chat" if raw.is_chat else "text_completion"
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": (raw.model or served)[:MAX_NAME_CHARS],
            "gen_ai.response.model": served,
            "gen_ai.request.max_tokens": raw.max_tokens,
            "gen_ai.request.choice.count": raw.n,
            "baton.request_id": request_id,
            **{f"gen_ai.request.{name}": raw.sampling.get(name) for name in _TRACED_SAMPLING},
        }
        return self.tracing.begin(f"{operation} {served}", arrived_s, headers, attributes)

    async def prepare(self, raw: GenerateRequest, request_id: str, arrived_s: float, key: Key) -> PreparedRequest:
        """Checks a request, cheap rules before expensive ones, and tokenises its prompts. Raises ApiError.

        `arrived_s`: by time.perf_counter; the deadline counts from then. `key`: its API key.
        """
        key.allowance.check(time.perf_counter(), key.name)
        cache_salt = key.salted(raw.cache_salt) if self.options.salts_by_key else raw.cache_salt
        priority = key.order(raw.priority)
        name = self.names.check(raw.model)
        n = rules.check_choices(raw)
        rules.check_lengths(raw)
        rules.check_logprobs(raw)
        rules.check_stops(raw)
        rules.check_order(raw)
        tools = check_tools(raw.tools, self.tool_format)
        form = rules.check_form(raw.form)
        if tools and tools.is_required and form is not None:
            message = f"{form.param} and a tool_choice that requires a call are both given; drop one"
            raise bad_request(message, form.param)
        reasoning = self.reasoning if raw.is_chat else None
        dialect = self.tool_format.name if self.tool_format and raw.begins_message else ""
        budget = rules.check_budget(raw)
        if tools:
            grammar = call_grammar(tools, form, reasoning if budget is not None else None)
        else:
            grammar = in_dialect(form, dialect) if form else None
        rules.check_ends(raw, grammar)
        model = self.tokenizer
        sampling = rules.check_sampling(raw, model.sampling_defaults, model.vocab_size)
        generation = partial(
            TokenizedRequest,
            stop_token_ids=rules.check_stop_ids(raw, model.eos_token_ids, model.vocab_size),
            num_logprobs=raw.num_logprobs,
            num_prompt_logprobs=raw.num_logprobs if raw.is_echoed else raw.num_prompt_logprobs,
            speculation=rules.check_speculation(raw),
            cache_salt=cache_salt,
            priority=DEFAULT_PRIORITY if priority is None else priority,
            owner=_find_owner(raw, key),
            adapter=name if name in self.names.adapters else "",
        )
        check_count("cache_salt", len(raw.cache_salt), rules.MAX_CACHE_SALT_CHARS, "characters")
        late_s = time.perf_counter() - arrived_s
        try:
            async with asyncio.timeout(None if raw.deadline_ms is None else raw.deadline_ms / 1000 - late_s):
                prompts = await self.encode(raw.prompts, tools, salt=cache_salt, owner=key.name)
        except TimeoutError:
            raise missed_deadline() from None
        # control tokens that calls, reasoning or the grammar use
        visible = self.tokenizer.control_tokens_in(grammar.text) if grammar else frozenset[str]()
        visible -= hidden_tokens(dialect)
        for format in (reasoning, tools.format if tools else None):
            visible |= self.tokenizer.controls_of(format.markers) if format else frozenset[str]()
        warnings = [*raw.warnings, *self._chat_warnings(raw)]
        age_s = time.perf_counter() - arrived_s
        generations: list[TokenizedRequest] = []
        for prompt, rank in product(prompts, range(n)):
            max_tokens, min_tokens = rules.resolve_lengths(raw, len(prompt.ids), model.context_tokens)
            if raw.max_tokens is not None and max_tokens < raw.max_tokens:
                warnings.append(f"{raw.max_tokens_param} is lowered to {max_tokens}, the rest of the context")
            one = generation(
                request_id=request_id if n * len(prompts) == 1 else f"{request_id}-{len(generations)}",
                prompt_ids=prompt.ids,
                images=prompt.images,
                max_tokens=max(max_tokens, 1),
                age_s=age_s,
                deadline_s=None if raw.deadline_ms is None else raw.deadline_ms / 1000,
                min_tokens=min_tokens,
                # without a given seed, equal prompts of one request get different ones
                sampling=replace(
                    sampling,
                    seed=(sampling.seed + rank) % 2**64 if "seed" in raw.sampling else secrets.randbits(63),
                ),
                grammar=after_reasoning(grammar, reasoning, prompt.reasoning, dialect, budget, visible)
                if reasoning
                else grammar,
            )
            generations.append(one)
        num_prompt_places = sum(len(one.prompt_ids) for one in generations if one.num_prompt_logprobs is not None)
        rules.check_num_logprobs(raw, len(generations), sum(one.max_tokens for one in generations) + num_prompt_places)
        key.allowance.begin(time.perf_counter(), key.name, sum(len(prompt.ids) for prompt in prompts))
        if raw.is_echoed:
            prompts = await self.with_echoes(raw.prompts, prompts, raw.num_logprobs is not None, key.name)
        return PreparedRequest(
            model=name,
            key=key,
            generations=tuple(generations),
            num_per_prompt=n,
            prompts=tuple(prompts),
            stop_strings=tuple(raw.stop),
            stop_token_ids=frozenset(raw.stop_token_ids) - (frozenset() if raw.ignore_eos else model.eos_token_ids),
            is_prompt_only=raw.max_tokens == 0,
            reasoning=reasoning,
            tools=tools,
            is_json=form is not None and form.kind in ("json_schema", "json_object"),
            warnings=(
                *warnings,
                *([_PLAIN_WARNING] if tools and tools.format == PLAIN else ()),
                *(form.warnings if form else ()),
                *(tools.warnings if tools else ()),
            ),
            visible_controls=visible,
        )

    def check_share(self, sharer: str, num_choices: int) -> None:
        """No key fills the queue alone. Raises ApiError 429."""
        num_waiting, most = self.ring.load().num_waiting, self.options.max_queue
        mine = self.waiting.held_by(sharer) + num_choices
        if sharer and num_waiting and not is_fair(mine, num_waiting + num_choices, most):
            raise overloaded(f"your key has its share of the {most} places in the queue; try again in a moment")

    def _chat_warnings(self, raw: GenerateRequest) -> Iterator[str]:
        """What a conversation has without effect on this model."""
        if raw.max_reasoning_tokens is not None and not self.reasoning:
            yield f"{raw.max_reasoning_param} has no effect on this model"
        for chat in [prompt.content for prompt in raw.prompts if isinstance(prompt.content, Chat)]:
            known = self.tokenizer.chat_templates
            for name, variable in chat.wishes.items():
                if not (variable in known if variable else self.reasoning):
                    yield f"{name} has no effect on this model"


def may_use(key: Key, served: ServedModel, name: str | None) -> bool:
    """Whether a key's requests may have the name, which is an adapter's, or the model's: then any of its own counts."""
    own = (name,) if name in served.names.adapters else served.names.listed
    return not key.models or not set(own).isdisjoint(key.models)


def _find_owner(raw: GenerateRequest, key: Key) -> str:
    """A name for the request's API key and user that metrics and logs may show."""
    if raw.user:
        return "user-" + blake2b(f"{key.name} {raw.user!r}".encode(), digest_size=4).hexdigest()
    return key.name


@dataclass(frozen=True, slots=True)
class ServedModels:
    """All models of a service, and what REST and gRPC do alike for each of them."""

    models: Sequence[ServedModel]  # the first answers requests that name none
    registry: CollectorRegistry  # of all metrics
    keys: Keys
    held: Held = field(default_factory=Held)

    def start_images(self) -> list[asyncio.Task[None]]:
        """Start what reads images, so that the first ones do not wait. Each task ends when that is ready."""
        return [asyncio.create_task(one.images.start()) for one in self.models if one.images is not None]

    async def close(self) -> None:
        """End threads and processes."""
        self.models[0].offload.close()
        await self.models[0].templates.close()
        for one in self.models:
            if one.images is not None:
                await one.images.close()

    def find(self, model: str | None, key: Key) -> ServedModel:
        """The model that has the name, or the first: it refuses a name that none has. Without a name the key's first.

        Raises ApiError 403 if the key may not use it.
        """
        found = next((one for one in self.models if one.names.has(model)), self.models[0])
        if not model:
            found = next((one for one in self.models if may_use(key, one, None)), found)
        if not may_use(key, found, model):
            shown = "this service's models" if not model else f"the model {model[:MAX_NAME_CHARS]!r}"
            message = f"the key {key.name} may not use {shown}; it has {', '.join(key.models)}"
            raise ApiError(403, message, "model", "model_not_allowed")
        return found

    @property
    def options(self) -> ApiOptions:
        return self.models[0].options

    def new_turn(self, owner: str, num_bytes: int) -> LoopTurn:
        """For reading and checking a request."""
        return LoopTurn(self.models[0].offload.loop_turns, owner, num_bytes)

    @property
    def context_tokens(self) -> int:
        """The longest context."""
        return max(one.tokenizer.context_tokens for one in self.models)

    def names(self, key: Key) -> Iterator[tuple[str, ServedModel]]:
        """Each name that the key's requests may have, and its model: models first, then their adapters."""
        named = [(name, one) for one in self.models for name in one.names.listed]
        named += [(name, one) for one in self.models for name in one.names.adapters]
        return ((name, one) for name, one in named if may_use(key, one, name))

    @property
    def live_gaps(self) -> Gaps:
        """Between tokens of all answers but those of the last priority."""
        return self.models[0].metrics.live_gaps

    def load(self) -> Load:
        """Of all models together."""
        loads = [one.ring.load() for one in self.models]
        return Load(
            sum(load.num_inside for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.num_places for load in loads),
            sum(load.num_free for load in loads),
        )

    def readiness(self) -> str | None:
        """Why no model is ready; None when one is."""
        reasons = [one.ring.readiness() for one in self.models]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason)

    def can_serve(self) -> bool:
        """Whether a request for one of the models would be served now."""
        return any(one.ring.can_serve() for one in self.models)


async def tokenize(served: ServedModel, raw: GenerateRequest, key: Key) -> tuple[int, ...]:
    """Returns the token ids of its one prompt, possibly more than the context holds. Raises ApiError."""
    served.names.check(raw.model)
    tools = check_tools(raw.tools, served.tool_format)
    (encoded,) = await served.encode(
        raw.prompts, tools, add_special_tokens=raw.add_special_tokens, must_fit=False, owner=key.name
    )
    return encoded.ids


async def detokenize(
    served: ServedModel,
    model: str | None,
    token_ids: Sequence[int],
    param: str,
    key: Key,
    *,
    with_control_tokens: bool,
) -> str:
    """Returns the text of at most `context_tokens` tokens. Raises ApiError naming `param`."""
    served.names.check(model)
    context_tokens = served.tokenizer.context_tokens
    if len(token_ids) > context_tokens:
        message = f"{param} has {len(token_ids)} ids; at most {context_tokens} are turned into text at once"
        raise bad_request(message, param, "context_length_exceeded")
    rules.check_vocabulary(token_ids, param, served.tokenizer.vocab_size)
    return await served.offload.run(
        DECODE_COST * len(token_ids),
        lambda _: served.tokenizer.decode(token_ids, with_control_tokens=with_control_tokens),
        key.name,
    )
