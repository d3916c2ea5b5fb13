"""The one queue where requests wait for places on workers; order.py says who is next. Pure.

Started answers go before new requests, and among them the one whose client has waited longest for a token: otherwise
answers that move from one dying worker to the next would always stand behind those that were there before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.errors import ApiError, cannot_keep_deadline, not_ready, over_goal
from gateway.router.coming import Coming
from gateway.router.order import Order
from gateway.router.placement import Placement
from gateway.router.placer import Held, Placer
from gateway.router.policies import Expectations
from gateway.router.readiness import Unready, find_unready
from gateway.router.request import Request
from gateway.router.worker_view import Role, WorkerView
from wire.page_keys import PageKey


class PlaceOwner(Protocol):
    """A WorkerClient as the queue sees it."""

    address: str
    num_mine: int  # places held by requests of this gateway

    def release(self, is_refused: bool = False) -> None:
        """Free a place there."""


@dataclass(slots=True, eq=False)
class Places:
    """A place on a decode worker and perhaps one on a prefill worker, held until released.

    While `coming` is set, prompts that share much with it wait for the KV that is to come here.
    """

    placement: Placement
    decode: PlaceOwner
    prefill: PlaceOwner | None
    coming: Coming | None
    num_tokens: float  # that it was expected to take: of the prompt and of the answer
    num_emitted: int  # tokens that the client had before
    is_reserved: bool = False  # the decode worker has taken the request
    held: list[PlaceOwner] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [self.decode, self.prefill] if self.prefill else [self.decode]

    def release(self, worker: PlaceOwner, is_refused: bool = False) -> None:
        """Give one place back. `is_refused`: the worker had no room for the request. Idempotent."""
        if worker in self.held:
            self.held.remove(worker)
            worker.release(is_refused)


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue; once decided, it has places or an error."""

    request: Request  # does not change while it waits
    places: Places | None = None
    error: ApiError | None = None
    without_since: float | None = None  # when it was first seen that no worker has its adapter and weights

    @property
    def is_over(self) -> bool:
        return self.places is not None or self.error is not None


class Queue:
    """Owns the waiting requests and the places of the others. `decide` gives places in turn."""

    def __init__(
        self,
        workers: Mapping[Role, Mapping[str, PlaceOwner]],
        views: Callable[[], Sequence[WorkerView]],
        placer: Placer,
        patience_s: float,
        mark: Callable[[], None],
        has_goal: bool = False,
        expectations: Expectations | None = None,
    ) -> None:
        """`workers`: by address; they come and go, those without a request's place. `views`: of them, as they are now.
        `mark`: called when requests that were held back may go on.

        `patience_s`: how long requests wait while no worker can serve, counted from when one last could.
        `has_goal`: requests that would wait for longer than that for a place are refused.
        """
        self.placer = placer
        self.num_tokens_placed = 0  # of prompts, that workers lacked; not of refused tries
        self.num_fallbacks = 0  # prompts that decode computes because no prefill worker is alive
        self.views = views
        self._workers = workers
        self._mark = mark
        self._patience_s = patience_s
        self._last_ready: dict[Role, float] = {}  # when a worker of the role last could serve
        self._forecast = expectations or Expectations()
        self._waiting = Order[Waiter](self._forecast.expect_tokens)
        self._has_goal = has_goal
        self._placed: set[Waiter] = set()
        self._stuck: set[Waiter] = set()  # cannot be placed without a prefill worker, while these workers are alive:
        self._stuck_while: frozenset[str] = frozenset()  # incarnations

    @property
    def num_tokens_waiting(self) -> int:
        """Tokens of the requests in the queue whose KV is needed."""
        return sum(waiter.request.num_missing for waiter in self._waiting)

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    @property
    def num_answering(self) -> int:
        """Placed requests that no prefill worker computes, or has still to compute."""
        return sum(waiter.places is not None and len(waiter.places.held) == 1 for waiter in self._placed)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # -- waiting and leaving -----------------------------------------------------------------------------------------

    def join(self, request: Request) -> Waiter:
        waiter = Waiter(request)
        self._waiting.add(waiter)
        return waiter

    def find_refusal(self, request: Request, now: float) -> ApiError | None:
        """Why a new request need not wait: its answer would begin too late."""
        if request.first_by is None and not self._has_goal:
            return None
        views, running = self.views(), (waiter.request for waiter in self._placed)
        wait_s = self._forecast.predict_wait_s(self._waiting.count_before(request), running, views)
        if request.first_by is not None:
            wait_s, left_s = wait_s + self._predict_prompt_s(request, views), request.first_by - now
            return cannot_keep_deadline(wait_s, left_s) if wait_s > left_s else None
        return over_goal(wait_s, self._patience_s) if wait_s > self._patience_s else None

    def _predict_prompt_s(self, request: Request, views: Sequence[WorkerView]) -> float:
        return self._forecast.predict_prompt_s(request.num_missing - self.placer.count_cached(views, request), views)

    def leave(self, waiter: Waiter) -> None:
        """Take it out of the queue, and give its places back. Idempotent."""
        self._stuck.discard(waiter)
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        if waiter in self._placed and waiter.places is not None:
            self._placed.remove(waiter)
            self._count(waiter.request, waiter.places)
        if waiter.places is not None:
            for worker in list(waiter.places.held):
                waiter.places.release(worker)
            self._end_coming(waiter.places)

    def _count(self, request: Request, places: Places) -> None:
        """Count what the attempt took of its owner's share."""
        self.num_tokens_placed -= 0 if places.is_reserved else max(request.num_missing - places.placement.num_cached, 0)
        num_answer = len(request.emitted) - places.num_emitted
        num_prompt = request.num_missing - num_answer - places.placement.num_cached if places.is_reserved else 0
        if num_answer:
            self._forecast.note_answer(len(request.emitted))
        self._waiting.leave_place(request, num_answer + max(num_prompt, 0) - places.num_tokens)

    # -- what workers have of prompts --------------------------------------------------------------------------------

    def remember(self, places: Places, request: Request, role: Role) -> None:
        """The worker of that role has the KV of all the request's tokens but the last."""
        worker = places.placement.decode if role == "decode" else places.placement.prefill
        assert worker is not None
        self.placer.remember(worker, request)
        if role == "decode":
            self._end_coming(places)

    def _end_coming(self, places: Places) -> None:
        if places.coming is not None:
            self.placer.end(places.coming)
            places.coming = None
            self._mark()

    # -- deciding ----------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> None:
        """Give requests places, or errors. Call it at each change and after each poll."""
        views = self.views()
        unready = find_unready(views, self.placer.no_prefill)
        if unready is None or unready.role == "prefill":
            self._last_ready["decode"] = now
            if unready is None:
                self._last_ready["prefill"] = now
            num_before = len(self._placed)
            if self._waiting:
                self._place_all(views, unready is not None, now)
            self._forecast.note_places(now, len(self._placed) - num_before, bool(self._waiting))
        elif self._is_given_up("decode", now):
            self._stuck = set()
            for waiter in list(self._waiting):
                self._refuse(waiter, not_ready(unready.detail))

    def _refuse(self, waiter: Waiter, error: ApiError) -> None:
        self._waiting.remove(waiter)
        waiter.error = error

    def _is_given_up(self, role: Role, now: float) -> bool:
        """Whether requests stop waiting for a worker of the role: none could serve for too long."""
        return now - self._last_ready.get(role, -float("inf")) >= self._patience(role)

    def _patience(self, role: Role) -> float:
        return 0.0 if role == "prefill" and self.placer.no_prefill == "fail" else self._patience_s

    def _place_all(self, views: Sequence[WorkerView], lacks_prefill: bool, now: float) -> None:
        """Place requests in order; refuse those for which a prefill worker, an adapter or time was lacking too long.

        FIFO per worker: a request overtakes another only on workers that the other cannot use, or while that is held
        back, or a worker has no slot for its adapter, or it needs a prefill worker and none is alive.
        """
        held, full = set[PageKey | None](), list[Sequence[WorkerView]]()  # full: that a request before can use
        spared: frozenset[str] | None = None  # incarnations that no request before can use; None: none is before
        alive = frozenset(view.incarnation for view in views if view.is_alive) if lacks_prefill else frozenset()
        if alive != self._stuck_while or self._is_given_up("prefill", now):
            self._stuck_while, self._stuck = alive, set()
        for waiter in self._waiting.walk():
            request = waiter.request
            if waiter in self._stuck:
                continue
            if request.due < request.deadline and self._give_up_late(waiter, views, now):
                continue
            if (lacking := self.placer.find_unusable(views, request)) is not None:
                self._give_up_unusable(waiter, lacking, now)
                continue
            waiter.without_since = None
            usable = self.placer.find_usable(views, request)
            if any(usable is one for one in full) or self.placer.find_key(views, request) in held:
                continue
            choice = self.placer.choose(views, request, spared)
            if isinstance(choice, Placement):
                self._place(waiter, choice, views)
                views = self.views()
            elif isinstance(choice, Held):
                held.add(choice.key)
            elif isinstance(choice, Unready) and choice.role == "prefill" and lacks_prefill:
                if self._is_given_up("prefill", now):
                    self._refuse(waiter, not_ready(choice.detail))
                else:
                    self._stuck.add(waiter)
            elif not request.adapter or all(view.has_slots for view in views):
                full += [] if request.avoid else [usable]
                names = {view.incarnation for view in usable} - request.avoid
                unusable = frozenset(view.incarnation for view in views) - names
                spared = unusable if spared is None else spared & unusable
                if not spared:
                    break

    def _give_up_late(self, waiter: Waiter, views: Sequence[WorkerView], now: float) -> bool:
        """Whether the waiter gets an error: its prompt alone takes longer than there is time until its first token."""
        left_s, prompt_s = waiter.request.due - now, self._predict_prompt_s(waiter.request, views)
        if prompt_s > left_s:
            self._refuse(waiter, cannot_keep_deadline(prompt_s, left_s))
        return waiter.is_over

    def _give_up_unusable(self, waiter: Waiter, lacking: Unready, now: float) -> None:
        """Refuse it where no worker has had its adapter, or its weights, for too long."""
        waiter.without_since = now if waiter.without_since is None else waiter.without_since
        if lacking.is_final or now - waiter.without_since >= self._patience(lacking.role):
            self._refuse(waiter, not_ready(lacking.detail, lacking.code))

    def _place(self, waiter: Waiter, choice: Placement, views: Sequence[WorkerView]) -> Places:
        """Give it its places. All that may fail comes first: then it still waits, and holds nothing."""
        request = waiter.request
        num_tokens = self._forecast.expect_tokens(request) - choice.num_cached
        decode = self._workers[choice.decode.role][choice.decode.address]
        prefill = self._workers["prefill"][choice.prefill.address] if choice.prefill else None
        coming = self.placer.begin(request, choice, views)
        places = Places(choice, decode, prefill, coming, num_tokens, len(request.emitted))
        self._waiting.place(waiter, num_tokens)
        self._placed.add(waiter)
        self.num_tokens_placed += max(request.num_missing - choice.num_cached, 0)
        self.num_fallbacks += choice.is_fallback and self.placer.expects_prefill
        waiter.places = places
        for worker in places.held:
            worker.num_mine += 1
        return places

    def check(self) -> None:
        """Raises AssertionError where places are miscounted, or a request waits out of turn or has places."""
        held = [worker for waiter in self._placed if waiter.places for worker in waiter.places.held]
        for worker in (worker for workers in self._workers.values() for worker in workers.values()):
            num_held = held.count(worker)
            assert worker.num_mine == num_held, f"{worker.num_mine} places at {worker.address}, held {num_held}"
        assert not any(waiter in self._placed or waiter.is_over for waiter in self._waiting)
        self._waiting.check(len(self._placed))
