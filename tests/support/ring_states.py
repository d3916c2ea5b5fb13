"""The ring's pure parts, with the test as clock and workers: a queue, states of workers, attempts."""

from collections.abc import Sequence
from typing import Any

from gateway.ring.attempt_state import AttemptState, Command
from gateway.ring.decode_state import DecodeState
from gateway.router.engine_client import Generation, Tokens
from gateway.ring.queue import Queue, Waiter
from gateway.ring.request_machine import Request
from gateway.ring.request_steps import SessionUpdate, update_of
from gateway.ring.routing import Router
from gateway.ring.worker_state import WorkerState
from protos import decode_pb2, kv_pb2
from runtime.config_parts import NoPrefill
from tests.support.dispatching import generation
from wire.messages import unpack_logprobs

HEARTBEAT_S, STALL_S, TIMEOUT_S = 10.0, 60.0, 100.0
LAYOUT = kv_pb2.KvLayout(weights="w", page_tokens=16)


class Hall:
    """Workers D1, D2, ..., P1, P2, ... that have answered a poll, and the queue in front of them."""

    def __init__(
        self, decode: int = 1, prefill: int = 0, max_running: int = 4, max_queue: int = 8, patience_s: float = 0.0,
        no_prefill: NoPrefill = "fallback", expects_prefill: bool = True,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.max_running = max_running
        self.patience_s = patience_s
        limits = HEARTBEAT_S, STALL_S
        self.decodes = [DecodeState(f"D{number}", *limits) for number in range(1, decode + 1)]
        self.prefills = [WorkerState("prefill", f"P{number}", *limits) for number in range(1, prefill + 1)]
        self.queue = Queue(
            [*self.prefills, *self.decodes],
            Router(0, no_prefill=no_prefill, expects_prefill=expects_prefill),
            max_queue,
            patience_s,
        )
        for state in self.decodes:
            state.open_stream(f"to {state.address}", state.address)
        for one in (*self.decodes, *self.prefills):
            self.poll(one)

    def poll(self, state: WorkerState, **fields: Any) -> None:
        """The worker answers a poll. `fields`: of its status."""
        peer = kv_pb2.Peer(incarnation=state.address, layout=LAYOUT, num_pages=1000)
        status: dict[str, Any] = {"peer": peer, "max_running": self.max_running, "free_pages": 100} | fields
        state.learn(decode_pb2.WorkerStatus(**status), self.now)

    def join(self, wanted: Generation | str) -> Waiter:
        """Queue a request, under this name if given."""
        wanted = generation(wanted) if isinstance(wanted, str) else wanted
        return self.rejoin(Request(wanted, self.now + TIMEOUT_S, self.patience_s, self.now))

    def rejoin(self, request: Request) -> Waiter:
        return self.queue.join(request)

    def decide(self) -> list[str]:
        """Names of the requests that leave the queue, in order."""
        decided = self.queue.decide(self.now)
        self.queue.check()
        return [waiter.request.generation.request_id for waiter in decided]

    def begin(self, wanted: Generation | str | Waiter) -> "Try":
        """Start an attempt of a request that gets its places at once, or already has some."""
        waiter = wanted if isinstance(wanted, Waiter) else self.join(wanted)
        if waiter.places is None:
            assert waiter.request.generation.request_id in self.decide()
        return Try(self, AttemptState(self.queue, waiter))


class Try:
    """One attempt; the test answers its calls."""

    def __init__(self, hall: Hall, state: AttemptState) -> None:
        self.hall = hall
        self.state = state
        self.request = state.request
        self.reserve = state.begin(hall.now)

    def step(self, event: Any) -> list[Command]:
        return self.state.step(event, self.hall.now)

    def reserved(self, needs_prefill: bool = False, num_cached: int = 0) -> list[Command]:
        ticket = kv_pb2.Ticket(session=1, attempt=self.request.attempt, begin=num_cached, end=2)
        return self.step(decode_pb2.ReserveResponse(ticket=ticket, needs_prefill=needs_prefill))

    def deliver(self, token_ids: Sequence[int] = (), finish_reason: str = "", error: str = "", **fields: Any) -> None:
        """The decode worker's stream reports the session."""
        session = self.state.session
        delta = decode_pb2.SessionDelta(
            handle=session.handle, attempt=self.reserve.attempt, token_ids=token_ids, finish_reason=finish_reason,
            error=error, **fields,
        )  # fmt: skip
        self.state.places.decode.deliver(delta, self.hall.now)

    def read(self) -> list[Tokens]:
        """What the client receives of all that has arrived."""
        found: list[Tokens] = []
        while self.state.is_open and (event := self.state.next_event(self.hall.now)) is not None:
            commands = self.step(_unpacked(event) if isinstance(event, decode_pb2.SessionDelta) else event)
            found += [command for command in commands if isinstance(command, Tokens)]
        return found

    def close(self) -> list[str]:
        """End the attempt. Returns the names of the requests that get its places."""
        self.state.close()
        return self.hall.decide()


def _unpacked(delta: decode_pb2.SessionDelta) -> SessionUpdate:
    logprobs, of_prompt = ([unpack_logprobs(one) for one in many] for many in (delta.logprobs, delta.prompt_logprobs))
    return update_of(delta, logprobs, of_prompt)
