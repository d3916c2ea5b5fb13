"""A gateway: the real queue, routing and request machine, between virtual links and clients.

Stands in for what awaits: dispatcher.py, attempt.py and the links. It does what the machine decides, no more.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from gateway.errors import ApiError, not_ready
from gateway.ring.admission import Admission, Waiter
from gateway.ring.policy import WorkerView
from gateway.ring.request_actions import Emit, Forget, GiveBack, Leave, Prefill, Remember, Reserve
from gateway.ring.request_events import (
    Event,
    Lost,
    News,
    Placed,
    Prefilled,
    Refused,
    Reserved,
    Role,
    TimedOut,
    Unplaced,
)
from gateway.ring.request_machine import Phase, Request
from gateway.ring.routing import Router
from tests.simulator.decode import SimDecode, Stream
from tests.simulator.prefill import HEARTBEAT_S, SimPrefill
from tests.simulator.values import Client, Decision, Link, Work
from tests.simulator.world import Action, Failure, Process, ViolationError, World
from wire.page_keys import TOKEN_BYTES
from worker.sequences import Job, Update

POLL_S = 1.0
RETRY_S = 0.2
PATIENCE_S = 4.0
TIMEOUT_S = 12.0


class SimGateway(Process):
    """One gateway and all it holds."""

    def __init__(
        self, world: World, name: str, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode],
        local_prefill_max_tokens: int, uses_cache: bool,
    ) -> None:  # fmt: skip
        self._workers = (prefills, decodes)
        self._routing = (local_prefill_max_tokens, uses_cache)
        self.num_open = 0  # requests announced but not ended: while there are none, nobody is polled
        super().__init__(world, name)

    def boot(self) -> None:
        prefills, decodes = self._workers
        self._on_change: Callable[[], None] = lambda: None
        self.links = [
            *(Link("prefill", worker, self.world, self._change) for worker in prefills),
            *(Link("decode", worker, self.world, self._change) for worker in decodes),
        ]
        fleet: Any = SimpleNamespace(
            views=self._views,
            subscribe=self._subscribe,
            prefill={link.worker.name: link for link in self.links if link.role == "prefill"},
            decode={link.worker.name: link for link in self.links if link.role == "decode"},
        )
        self.router = Router(*self._routing)
        self.admission = Admission(fleet, self.router, 1, PATIENCE_S)
        self.works: list[Work] = []
        self._sessions: dict[tuple[str, int], Work] = {}  # (stream, handle) |-> request
        self._arriving: list[Client] = []  # connected, not heard yet
        self._names = 0
        for link in self.links if self.num_open else ():
            self._poll(link)
            if isinstance(link.worker, SimDecode):
                self._open_stream(link, link.worker)

    def _subscribe(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def _change(self) -> None:
        self._on_change()

    def check(self) -> None:
        held: list[Any] = [link for work in self.works if work.waiter and work.places for link in work.places._held]
        if [link.num_mine for link in self.links] != [held.count(link) for link in self.links]:
            raise ViolationError(f"{self.name} miscounts its requests: {[link.worker.name for link in held]}")

    def crash(self) -> None:
        for work in self.works:
            self._dismiss(work.client, "gateway died")
        self.works = []
        for client in self._arriving:
            self._dismiss(client, "gateway died")
        super().crash()

    def _new_name(self) -> int:
        self._names += 1
        return self._names

    def _new_handle(self, work: Work) -> int:
        return self._new_name()

    # -- links ---------------------------------------------------------------------------------------------------

    def _views(self) -> list[WorkerView]:
        return [link.view() for link in self.links]

    def _poll(self, link: Link) -> None:
        worker = link.worker

        def status(answer: Any) -> None:
            answer((worker.incarnation, worker.table.cache.num_spare))

        def learn(status: Any) -> None:
            if not isinstance(status, Failure):
                link.incarnation, link.free_pages = status
                link.heard, link.is_doubted = self.world.now, False
            elif self.world.now - link.heard > HEARTBEAT_S:
                self._lose_all(link)
            link.is_full = False
            self._change()
            if self.num_open:
                self.later(RETRY_S if isinstance(status, Failure) else POLL_S, lambda: self._poll(link))

        self.world.call(self, worker, status, learn, HEARTBEAT_S)

    def _open_stream(self, link: Link, worker: SimDecode) -> None:
        name = f"{self.incarnation}.{self._new_name()}"
        if not self.num_open:
            return

        def retry() -> None:
            if link.stream == name:
                link.stream = ""
                self._lose_all(link)
            self.later(RETRY_S, lambda: self._open_stream(link, worker))

        def opened(incarnation: Any) -> None:
            if isinstance(incarnation, Failure):
                stream.break_off(worker)
                retry()
            elif not stream.is_broken:
                link.stream, link.stream_incarnation = name, incarnation
                self._change()

        stream = Stream(name, self, lambda update: self._deliver(name, worker, update), lambda: on_end())

        def on_end() -> None:
            if link.stream == name:
                retry()

        self.world.call(self, worker, lambda answer: worker.steps(stream, answer), opened, HEARTBEAT_S)

    def _lose_all(self, link: Link) -> None:
        for work in sorted(self.works, key=lambda work: work.request.silent_since):
            if work.decode is link and work.handle:
                if work.stream != link.stream:
                    work.places.release(work.places.decode)
                self._hear(work, Lost(f"{link.worker.name} is lost"))

    def _deliver(self, stream: str, worker: SimDecode, update: Update) -> None:
        job = update.sequence.job
        work = self._sessions.get((stream, job.handle))
        if work is None:
            if not update.finish_reason:
                self.world.send(self, worker, lambda: worker.abort(stream, job.handle))
            return
        if update.finish_reason:
            work.is_over = True
            work.places.release(work.places.decode)
        self._hear(work, News(job.attempt, update.token_ids, update.finish_reason, update.error))

    def _hear(self, work: Work, news: News | Lost) -> None:
        work.inbox.append(news)
        self._read_inbox(work)

    def _read_inbox(self, work: Work) -> None:
        while work.inbox and work.request.phase is Phase.RUNNING:
            self._feed(work, work.inbox.pop(0))

    # -- requests ------------------------------------------------------------------------------------------------

    def connect(self, client: Client, submit: Action) -> None:
        """A client asks; a paused gateway hears of it later, a dead one never."""
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
        self._queue(work)

    def leave(self, client: Client) -> None:
        """The client goes away."""
        for work in list(self.works):
            if work.client is client:
                self._let_go(work)
                self._end(work, "left")

    def _queue(self, work: Work) -> None:
        """As Admission.place."""
        work.waiter = Waiter(work.request, self._decision(work))
        self.admission.join(work.waiter)

    def _decision(self, work: Work) -> Any:
        attempt = work.request.attempt

        def hear(event: Callable[[], Event | None]) -> None:
            def act() -> None:
                if work in self.works and work.request.attempt == attempt and work.request.phase is Phase.WAITING:
                    found = event()
                    if found is not None:
                        self._feed(work, found)

            self.later(0.0, act)

        return Decision(lambda: hear(lambda: self._begin(work)), lambda error: hear(lambda: self._refuse(work, error)))

    def _begin(self, work: Work) -> Placed:
        """As Attempt.run."""
        places: Any = work.places
        decode, prefill = places.decode, places.prefill
        work.decode, work.prefill = decode, prefill
        work.stream, work.handle, work.is_over = decode.stream, self._new_handle(work), False
        self._sessions[work.stream, work.handle] = work
        work.inbox.clear()
        local = places.placement.local_prefill_max_tokens
        return Placed(decode.stream_incarnation, prefill.incarnation if prefill else None, local)

    def _refuse(self, work: Work, error: ApiError) -> Unplaced:
        self._leave_queue(work)
        return Unplaced(error)

    def _time_out(self, work: Work) -> None:
        if work not in self.works:
            return
        if work.request.phase is Phase.RUNNING:
            self._feed(work, TimedOut())
        elif work.request.phase is Phase.WAITING and not work.waiter.decided.done():
            self._feed(work, self._refuse(work, not_ready("no worker had room")))
        else:
            self.later(0.1, lambda: self._time_out(work))

    def _leave_queue(self, work: Work) -> None:
        """As the end of Admission.place."""
        waiter, work.waiter = work.waiter, None
        if waiter is not None:
            self.admission.leave(waiter)

    def _feed(self, work: Work, event: Event) -> None:
        """The machine's decision on `event`, done."""
        request = work.request
        self.world.note("request", work.client.name, request.attempt, request.phase.value, event)
        for action in request.step(event, self.world.now):
            match action:
                case Reserve():
                    self._reserve(work, action)
                case Prefill():
                    self._prefill(work, action)
                case GiveBack(role, is_refused):
                    self._give_back(work, role, is_refused)
                case Remember(role):
                    self.admission.remember(work.places, request, role)
                case Forget(num_cached):
                    self.admission.correct(work.places, request, num_cached)
                case Emit(tokens):
                    work.client.take(tokens)
                case Leave():
                    self._let_go(work)
        if request.phase is Phase.ENDED:
            self._end(work, f"error {request.error}" if request.error else "answer")
        elif request.phase is Phase.WAITING and work.waiter is None:
            self._queue(work)

    def _end(self, work: Work, how: str) -> None:
        if work in self.works:
            self.works = [other for other in self.works if other is not work]
            self._dismiss(work.client, how)

    # -- one attempt ---------------------------------------------------------------------------------------------

    def _reserve(self, work: Work, action: Reserve) -> None:
        assert work.decode is not None
        link, handle, attempt = work.decode, work.handle, work.request.attempt
        worker = link.worker
        assert isinstance(worker, SimDecode)
        wanted = self._build_job(work, worker, action)

        def answered(answer: Any) -> None:
            if work.handle != handle or work.request.attempt != attempt:  # left meanwhile
                return
            if isinstance(answer, Failure):
                link.is_doubted = link.is_doubted or answer.why != "deadline"
                answer = Refused("decode", "absent", answer.why)
            if isinstance(answer, Refused):
                self._feed(work, answer)
            else:
                work.ticket, needs_prefill = answer
                self._feed(work, Reserved(needs_prefill, work.ticket.begin))
                self._read_inbox(work)

        timeout = min(HEARTBEAT_S, max(work.request.deadline - self.world.now, 0.001))
        self.world.call(self, worker, lambda answer: worker.reserve(wanted, answer), answered, timeout)

    def _build_job(self, work: Work, worker: SimDecode, action: Reserve) -> Job:
        """As DecodeService does."""
        generation = work.request.generation
        drafter, max_draft_tokens = worker.resolve(generation.speculation.drafter)
        return Job(
            request_id=generation.request_id,
            prompt=action.prompt,
            end=len(action.prompt) // TOKEN_BYTES - 1,
            max_tokens=action.max_tokens,
            cache_salt=generation.cache_salt,
            local_prefill_max_tokens=action.local_prefill_max_tokens,
            gateway=work.stream,
            handle=work.handle,
            attempt=action.attempt,
            sampling=generation.sampling,
            stop_token_ids=generation.stop_token_ids,
            num_emitted=action.num_emitted,
            drafter=drafter,
            max_draft_tokens=max_draft_tokens,
        )

    def _prefill(self, work: Work, action: Prefill) -> None:
        if work.prefill is None:
            return
        assert work.ticket is not None
        worker, ticket, attempt = work.prefill.worker, work.ticket, work.request.attempt
        assert isinstance(worker, SimPrefill)
        call = work.run_call = self._new_name()
        me, generation = (self.name, self.epoch), work.request.generation
        job = Job(
            generation.request_id, action.prompt, ticket.end, 0, generation.cache_salt, attempt=attempt,
            sampling=generation.sampling,
        )  # fmt: skip
        timeout = max(work.request.deadline - self.world.now, 0.001)

        def answered(answer: Any) -> None:
            if work.request.attempt != attempt or work.run_call != call:
                return
            work.run_call = 0
            if isinstance(answer, Failure):
                answer = Refused("prefill", "failed", answer.why)
            if isinstance(answer, Prefilled) and work.places.prefill is not None:
                work.places.release(work.places.prefill)
            self._feed(work, answer)

        self.world.call(
            self, worker, lambda answer: worker.run(call, me, job, ticket, timeout, answer), answered, timeout
        )

    def _give_back(self, work: Work, role: Role, is_refused: bool) -> None:
        link = work.places.prefill if role == "prefill" else work.places.decode
        assert link is not None
        (work.places.give_back_refused if is_refused else work.places.release)(link)

    def _let_go(self, work: Work) -> None:
        """Leave the attempt, or the queue: nothing of it is left here, and soon nothing on the workers."""
        if work.run_call and work.prefill is not None and isinstance(work.prefill.worker, SimPrefill):
            prefill, call = work.prefill.worker, work.run_call
            work.run_call = 0
            self.world.send(self, prefill, lambda: prefill.cancel(call))
        if work.handle:
            self._sessions.pop((work.stream, work.handle), None)
            self._abort(work)
            work.handle = 0
        self._leave_queue(work)

    def _abort(self, work: Work) -> None:
        assert work.decode is not None
        worker, stream, handle = work.decode.worker, work.stream, work.handle
        if not work.is_over and stream == work.decode.stream and isinstance(worker, SimDecode):
            self.world.send(self, worker, lambda: worker.abort(stream, handle))
