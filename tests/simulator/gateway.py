"""A gateway: the real queue, routing, request machine, attempts and worker states, with virtual calls and clients.

It makes the calls they decide on, as admission.py, attempt.py and the links do, and nothing more.
"""

from collections.abc import Sequence
from typing import Any

from gateway.ring.attempt_state import AttemptState
from gateway.ring.decode_state import DecodeState
from gateway.ring.generation import Tokens
from gateway.ring.queue import Queue, Waiter
from gateway.ring.reasons import Reason, as_error
from gateway.ring.request_machine import Phase, Request
from gateway.ring.request_steps import Event, Refused, update_of
from gateway.ring.routing import Router
from gateway.ring.worker_state import RETRY_S, WorkerState
from protos import decode_pb2, prefill_pb2
from tests.simulator.decode import SimDecode, Stream
from tests.simulator.prefill import SimPrefill
from tests.simulator.values import Client, Work
from tests.simulator.world import Action, Failure, Process, ViolationError, World

HEARTBEAT_S = 3.0  # polls are a third of it apart, at most POLL_S
STALL_S = 60.0
PATIENCE_S = 4.0
TIMEOUT_S = 12.0


class SimGateway(Process):
    """One gateway and everything it owns."""

    def __init__(
        self, world: World, name: str, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode],
        local_prefill_max_tokens: int, uses_cache: bool,
    ) -> None:  # fmt: skip
        self._prefills = {worker.name: worker for worker in prefills}
        self._decodes = {worker.name: worker for worker in decodes}
        self._routing = (local_prefill_max_tokens, uses_cache)
        self.num_open = 0  # requests announced and not ended; while it is 0, no worker is polled
        super().__init__(world, name)

    def boot(self) -> None:
        limits = HEARTBEAT_S, STALL_S
        decodes = [DecodeState(name, *limits) for name in self._decodes]
        self.states: list[WorkerState] = [*(WorkerState("prefill", name, *limits) for name in self._prefills), *decodes]
        self.queue = Queue(self.states, Router(*self._routing), 1, PATIENCE_S)
        self.queue.on_change = self._pump
        self.works: list[Work] = []
        self._is_changed = True  # changed since the last check
        self._arriving: list[Client] = []  # connected, not yet read
        self._polled: set[WorkerState] = set()  # polls in flight
        self._names = 0
        for state in self.states:
            state.on_change = self._pump
            self._start(state)

    def _start(self, state: WorkerState) -> None:
        if isinstance(state, DecodeState):
            state.on_unwanted = lambda: self._abort(state)
        if self.num_open:
            self._poll(state)
            if isinstance(state, DecodeState):
                self._open_stream(state)
        state.on_hurry = lambda: self._plan_poll(state)

    def check(self) -> None:
        if not self._is_changed:
            return
        self._is_changed = False
        self.queue.check()
        waiting = {work.waiter for work in self.works}
        if self.queue.num_waiting + self.queue.num_placed > len(waiting):
            raise ViolationError(f"{self.name} keeps places of requests that are over")

    def crash(self) -> None:
        for client in [*(work.client for work in self.works), *self._arriving]:
            self._dismiss(client, "gateway died")
        self.works = []
        super().crash()

    def _new_name(self) -> int:
        self._names += 1
        return self._names

    # -- workers -------------------------------------------------------------------------------------------------

    def _poll(self, state: WorkerState) -> None:
        worker = (self._prefills if state.role == "prefill" else self._decodes)[state.address]

        def learn(status: Any) -> None:
            self._polled.discard(state)
            if isinstance(status, Failure):
                state.miss("is silent", self.world.now)
            else:
                state.learn(status, self.world.now)
            self._plan_poll(state)

        self._polled.add(state)
        self.world.call(self, worker, lambda answer: answer(worker.status()), learn, HEARTBEAT_S)

    def _plan_poll(self, state: WorkerState) -> None:
        moment = state.next_poll

        def poll() -> None:
            if state.next_poll == moment and state not in self._polled:
                self._poll(state)

        if self.num_open and state not in self._polled:
            self.later(max(moment - self.world.now, 0.0), poll)

    def _open_stream(self, state: DecodeState) -> None:
        """As DecodeLink does."""
        if not self.num_open:
            return
        worker, name = self._decodes[state.address], f"{self.incarnation}.{self._new_name()}"

        def retry() -> None:
            if state.stream == name:
                state.close_stream("lost its stream")
            self.later(RETRY_S, lambda: self._open_stream(state))

        def opened(incarnation: Any) -> None:
            if isinstance(incarnation, Failure):
                stream.break_off(worker)
                retry()
            elif not stream.is_broken:
                state.open_stream(name, incarnation)

        def on_delta(delta: decode_pb2.SessionDelta) -> None:
            if state.stream == name:
                state.deliver(delta, self.world.now)

        stream = Stream(name, self, on_delta, lambda: retry() if state.stream == name else None)
        self.world.call(self, worker, lambda answer: worker.steps(stream, answer), opened, HEARTBEAT_S)

    def _abort(self, state: DecodeState) -> None:
        worker, stream = self._decodes[state.address], state.stream
        for handle in state.take_unwanted():
            self.world.send(self, worker, lambda handle=handle: worker.abort(stream, handle))  # type: ignore[misc]

    # -- requests ------------------------------------------------------------------------------------------------

    def connect(self, client: Client, submit: Action) -> None:
        """A client connects; a paused gateway notices later, a dead one never."""
        if self.is_up:
            self._arriving.append(client)
            self.later(0.0, submit)
        else:
            self._dismiss(client, "refused")

    def _dismiss(self, client: Client, how: str) -> None:
        client.finish(how, self.world.now)
        self.num_open -= 1

    def submit(self, request: Request, client: Client) -> None:
        self._arriving.remove(client)
        work = Work(request, client)
        self.works.append(work)
        self.later(request.deadline - self.world.now, lambda: self._time_out(work))
        self._enqueue(work)

    def leave(self, client: Client) -> None:
        """The client disconnects."""
        for work in [work for work in self.works if work.client is client]:
            self._let_go(work)
            self._end(work, "left")

    def _enqueue(self, work: Work) -> None:
        work.waiter = self.queue.join(work.request)
        self._pump()

    def _pump(self) -> None:
        """Like Admission.pump: requests notice a decision a moment later. Called whenever places change."""
        self._is_changed = True
        for waiter in self.queue.decide(self.world.now):
            self.later(0.0, lambda waiter=waiter: self._begin(waiter))  # type: ignore[misc]

    def _begin(self, waiter: Waiter) -> None:
        work = next((work for work in self.works if work.waiter is waiter), None)
        if work is None:
            return
        if waiter.reason is not None:
            self._refuse(work, waiter.reason)
            return
        attempt = work.attempt = AttemptState(self.queue, waiter)
        attempt.session.on_event = lambda: self._read_inbox(work)
        self._reserve(work, attempt, attempt.begin(self.world.now))

    def _refuse(self, work: Work, reason: Reason) -> None:
        work.request.step(reason, self.world.now)
        self._let_go(work)
        self._go_on(work)

    def _time_out(self, work: Work) -> None:
        if work not in self.works:
            return
        if work.attempt is None:
            self._refuse(work, Reason("not ready", "no worker had room"))
        elif work.request.phase is Phase.RUNNING:
            self._read_inbox(work)
        else:
            self.later(0.1, lambda: self._time_out(work))

    def _read_inbox(self, work: Work) -> None:
        """Like Attempt.next."""
        while work.attempt is not None and work.request.phase is Phase.RUNNING:
            event = work.attempt.next_event(self.world.now)
            if event is None:
                return
            self._step(work, update_of(event) if isinstance(event, decode_pb2.SessionDelta) else event)

    def _step(self, work: Work, event: Event) -> None:
        """Apply the attempt's decision on `event`."""
        attempt, request = work.attempt, work.request
        assert attempt is not None
        self.world.note("request", work.client.name, request.attempt, request.phase.value, event)
        for command in attempt.step(event, self.world.now):
            if isinstance(command, Tokens):
                work.client.take(command)
            else:
                self._prefill(work, attempt, command)
        if not attempt.is_open:
            self._let_go(work)
            self._go_on(work)

    def _go_on(self, work: Work) -> None:
        """After an attempt: retry, or end."""
        failure = work.request.failure
        if work.request.phase is Phase.WAITING:
            self._enqueue(work)
        else:
            self._end(work, f"error {as_error(failure)}" if failure else "answer")

    def _end(self, work: Work, how: str) -> None:
        self.works.remove(work)
        self._dismiss(work.client, how)

    # -- one attempt ---------------------------------------------------------------------------------------------

    def _reserve(self, work: Work, attempt: AttemptState, request: decode_pb2.ReserveRequest) -> None:
        state = attempt.places.decode
        worker = self._decodes[state.address]

        def answered(answer: Any) -> None:
            if work.attempt is not attempt:  # it has ended meanwhile
                return
            if isinstance(answer, Failure):
                if answer.why != "deadline":
                    state.doubt(self.world.now)
                answer = Refused("decode", "absent", answer.why)
            self._step(work, answer)
            self._read_inbox(work)

        timeout = min(HEARTBEAT_S, self._remaining(work))
        self.world.call(self, worker, lambda answer: worker.reserve(request, answer), answered, timeout)

    def _prefill(self, work: Work, attempt: AttemptState, request: prefill_pb2.RunRequest) -> None:
        assert attempt.places.prefill is not None
        worker = self._prefills[attempt.places.prefill.address]
        call = work.run_call = self._new_name()
        me, timeout = (self.name, self.epoch), self._remaining(work)

        def answered(answer: Any) -> None:
            if work.attempt is attempt:
                work.run_call = 0
                attempt.take_prefill(
                    Refused("prefill", "failed", answer.why) if isinstance(answer, Failure) else answer
                )

        self.world.call(self, worker, lambda answer: worker.run(call, me, request, timeout, answer), answered, timeout)

    def _remaining(self, work: Work) -> float:
        return max(work.request.deadline - self.world.now, 0.001)

    def _let_go(self, work: Work) -> None:
        """As at the end of an attempt or a wait: removes its state here, and soon on the workers."""
        attempt, work.attempt = work.attempt, None
        waiter, work.waiter = work.waiter, None
        if attempt is None and waiter is not None:
            self.queue.leave(waiter)
        if attempt is None:
            return
        if work.run_call and attempt.places.prefill is not None:
            prefill, call = self._prefills[attempt.places.prefill.address], work.run_call
            work.run_call = 0
            self.world.send(self, prefill, lambda: prefill.cancel(call))
        attempt.close()
