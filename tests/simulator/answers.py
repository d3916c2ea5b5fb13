"""Stored answers whose gateways die, stop, drain, and lose the store: one seed, one schedule.

Keepers, runs and replays are the real ones, as are routers, HTTP's event streams and the SQL.
"""

import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec

from bench.simulate.virtual_time import VirtualLoop
from gateway.access.keys import ANYBODY
from gateway.answer.choices import Totals, stream_choices
from gateway.api.http.answer import Stored
from gateway.api.openai.types import ChatCompletionRequest
from gateway.api.openai.writer import AnswerWriter
from gateway.api.responses.types import ResponsesRequest
from gateway.api.responses.writer import ResponseWriter
from gateway.request.prepare import ServedModel
from gateway.router.attempt_record import AttemptRecord
from gateway.router.engine_client import Admitted, Load, TokenizedRequest, Tokens
from gateway.store import line
from gateway.store.database import RUNNING, Answer
from gateway.store.kinds import read_request
from gateway.store.replay import Asked, as_items
from tests.simulator.answer_clients import WHOLE, AnswerClient, Clients, Event, is_cut_off, plain, read_event
from tests.simulator.answer_gateway import LEASE_S, MODEL, AnswersDecode, AnswersGateway, serve, vocabulary
from tests.simulator.model import follow, speaking
from tests.simulator.schedule import MAX_PAUSE_S, Outcome, Troubles, check_empty, run_world
from tests.simulator.store import Kept, SimDatabase, SimStore
from tests.simulator.world import Faults, ViolationError, World

NUM_PAGES, MAX_RUNNING, MOST_ANSWER = 240, 8, 24
TROUBLE_S = 12.0  # how long it lasts
REST_S = 40.0  # after the last client: answers that nobody reads end


class Exact:
    """The EngineClient that an undisturbed answer comes from, one token after the other."""

    def __init__(self, token_ids: list[int]) -> None:
        self._ids = token_ids

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Admitted]:
        yield Admitted(0)

    async def generate(
        self, request: TokenizedRequest, admitted: Admitted, attempts: list[AttemptRecord] | None = None
    ) -> AsyncGenerator[Tokens, None]:
        is_stopped = self._ids[-1] in request.stop_token_ids
        for rank, token_id in enumerate(self._ids, 1):
            yield Tokens((token_id,), "stop" if is_stopped and rank == len(self._ids) else None)
        if not is_stopped:
            yield Tokens((), "length")

    def load(self) -> Load:
        return Load(0, 0, 0, 0)

    def readiness(self) -> str | None:
        return None

    def can_serve(self, adapter: str = "") -> bool:
        return True


def find_history(answers: Mapping[str, Kept], kept: Kept) -> list[Any]:
    """The items of the turns before."""
    if not kept.first.previous:
        return []
    before = answers[kept.first.previous]
    given = as_items(msgspec.json.decode(before.first.body)["input"])
    return [*find_history(answers, before), *given, *msgspec.json.decode(before.result)["output"]]


async def build_events(one: ServedModel, kept: Kept, history: list[Any]) -> tuple[list[int], list[Event]]:
    """The tokens and events of an undisturbed answer. `history`: the items before its own."""
    row, asked = kept.first, msgspec.msgpack.decode(kept.first.asked, type=Asked)
    body, stored = read_request(row.kind, row.body), Stored(row.id, row.created_s, asked.is_background)
    if isinstance(body, ResponsesRequest):
        given = as_items(body.model_dump(by_alias=True, exclude_unset=True)["input"])
        whole = body.model_dump(by_alias=True, exclude_unset=True) | {"input": [*history, *given]}
        raw = body.model_validate(whole).raw()
    else:
        raw = body.raw()
    job = await one.prepare(raw, asked.request_id, 0.0, ANYBODY)
    wanted = job.generations[0]
    tokens = follow(wanted.prompt_ids, wanted.max_tokens, asked.seeds[0])
    ends = [rank for rank, token in enumerate(tokens, 1) if token in wanted.stop_token_ids]
    tokens = tokens[: min(ends, default=len(tokens))]
    totals = Totals(replace(job, call_seed=asked.request_id), 0.0)
    token_bytes = one.tokenizer.token_bytes
    writer: ResponseWriter | AnswerWriter
    if isinstance(body, ChatCompletionRequest):
        writer = AnswerWriter(totals, raw, body.streamed_usage, token_bytes, stored)
    else:
        writer = ResponseWriter(totals, body, token_bytes, stored)
    written = writer.begin()
    async for index, piece in stream_choices(replace(one, ring=Exact(tokens)), totals):
        written += writer.events(index, piece)
    if isinstance(writer, ResponseWriter):
        return tokens, [read_event(b"id: %d\n%b" % (number, event)) for number, event in enumerate(written)]
    last = [read_event(b"id: %d,1\n%b" % (len(written), writer.usage()))] if body.stream else []
    return tokens, [read_event(b"id: %d\n%b" % (number, event)) for number, event in enumerate(written, 1)] + last


def check_result(name: str, kind: str, result: bytes, events: list[Event]) -> None:
    """A whole answer is what its events say."""
    if kind == "chat":
        (choice,) = msgspec.json.decode(result)["choices"]
        chunks = [one for event in events for one in event["choices"]]
        text = "".join(one["delta"].get("content", "") for one in chunks)
        found: Any = choice["message"]["content"], choice["finish_reason"]
        wanted: Any = text, chunks[-1]["finish_reason"]
    else:
        found, wanted = plain({"type": "", "response": msgspec.json.decode(result)}), plain(events[-1])
        found, wanted = found["response"], wanted["response"]
    if found != wanted:
        raise ViolationError(f"{name} is {found}, not {wanted}")


def run_now(world: World, work: Coroutine[Any, Any, Any]) -> Any:
    """Its result; it waits for nothing."""
    actions = deque[Callable[[], None]]()
    loop = VirtualLoop(lambda: world.now, lambda _seconds, action: actions.append(action))
    task = loop.create_task(work)
    while actions:
        actions.popleft()()
    return task.result()


class AnswersSchedule(Troubles):
    """Everything depends on the seed alone."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rng = rng = random.Random(f"answers {world.seed}")
        self.is_calm = rng.random() < 0.15
        self.is_stale = not self.is_calm and rng.random() < 0.3  # a gateway stops for longer than its lease
        if not self.is_calm:
            world.faults = Faults(rng.choice([0.0, 0.0, 0.03]), 0.0, rng.choice([0.0, 0.0, 0.1]))
        self.store = SimStore(world)
        self.store.failing = 0.0 if self.is_calm else rng.choice([0.0, 0.1, 0.3])
        self.workers = [self._build_worker(f"D{n}") for n in range(rng.randint(1, 2))]
        num_gateways = 1 if rng.random() < 0.15 and not self.is_stale else 2
        self.gateways = [AnswersGateway(world, f"G{n}", self.workers, self.store) for n in range(num_gateways)]
        self.processes = [self.store, *self.gateways, *self.workers]
        self._outside_clients = Clients(world, "clients")
        self.clients: list[tuple[AnswerClient, float]] = []
        self._chats = random.Random(f"chats {world.seed}")
        self._chained = rng.choice([0.0, 0.0, 0.9])  # share of clients that go on with another's answer
        self._num_left = self._num_idle = 0  # seconds since clients were served, and since nothing was left
        for _ in range(rng.randint(1, 4)):
            self._ask(0.5 + rng.random() * rng.choice([0.5, 6.0]))
        if self.is_stale:
            self._plan_pause(self.gateways[0], 1.5 + rng.random() * 2.0, LEASE_S + 1.5 + rng.random() * 3.0)
        elif not self.is_calm:
            for _ in range(rng.randint(1, 4)):
                self._plan_trouble(0.5 + rng.random() * TROUBLE_S)
        for _ in range(rng.choice([0, 2, 4])):
            name, digest, gateway = rng.choice("xy"), rng.choice(["", "A", "B"]), rng.choice(self.gateways)
            change = partial(gateway.change_adapter, name, digest)
            world.at(0.5 + rng.random() * TROUBLE_S, self.outside, -1, change)
        world.at(2 * TROUBLE_S, self.outside, -1, self._end_faults)
        self._wait_over()

    def _build_worker(self, name: str) -> AnswersDecode:
        worker = AnswersDecode(self.world, name, NUM_PAGES, MAX_RUNNING, self._rng.randint(0, 1), False, 1, 0)
        worker.pace_s = 0.8 if self.is_stale else self._rng.choice([0.02, 0.4, 0.8])
        return worker

    def _ask(self, at: float) -> None:
        rng, name = self._rng, f"r{len(self.clients)}"
        body: dict[str, Any] = {"model": MODEL, "input": rng.choice(["a", "bc", "def"]), "cache_salt": name}
        least = MOST_ANSWER if self.is_stale else 1
        body |= {"max_output_tokens": rng.randint(least, MOST_ANSWER), "stream": rng.random() < 0.8}
        body |= {"background": rng.random() < 0.4} | ({"seed": rng.randrange(1 << 30)} if rng.random() < 0.3 else {})
        client = AnswerClient(self._outside_clients, name, self.gateways, body)
        client.leaves, client.deletes = rng.choice([0.0, 0.0, 0.8]), rng.random() < 0.2
        client.cancels_s = rng.random() * 3.0 if rng.random() < 0.2 else None
        known = [one for one, _ in self.clients if one.kind != "chat" and not (one.deletes or one.cancels_s)]
        if known and rng.random() < self._chained:
            client.previous = known[-1]
            body["max_output_tokens"] = rng.randint(1, 6)  # a conversation stays within a row
        elif self._chats.random() < 0.3 and not (client.is_background or client.cancels_s):
            client = self._as_chat(client)
        self.clients.append((client, at))
        self.world.at(at, self._outside_clients, -1, lambda: self._begin(client))

    def _as_chat(self, client: AnswerClient) -> AnswerClient:
        """A client that asks for the same as a chat."""
        names = "model", "cache_salt", "stream", "seed"
        body: dict[str, Any] = {name: client.body[name] for name in names if name in client.body}
        body |= {"messages": [{"role": "user", "content": client.body["input"]}], "store": True}
        body |= {"max_tokens": client.body["max_output_tokens"]}
        body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
        chat = AnswerClient(self._outside_clients, client.name, self.gateways, body)
        chat.leaves, chat.deletes = client.leaves, client.deletes
        return chat

    def _begin(self, client: AnswerClient) -> None:
        self._outside_clients.loop.create_task(client.live())

    def _end_faults(self) -> None:
        self.store.failing, self.world.faults = 0.0, Faults(cut=self.world.faults.cut)

    def _plan_trouble(self, after: float) -> None:
        rng, gateway = self._rng, self._rng.choice(self.gateways)
        length = 0.05 + rng.random() * rng.choice([0.3, 2.0, MAX_PAUSE_S])
        match rng.choice(["crash", "crash", "pause", "pause", "drain", "cut", "late", "store", "worker"]):
            case "crash":
                self._plan_crash(gateway, after, length)
            case "pause":  # for longer than its lease, often
                self._plan_pause(gateway, after, length + rng.choice([0.0, LEASE_S]))
            case "drain":
                self.world.at(after, self.outside, -1, lambda: gateway.drain(lambda: self._crash(gateway)))
                self._plan_crash(gateway, after + 3.0, length)
            case "cut":
                self._plan_cut(gateway, self.store, after, length)
            case "late":  # what a gateway has sent is done when it is dead
                self._plan_pause(self.store, after, length)
                self._plan_crash(gateway, after + rng.random() * length, length)
            case "store":
                self._plan_crash(self.store, after, length)
            case "worker":
                self._plan_crash(rng.choice(self.workers), after, length)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _wait_over(self) -> None:
        """Until all clients are served, and then until nothing is left, but not for ever."""
        is_served = all(client.end for client, _ in self.clients)
        self._num_left = self._num_left + 1 if is_served else 0
        is_quiet = all(one.is_up and not one.is_paused for one in self.processes)
        is_idle = is_served and is_quiet and all(gateway.is_idle for gateway in self.gateways)
        shared = {row for row in self.store.shared() if row.path}
        is_idle = is_idle and all(gateway.named() == shared for gateway in self.gateways)
        has_ended = is_idle and all(row.status not in RUNNING for row, _ in self.store.rows().values())
        self._num_idle = self._num_idle + 1 if has_ended else 0
        self.world.is_over = self._num_idle > 3 or self._num_left > REST_S  # then check_end finds what is left
        self.world.at(1.0, self.outside, -1, self._wait_over)

    def check_end(self) -> None:
        rows = self.store.rows()
        if self.store.tokens_without_a_row():
            raise ViolationError("tokens are left of an answer that is gone")
        for answer_id, (row, owner) in rows.items():
            if row.status in RUNNING:
                raise ViolationError(f"{answer_id} is {row.status} for ever, of {owner}")
        for gateway in self.gateways:
            if not gateway.is_idle:
                raise ViolationError(f"{gateway.name} still has answers: {list(gateway.runs.running)}")
            gateway.check_end()
            if gateway.named() != (shared := {row for row in self.store.shared() if row.path}):
                raise ViolationError(f"{gateway.name} serves the adapters {gateway.named()}, the store has {shared}")
            if lost := set(gateway.changed.values()) - self.store.shared_ever:
                raise ViolationError(f"{gateway.name} changed adapters, and the store never had that: {lost}")
        for worker in self.workers:
            check_empty(worker)
        _, one = serve(Exact([]))
        for kept in self.store.answers.values():
            history = find_history(self.store.answers, kept)
            tokens, events = run_now(self.world, build_events(one, kept, history))
            self._check_answer(kept, rows[kept.first.id][0] if kept.first.id in rows else None, tokens, events)
        for client, _ in self.clients:
            self._check_client(client)

    def _check_answer(self, kept: Kept, row: Answer | None, tokens: list[int], events: list[Event]) -> None:
        """What the store has, and what clients have got of it, is the undisturbed answer's."""
        name = kept.first.id
        if kept.num_ends > 1:
            raise ViolationError(f"{name} ended {kept.num_ends} times")
        if kept.tokens != (tokens if kept.status in WHOLE else tokens[: len(kept.tokens)]):
            raise ViolationError(f"{name} has the tokens {kept.tokens}, not {tokens}")
        if row is not None and row.status in WHOLE:
            check_result(name, row.kind, row.result, events)
        for client in [client for client, _ in self.clients if client.id == name]:
            for number, event in enumerate(client.events):
                if not is_cut_off(event) and plain(event) != plain(events[number]):
                    raise ViolationError(f"{client.name} got {event}, not {events[number]}")

    def _check_client(self, client: AnswerClient) -> None:
        known = self.store.answers.get(client.id)
        if not client.end:
            raise ViolationError(f"{client.name} never ended")
        is_whole = client.end == "answer" and (client.has_cancelled or not any(map(is_cut_off, client.events)))
        if self.is_calm and not is_whole:
            raise ViolationError(f"{client.name} ended as {client.end} although nothing was wrong")
        if client.end == "unknown" and known is None and not client.has_tokens:
            raise ViolationError(f"{client.name} was told the id {client.id}, which the store has never had")
        if client.end == "unknown" and known is not None and not known.is_deleted:
            raise ViolationError(f"{client.name} was told that {client.id} is unknown, which the store has")
        if client.is_deleted and known is not None and not known.is_deleted:
            raise ViolationError(f"{client.id} was deleted, and is still there")


def run_answers(seed: int) -> Outcome:
    with speaking(vocabulary()), patch.object(line, "Database", SimDatabase):
        return run_world(seed, AnswersSchedule)
