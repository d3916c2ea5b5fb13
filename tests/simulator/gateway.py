"""A gateway: the real request machine and placement policy, between virtual links and clients.

Stands in for admission.py, attempt.py and the links: it does what the machine decides and decides nothing itself.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from decode_worker.session import Delta, Reservation
from engine.sampling import SamplingParams
from gateway.errors import ApiError, not_ready
from gateway.ring.policy import Placement, WorkerView, choose_placement, find_unready
from gateway.ring.request_actions import Emit, GiveBack, Leave, Prefill, Reserve
from gateway.ring.request_events import Event, Lost, News, Placed, Refused, Reserved, TimedOut, Unplaced
from gateway.ring.request_machine import Phase, Request
from tests.simulator.decode import SimDecode, Stream
from tests.simulator.prefill import HEARTBEAT_S, SimPrefill
from tests.simulator.values import Client, Link, Work
from tests.simulator.world import Action, Failure, Process, ViolationError, World

POLL_S = 1.0
RETRY_S = 0.2
PATIENCE_S = 4.0
TIMEOUT_S = 12.0
GREEDY = SamplingParams(0.0, 1.0, 0, 0.0, 0)


class SimGateway(Process):
    """One gateway and all it holds."""

    def __init__(self, world: World, name: str, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode]) -> None:
        self._workers = (prefills, decodes)
        self.num_open = 0  # requests announced but not ended: while there are none, nobody is polled
        self.local_prefill_max_tokens = 0
        super().__init__(world, name)

    def boot(self) -> None:
        prefills, decodes = self._workers
        self.links = [Link("prefill", worker) for worker in prefills] + [Link("decode", worker) for worker in decodes]
        self.works: list[Work] = []
        self._sessions: dict[tuple[str, int], Work] = {}  # (stream, handle) |-> request
        self._waiting: deque[Work] = deque()
        self._arriving: list[Client] = []  # connected, not heard yet
        self._names = 0
        self._could_serve = -float("inf")  # when some worker last could
        for link in self.links:
            self._poll(link)
            if isinstance(link.worker, SimDecode):
                self._open_stream(link, link.worker)

    def check(self) -> None:
        for link in self.links:
            if link.num_mine != sum(link in work.held for work in self.works):
                raise ViolationError(f"{self.name} counts {link.num_mine} requests at {link.worker.name}")

    def crash(self) -> None:
        for work in self.works:
            self._end(work, "gateway died")
        for client in self._arriving:
            self._dismiss(client, "gateway died")
        super().crash()

    def _new_name(self) -> int:
        self._names += 1
        return self._names

    def _new_handle(self, work: Work) -> int:
        return self._new_name()

    # -- links ---------------------------------------------------------------------------------------------------

    def _poll(self, link: Link) -> None:
        worker = link.worker

        def status(answer: Any) -> None:
            answer((worker.incarnation, worker.table.allocator.num_free))

        def learn(status: Any) -> None:
            if not isinstance(status, Failure):
                link.incarnation, link.free_pages = status
                link.heard, link.is_doubted = self.world.now, False
            elif self.world.now - link.heard > HEARTBEAT_S:
                self._lose_all(link)
            link.is_full = False
            self._pump()
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
                self._pump()

        stream = Stream(name, self, lambda delta: self._deliver(name, worker, delta), lambda: on_end())

        def on_end() -> None:
            if link.stream == name:
                retry()

        self.world.call(self, worker, lambda answer: worker.steps(stream, answer), opened, HEARTBEAT_S)

    def _lose_all(self, link: Link) -> None:
        for work in list(self.works):
            if work.decode is link and work.handle:
                self._hear(work, Lost(f"{link.worker.name} is lost"))

    def _deliver(self, stream: str, worker: SimDecode, delta: Delta) -> None:
        work = self._sessions.get((stream, delta.handle))
        if work is None:
            if not delta.finish_reason:
                self.world.send(self, worker, lambda: worker.abort(stream, delta.handle))
            return
        work.is_over = bool(delta.finish_reason)
        self._hear(work, News(delta.attempt, delta.token_ids, delta.finish_reason, delta.error))

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
        self._waiting.append(work)
        self.later(request.deadline - self.world.now, lambda: self._time_out(work))
        self._pump()

    def leave(self, client: Client) -> None:
        """The client goes away."""
        for work in list(self.works):
            if work.client is client:
                work.is_left = True
                self._let_go(work)
                if work in self._waiting:
                    self._waiting.remove(work)
                self._end(work, "left")

    def _pump(self) -> None:
        reason = find_unready(self._views())
        if reason is None:
            self._could_serve = self.world.now
            self._place_all()
        elif self.world.now - self._could_serve >= PATIENCE_S:
            for work in list(self._waiting):
                self._unplace(work, not_ready(reason))

    def _place_all(self) -> None:
        while self._waiting:
            request = self._waiting[0].request
            choice = choose_placement(
                self._views(), request.num_missing, self.local_prefill_max_tokens, frozenset(request.avoid)
            )
            if not isinstance(choice, Placement):
                return
            self._place(self._waiting.popleft(), choice)

    def _views(self) -> list[WorkerView]:
        return [link.view(self.world.now) for link in self.links]

    def _place(self, work: Work, choice: Placement) -> None:
        by_name = {link.worker.name: link for link in self.links}
        decode = work.decode = by_name[choice.decode.address]
        prefill = work.prefill = by_name[choice.prefill.address] if choice.prefill else None
        work.held = [decode, prefill] if prefill else [decode]
        for link in work.held:
            link.num_mine += 1
        work.stream, work.handle, work.is_over = decode.stream, self._new_handle(work), False
        self._sessions[work.stream, work.handle] = work
        work.inbox.clear()
        self._feed(work, Placed(decode.stream_incarnation, prefill.incarnation if prefill else None))

    def _unplace(self, work: Work, error: ApiError) -> None:
        self._waiting.remove(work)
        self._feed(work, Unplaced(error))

    def _time_out(self, work: Work) -> None:
        if work in self._waiting:
            self._unplace(work, not_ready("no worker had room"))
        elif work in self.works:
            self._feed(work, TimedOut())

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
                    self._give_back(work, work.prefill if role == "prefill" else work.decode, is_refused)
                case Emit(tokens):
                    work.client.take(tokens)
                case Leave():
                    self._let_go(work)
        if request.phase is Phase.ENDED:
            self._end(work, f"error {request.error}" if request.error else "answer")
        elif request.phase is Phase.WAITING and work not in self._waiting:
            self._waiting.appendleft(work)
            self.later(0.0, self._pump)

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
        generation = work.request.generation
        wanted = Reservation(
            generation.request_id, action.attempt, work.stream, work.handle, action.prompt_ids, action.max_tokens,
            GREEDY, generation.stop_token_ids, action.local_prefill_max_tokens,
        )  # fmt: skip

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
                self._feed(work, Reserved(needs_prefill))
                self._read_inbox(work)

        timeout = min(HEARTBEAT_S, max(work.request.deadline - self.world.now, 0.001))
        self.world.call(self, worker, lambda answer: worker.reserve(wanted, answer), answered, timeout)

    def _prefill(self, work: Work, action: Prefill) -> None:
        assert work.prefill is not None and work.ticket is not None
        worker, ticket, attempt = work.prefill.worker, work.ticket, work.request.attempt
        assert isinstance(worker, SimPrefill)
        call = work.run_call = self._new_name()
        me, name = (self.name, self.epoch), work.request.generation.request_id
        timeout = max(work.request.deadline - self.world.now, 0.001)

        def answered(answer: Any) -> None:
            if work.request.attempt != attempt or work.run_call != call:
                return
            work.run_call = 0
            if isinstance(answer, Failure):
                answer = Refused("prefill", "failed", answer.why)
            self._feed(work, answer)

        self.world.call(
            self, worker, lambda answer: worker.run(call, me, name, action.prompt_ids, ticket, timeout, answer),
            answered, timeout,
        )  # fmt: skip

    def _give_back(self, work: Work, link: Link | None, is_refused: bool) -> None:
        if link is not None and link in work.held:
            work.held.remove(link)
            link.num_mine -= 1
            link.is_full = is_refused
            if not is_refused:
                self.later(0.0, self._pump)

    def _let_go(self, work: Work) -> None:
        """Leave the attempt: nothing of it is left here, and soon nothing on the workers."""
        if work.handle:
            self._sessions.pop((work.stream, work.handle), None)
            self._abort(work)
            work.handle = 0
        if work.run_call and work.prefill is not None and isinstance(work.prefill.worker, SimPrefill):
            prefill, call = work.prefill.worker, work.run_call
            work.run_call = 0
            self.world.send(self, prefill, lambda: prefill.cancel(call))
        for link in list(work.held):
            self._give_back(work, link, is_refused=False)

    def _abort(self, work: Work) -> None:
        assert work.decode is not None
        worker, stream, handle = work.decode.worker, work.stream, work.handle
        if not work.is_over and stream == work.decode.stream and isinstance(worker, SimDecode):
            self.world.send(self, worker, lambda: worker.abort(stream, handle))
