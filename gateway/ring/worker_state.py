"""What this gateway knows of one worker, and what follows: whether it can take work, when to ask it again. Pure.

Which worker serves what is policy.py's.
"""

from collections.abc import Callable

from gateway.ring.local_prefill import ChunkCosts
from gateway.ring.policy import WorkerView
from gateway.ring.request_steps import Role
from protos import decode_pb2
from wire.stalls import find_stuck

POLL_S = 1.0  # between two calls for a worker's status, at most
HURRY = 0.2  # part of that time after which a worker is asked that just refused a request
RETRY_S = 0.2  # before a worker that did not answer is asked again


class WorkerState:
    """One worker: its last status, and the places that this gateway's requests have there."""

    def __init__(self, role: Role, address: str, heartbeat_s: float, stall_s: float, source: str = "") -> None:
        """`heartbeat_s`: silence after which a worker counts as dead; `stall_s`: see wire/stalls.py."""
        self.role = role
        self.address = address
        self.status = decode_pb2.WorkerStatus()
        self.num_mine = 0  # places held by requests of this gateway
        self.is_full = False  # refused a request since it last answered or a place there got free
        self.was_asked = False  # it has answered, or failed to
        self.next_poll = 0.0  # when to ask for its status again
        self.on_change: Callable[[], None] = lambda: None  # called when it may have got room or died
        self.on_hurry: Callable[[], None] = lambda: None  # called when `next_poll` has moved closer
        self.source = source  # the DNS name that it has; empty: named by its address
        self.is_leaving = False  # DNS no longer lists it
        self.duplicate_of = ""  # the other address of the same worker, which is used
        self.heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self._num_others = 0  # requests of other gateways at its last answer
        self._heard = -float("inf")  # when it last answered
        self._trouble = "has not answered yet"
        self._is_doubted = False  # a call found no worker since it last answered
        self._pause_s = 0.0  # between the last poll and the next
        self._layout = b""
        self._seen: tuple[object, ...] = ()  # what `_view` was made of
        self._view: WorkerView | None = None

    def learn(self, status: decode_pb2.WorkerStatus, now: float) -> None:
        """It answered."""
        self.status = status
        self._num_others = max(status.num_running - self.num_mine, 0)
        self._layout = status.peer.layout.SerializeToString(deterministic=True)
        self._view = None
        self._heard = now
        self._trouble = ""
        self._is_doubted = False
        self._end_poll(min(POLL_S, self.heartbeat_s / 3), now)  # so that one late answer is not silence

    def miss(self, trouble: str, now: float) -> None:
        """It did not answer, for the reason `trouble`."""
        self._trouble = trouble
        self._end_poll(RETRY_S, now)

    def _end_poll(self, pause_s: float, now: float) -> None:
        self.was_asked = True
        self._pause_s, self.next_poll = pause_s, now + pause_s
        self.is_full = False  # try it again at the latest now
        self._judge(now)
        self.on_change()

    def _judge(self, now: float) -> None:
        """What follows from the last answer, or its absence, for work under way."""

    def find_trouble(self, now: float) -> str | None:
        """Why this worker cannot take work; None when it can."""
        if (stall := self.find_stall(now)) is not None:
            return stall
        if self.status.draining:
            return "is draining"
        if self.is_leaving:
            return f"is no longer in {self.source}"
        if self.duplicate_of:
            return f"is the worker at {self.duplicate_of}"
        return "did not take a call" if self._is_doubted else None

    def find_stall(self, now: float) -> str | None:
        """Why the work that it has makes no progress; None when it does."""
        return self.find_silence(now) or self.find_stuck()

    def find_silence(self, now: float) -> str | None:
        """Why it counts as dead; None while it answers."""
        if now - self._heard > self.heartbeat_s:
            return self._trouble or f"has been silent for more than {self.heartbeat_s:g} s"
        return None

    def find_stuck(self) -> str | None:
        """Why its engine was stuck when it last answered; None if it was not."""
        return find_stuck(self.status.step_age_s, self.status.step_predicted_s, self._stall_s)

    @property
    def incarnation(self) -> str:
        """Of the worker that would get a request."""
        return self.status.peer.incarnation

    def view(self, now: float) -> WorkerView:
        trouble = self.find_trouble(now)
        seen = self.incarnation, trouble, self.num_mine, self.is_full
        if self._view is None or seen != self._seen:
            self._seen, self._view = seen, self._build_view(trouble)
        return self._view

    def _build_view(self, trouble: str | None) -> WorkerView:
        status, peer = self.status, self.status.peer
        return WorkerView(
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            layout=self._layout,
            is_alive=trouble is None,
            trouble=trouble or "",
            max_running=max(status.max_running, 1),
            num_mine=self.num_mine,
            num_others=self._num_others,
            is_full=self.is_full,
            free_pages=status.free_pages,
            num_pages=peer.num_pages,
            page_tokens=peer.layout.page_tokens,
            weights=peer.layout.weights,
            host=peer.host,
            num_threads=status.threads,
            num_cores=status.cores,
            tokens_waiting=status.prompt_tokens_waiting,
            tokens_per_s=status.prompt_tokens_per_second,
            costs=_read_costs(status.chunk_costs),
        )

    def release(self, refused_at: float | None = None) -> None:
        """A place here is free again. `refused_at`: when the worker had no room for a request.

        It then gets no other until a place there is free or it has been polled, soon.
        """
        self.num_mine -= 1
        self.is_full = refused_at is not None
        if refused_at is not None:
            self._hurry(refused_at)
        self.on_change()

    def doubt(self, now: float) -> None:
        """A call found no worker: it gets no more work until it answers a poll, which comes soon."""
        self._is_doubted = True
        self._hurry(now)

    def _hurry(self, now: float) -> None:
        self.next_poll = min(self.next_poll, now + HURRY * self._pause_s)
        self.on_hurry()


def _read_costs(costs: decode_pb2.ChunkCosts) -> ChunkCosts:
    return ChunkCosts(
        costs.quiet_seconds, costs.fixed_seconds, costs.token_seconds, costs.tokens, costs.read_token_seconds
    )
