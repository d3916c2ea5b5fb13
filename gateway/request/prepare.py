"""The served model, its options, and the way from a client's request to a prepared one: shared by REST and gRPC."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from gateway.access.keys import Key, Keys
from gateway.errors import ApiError, bad_request, missed_deadline, overloaded
from gateway.fair_turns import LoopTurn
from gateway.held import Held
from gateway.metrics import Gaps, RequestMetrics
from gateway.request import rules
from gateway.request.check import build, check
from gateway.request.prompts import DECODE_COST, Prompts
from gateway.request.types import Chat, GenerateRequest, PreparedRequest
from gateway.router.engine_client import EngineClient, Load
from gateway.shares import Shared, is_fair
from gateway.text.offload import Offload
from gateway.text.templates import Templates
from gateway.tools.request import check_tools
from gateway.tracing import ReadHeaders, RequestTrace, Tracing
from runtime.config_parts import MAX_NAME_CHARS

_TRACED_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Settings of the public APIs, with defaults."""

    api_keys: tuple[str, ...] = ()  # each of them is accepted; empty: no key needed
    cors_origins: tuple[str, ...] = ()  # of web pages that may call the APIs, never with credentials
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0  # for a request's whole body to arrive
    stalled_client_s: float = 60.0  # for a gRPC client to read one message; REST: connection.py
    tool_format: str = "auto"  # how the model writes calls: a name of wire/dialects.py, "auto" or "none"
    reasoning_format: str = "auto"  # how it reasons: a name of tools/reasoning.py, "auto" or "none"
    itl_goal_s: float = 0.0  # for the time between an answer's tokens; 0: none
    max_image_pixels: int = 1 << 26
    image_hosts: tuple[str, ...] = ()  # from which images are fetched: names, or *.SUFFIX
    max_queue: int = 1024  # choices that wait for a place
    admin_key: str = ""  # for loading and unloading adapters; empty: that is refused
    restarts: bool = False  # whole answers begin once more where the weights that began them are gone
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
        name = self.names.check(raw.model)
        if self.tokenizer.pooling is not None:
            message = f"the model {name} has no answers; it makes {self.tokenizer.pooling.describe()}"
            raise bad_request(message, "model", "unsupported_model")
        checked = check(raw, self, key, salts_by_key=self.options.salts_by_key)
        late_s = time.perf_counter() - arrived_s
        try:
            async with asyncio.timeout(None if raw.deadline_ms is None else raw.deadline_ms / 1000 - late_s):
                prompts = await self.encode(raw.prompts, checked.tools, salt=checked.cache_salt, owner=key.name)
        except TimeoutError:
            raise missed_deadline() from None
        prepared = build(
            prompts,
            checked,
            self,
            key,
            name,
            adapter=name if name in self.names.adapters else "",
            request_id=request_id,
            age_s=time.perf_counter() - arrived_s,
            warnings=tuple(self._chat_warnings(raw)),
        )
        key.allowance.begin(time.perf_counter(), key.name, prepared.num_prompt_tokens)
        if raw.is_echoed:
            echoed = await self.with_echoes(raw.prompts, prompts, raw.num_logprobs is not None, key.name)
            prepared = replace(prepared, prompts=tuple(echoed))
        return prepared

    def check_share(self, sharer: str, num_choices: int) -> None:
        """Refuses what exceeds a key's share, so that none fills the queue alone. Raises ApiError 429."""
        num_waiting, most = self.ring.load().num_waiting, self.options.max_queue
        mine = self.waiting.held_by(sharer) + num_choices
        if sharer and num_waiting and not is_fair(mine, num_waiting + num_choices, most):
            raise overloaded(f"your key has its share of the {most} places in the queue; try again in a moment")

    def _chat_warnings(self, raw: GenerateRequest) -> Iterator[str]:
        """Warnings of options of a conversation that have no effect on this model."""
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


class ServedModels:
    """All models of a service, what they share, and what REST and gRPC do alike for each of them."""

    def __init__(self, options: ApiOptions, registry: CollectorRegistry, keys: Keys) -> None:
        """`registry`: of all metrics."""
        self.models: list[ServedModel] = []  # the first answers requests that name none
        self.options, self.registry, self.keys = options, registry, keys
        self.held = Held()
        self.offload, self.templates = Offload(), Templates()
        self.waiting = Shared(options.max_queue)  # choices that wait for their first token
        self.live_gaps = Gaps()  # between tokens of all answers but those of the last priority

    def find_names(self) -> Iterator[rules.ServedNames]:
        return (one.names for one in self.models)

    def start_images(self) -> list[asyncio.Task[None]]:
        """Start what reads images, so that the first ones do not wait. Each task ends when that is ready."""
        return [asyncio.create_task(one.images.start()) for one in self.models if one.images is not None]

    async def close(self) -> None:
        """End threads and processes."""
        self.offload.close()
        await self.templates.close()
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

    def new_turn(self, owner: str, num_bytes: int) -> LoopTurn:
        """A turn at the event loop, for reading and checking a request."""
        return LoopTurn(self.offload.loop_turns, owner, num_bytes)

    @property
    def context_tokens(self) -> int:
        """The longest context of all models, in tokens."""
        return max(one.tokenizer.context_tokens for one in self.models)

    def names(self, key: Key) -> Iterator[tuple[str, ServedModel]]:
        """Each name that the key's requests may have, and its model: models first, then their adapters."""
        named = [(name, one) for one in self.models for name in one.names.listed]
        named += [(name, one) for one in self.models for name in one.names.adapters]
        return ((name, one) for name, one in named if may_use(key, one, name))

    def load(self) -> Load:
        """The load of all models together."""
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
