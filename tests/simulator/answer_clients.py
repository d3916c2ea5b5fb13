"""Clients of stored answers: they ask, lose their connections, and read on at any gateway."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bench.simulate.virtual_time import VirtualLoop
from gateway.access.keys import ANYBODY
from gateway.api.http.errors import RESPONSES_PATH, error_response
from gateway.api.openai.types import ChatCompletionRequest
from gateway.api.responses.types import ResponsesRequest
from gateway.errors import ApiError
from gateway.fair_turns import LoopTurn
from gateway.store.keeper import AnswerKeeper
from gateway.store.kinds import Kind
from tests.simulator.answer_gateway import AnswersGateway
from tests.simulator.world import KEEPALIVE_S, Process, ViolationError

SILENCE_S = 6.0  # until a client gives a connection up; pings come seldom
PATIENCE_S = 90.0  # the longest that an answer may take
WHOLE = ("completed", "incomplete")
CHAT_CHUNK, CHAT_END = "chat.chunk", "chat.end"  # what `read_event` calls them
ENDS = {"response.completed", "response.incomplete", "response.failed", CHAT_END}
Event = dict[str, Any]
Asked = Callable[[AnswerKeeper, Request], Awaitable[Response]]


class BrokenError(Exception):
    """The connection has ended, or says nothing."""


class RefusedError(Exception):
    """A reply that is not 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status} {body[:120]!r}")
        self.status = status


class Clients(Process):
    """Where they run."""

    def boot(self) -> None:
        self.loop = VirtualLoop(lambda: self.world.now, lambda delay, action: self.later(delay, action))


class Exchange:
    """One request to one incarnation of a gateway, and its reply: in order, until a message is lost."""

    def __init__(self, clients: Clients, gateway: AnswersGateway, asked: Asked) -> None:
        self._clients, self._gateway, self._asked, self._world = clients, gateway, asked, clients.world
        self._inbox: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()  # None: it is broken
        self._arrival = 0.0
        self._is_broken = self._has_arrived = False
        self._has_left = asyncio.Event()
        if not self._world.send(clients, gateway, self._arrive, self.break_off):
            self.break_off()

    def _arrive(self) -> None:
        if self._has_arrived or self._is_broken:
            return
        self._has_arrived, self._epoch = True, self._gateway.epoch
        self._gateway.connections.add(self.break_off)
        self._gateway.loop.create_task(self._serve())

    async def _serve(self) -> None:
        gateway, is_read = self._gateway, False
        state = {"key": ANYBODY, "turn": LoopTurn(), "request_id": f"req-{gateway.new_name()}"}
        state["arrived_s"] = gateway.loop.time()

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self._has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self._push(message)

        scope = {"type": "http", "method": "POST", "path": RESPONSES_PATH, "headers": [], "state": state}
        request = Request(scope, receive)
        await request.body()
        try:
            response = await self._asked(gateway.keeper, request)
        except ApiError as error:
            response = error_response(error, RESPONSES_PATH)
        except ClientDisconnect:
            return
        await response(scope, receive, send)
        self.break_off()

    def _push(self, message: Mapping[str, Any] | None) -> None:
        world = self._world
        if not self._is_broken:
            if message is not None and world.is_lost(self._gateway.name, self._clients.name):
                self.break_off()
                return
            self._arrival = max(self._arrival + 1e-6, world.now + world.delay())
            world.at(self._arrival - world.now, self._clients, -1, lambda: self._inbox.put_nowait(message))

    def break_off(self) -> None:
        """No more comes; the client learns of that."""
        self._push(None)
        self._is_broken = True
        self._gateway.connections.discard(self.break_off)

    def leave(self) -> None:
        """The client closes it."""
        self._is_broken = True
        if self._has_arrived:
            world, delay = self._world, self._world.delay()
            delay += KEEPALIVE_S if world.is_cut(self._clients.name, self._gateway.name) else 0.0
            world.at(delay, self._gateway, self._epoch, self._has_left.set)

    async def next(self, patience_s: float = SILENCE_S) -> Mapping[str, Any]:
        message = None
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                message = await self._inbox.get()
        if message is None:
            raise BrokenError
        return message


class AnswerClient:
    """Asks for one answer, and checks what it gets of it."""

    def __init__(self, clients: Clients, name: str, gateways: Sequence[AnswersGateway], body: dict[str, Any]) -> None:
        self.name, self.body = name, body
        self.kind: Kind = "chat" if "messages" in body else "responses"
        self.is_background = bool(body.get("background"))
        self.events: list[Event] = []
        self.whole: Event | None = None  # the answer, where it is not streamed
        self.end, self.ended_at, self.has_ended = "", 0.0, asyncio.Event()
        self.is_deleted = self.has_cancelled = False
        self.leaves, self.deletes = 0.0, False  # share of connections that it leaves early
        self.cancels_s: float | None = None
        self.previous: AnswerClient | None = None  # the turn before this one
        self._clients, self._gateways, self._world = clients, gateways, clients.world
        self._rng = random.Random(f"{name} {clients.world.seed}")

    @property
    def id(self) -> str:
        if self.events:
            return str(self.events[0].get("response", self.events[0])["id"])
        return str(self.whole["id"]) if self.whole else ""

    @property
    def is_done(self) -> bool:
        return any(event["type"] in ENDS or "error" in event for event in self.events[-2:])

    @property
    def has_tokens(self) -> bool:
        """Or the end: it has had more than the answer's beginning."""
        return len(self.events) > (1 if self.kind == "chat" else 2)

    @property
    def is_whole(self) -> bool:
        """It has the answer to its end."""
        last = self.events[-1].get("response", {}) if self.events else self.whole or {}
        return self.end == "answer" and last.get("status") in WHOLE

    async def live(self) -> None:
        """Sets how it ended."""
        try:
            self.end = await self._live()
        except RefusedError as error:
            self.end = f"error {error}"
        except BrokenError:
            self.end = "lost"
        except ViolationError as error:
            self._world.violation = error
        self.ended_at = self._world.now
        self.has_ended.set()
        self._world.note("ends", self.name, self.end)

    async def _live(self) -> str:
        if (before := self.previous) is not None:
            await before.has_ended.wait()
            if not before.is_whole:
                return "not asked"
            self.body["previous_response_id"] = before.id
        until = self._world.now + PATIENCE_S
        exchange = self._open(self._ask)
        if not self.body.get("stream"):
            self.whole = await self._read_whole(exchange)
            if not self.is_background:
                return "answer"
        else:
            try:
                await self._read(exchange, [])
            except BrokenError:
                if not self.events:
                    raise
        if self.cancels_s is not None and self.is_background:
            await asyncio.sleep(self.cancels_s)
            self.has_cancelled = True
            with suppress(RefusedError, BrokenError):
                await self._read_whole(self._open(lambda keeper, request: self._cancel(keeper)))
        while not self.is_done:
            if self._world.now > until:
                raise ViolationError(f"{self.name} has {len(self.events)} events of {self.id} and gets no more")
            await asyncio.sleep(self._rng.random())
            with suppress(BrokenError):
                if not await self._read_on(self._rng.random() < 0.2):
                    return "unknown"
        with suppress(BrokenError):
            await self._read_on(is_from_begin=True)
        if self.deletes:
            with suppress(RefusedError, BrokenError):
                await self._read_whole(self._open(lambda keeper, request: self._delete(keeper)))
                self.is_deleted = True
        return "answer"

    async def _read_on(self, is_from_begin: bool) -> bool:
        """At any gateway. False: none of them knows the answer, and none can go on with it."""
        known = [] if is_from_begin else list(self.events)
        after = known[-1]["sse_id"] if known else ""
        exchange = self._open(lambda keeper, _: keeper.events(self.kind, self.id, ANYBODY, after))
        try:
            await self._read(exchange, known)
        except RefusedError as error:
            if error.status not in (404, 429, 503):
                raise
            return error.status != 404 or any(self.id in one.runs.running for one in self._gateways)
        return True

    def _open(self, asked: Asked) -> Exchange:
        return Exchange(self._clients, self._rng.choice(self._gateways), asked)

    async def _ask(self, keeper: AnswerKeeper, request: Request) -> Response:
        if self.kind == "chat":
            return await keeper.complete(ChatCompletionRequest(**self.body), request)
        return await keeper.create(ResponsesRequest(**self.body), request)

    async def _cancel(self, keeper: AnswerKeeper) -> Response:
        return Response(await keeper.cancel(self.id, ANYBODY))

    async def _delete(self, keeper: AnswerKeeper) -> Response:
        await keeper.delete(self.kind, self.id, ANYBODY)
        return Response(b"{}")

    async def _read_whole(self, exchange: Exchange) -> Event:
        status, body, is_more = 0, b"", True
        try:
            while is_more:
                message = await exchange.next(PATIENCE_S)
                status = message.get("status", status)
                body += message.get("body", b"")
                is_more = "status" in message or message.get("more_body", False)
        finally:
            exchange.leave()
        if status != 200:
            raise RefusedError(status, body)
        found: Event = json.loads(body)
        return found

    async def _read(self, exchange: Exchange, known: list[Event]) -> None:
        """Adds events. `known`: those before them; an own list is compared with what it had before."""
        num_left = self._rng.randrange(1, 12) if self._rng.random() < self.leaves else 10**6
        seen, text, status, is_more = list(known), b"", 0, True
        try:
            while is_more and num_left > 0:
                message = await exchange.next()
                status = message.get("status", status)
                text += message.get("body", b"")
                is_more = "status" in message or message.get("more_body", False)
                if status == 200:
                    *blocks, text = text.split(b"\n\n")
                    new = [event for block in blocks if (event := read_event(block))]
                    num_left -= len(new)
                    for event in new:
                        self._take(seen, event)
        finally:
            exchange.leave()
        if status != 200:
            raise RefusedError(status, text)

    def _take(self, seen: list[Event], event: Event) -> None:
        """One more event of a reading that has had those in `seen`."""
        if "sequence_number" not in event:  # an error of reading it
            return
        self._world.note("event", self.name, event["sequence_number"], event["type"])
        if is_cut_off(event) and event["sequence_number"] < len(seen):
            del seen[event["sequence_number"] :]
        if event["sequence_number"] != len(seen):
            raise ViolationError(f"{self.name} gets event {event['sequence_number']} behind {len(seen)} others")
        seen.append(event)
        if is_cut_off(event):  # another gateway may have sent more before, perhaps all
            if not self.is_done or is_cut_off(self.events[-1]):
                self.events[len(seen) - 1 :] = [event]
            return
        if len(seen) > len(self.events):
            if self.is_done:
                raise ViolationError(f"{self.name} gets {event['type']} behind the end")
            self.events.append(event)
        elif plain(event) != plain(self.events[len(seen) - 1]):
            raise ViolationError(f"{self.name} had {self.events[len(seen) - 1]}, and now gets {event}")


def read_event(block: bytes) -> Event:
    """Empty: a ping, or what follows a chat's last chunk. A chat's chunks get a name and a number as events have."""
    lines = dict(line.split(": ", 1) for line in block.decode().split("\n") if line and not line.startswith(":"))
    if lines.get("data", "[DONE]") == "[DONE]":
        return {}
    event: Event = json.loads(lines["data"])
    if "id" not in lines:
        return event
    event["sse_id"] = lines["id"]
    if "type" not in event:
        kind = "error" if "error" in event else CHAT_CHUNK if event["choices"] else CHAT_END
        event |= {"type": kind, "sequence_number": sum(map(int, lines["id"].split(","))) - 1}
    elif lines["id"] != str(event["sequence_number"]):
        raise ViolationError(f"an event has the id {lines['id']}: {event}")
    return event


def is_cut_off(event: Event) -> bool:
    """It ends an answer that failed, or was cancelled."""
    return event["type"] == "error" or event.get("response", {}).get("status") in ("failed", "cancelled")


def plain(event: Event) -> Event:
    """Without what differs where an answer is computed once more."""
    if event["type"] == CHAT_END:
        return {**event, "usage": {**event["usage"], "prompt_tokens_details": None}}
    if "response" not in event:
        return event
    whole = dict(event["response"], completed_at=None)
    whole["usage"] = {**(whole.get("usage") or {}), "input_tokens_details": None}
    return {**event, "response": whole}
