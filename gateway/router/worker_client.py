"""One worker: its last status, what follows from that, and calls. Lives on the asyncio thread.

Its tasks run until the client is closed. One that fails is a bug: it is logged and begun again, and the worker gets no
work until it answers again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
import structlog

from gateway.router.interfaces import Adapters
from gateway.router.worker_keys import WorkerKeys
from gateway.router.worker_view import ChunkCosts, Role, WorkerView
from protos import worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.tasks import keep_running
from wire.stalls import find_stuck

log = structlog.get_logger()

POLL_S = 1.0  # between two calls for a worker's status, at most
HURRY = 0.2  # fraction of the poll interval before re-polling a worker that refused
RETRY_S = 0.2  # before a worker that did not answer is asked again
QUIET_S = 1.5  # without an answer or an error to the first question, after which that is logged
# How a call ends when no worker is there, or only an incarnation that drains or does not know our stream.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
T = TypeVar("T")
Identity = tuple[Role, str]  # of a worker in one role: this and its incarnation


class WorkerClient:
    """One worker: its channel, its last status, and the places that this gateway's requests have there."""

    role: Role

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        heartbeat_s: float,
        stall_s: float,
        source: str = "",
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        """`channel`: closed with the client. `heartbeat_s`: silence after which a worker counts as dead.

        `stall_s`: see wire/stalls.py. `adapters`: those that it is to have. `mark`: called when it may have got room
        or died.
        """
        self.stale: dict[WorkerClient, None] = {}  # the owner's: those whose view may have changed, in order
        self.address = address
        self.status = worker_pb2.WorkerStatus()
        self.num_mine = 0  # places held by requests of this gateway
        self.is_full = False  # refused a request since it last answered or a place there got free
        self.was_asked = False  # it has answered, or failed to
        self._mark = mark
        self.source = source  # the DNS name that it has; empty: named by its address
        self.is_leaving = False  # DNS no longer lists it
        self.replaced: Container[str] = ()  # fingerprints of weights in whose place others were given
        self.duplicate_of = ""  # the other address of the same worker, which is used
        self.model: str | None = None  # that it serves here, where the gateway has several
        self.stray_because = ""  # why it serves none of them
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._between_s = min(POLL_S, heartbeat_s / 3)  # two polls, so that one late answer is not silence
        self._stall_s = stall_s
        self._channel = channel
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self.adapters = (adapters or Adapters()).link(address, self._worker, clock, self._note_adapters)
        self.keys = WorkerKeys()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_others = 0  # requests of other gateways at its last answer
        self._heard = -float("inf")  # when it last answered
        self._trouble = "has not answered yet"
        self._is_doubted = False  # a call found no worker since it last answered
        self._bug = ""  # what ended one of the tasks since it last answered
        self._silence: str | None = None  # why it does not answer, as logged; empty when it does, None before the first
        self._pause_s = 0.0  # between the last poll and the next
        self._next_poll = 0.0  # when to ask for its status again
        self._hurry = asyncio.Event()  # `_next_poll` has moved closer
        self._layout = b""
        self.view_until = float("inf")  # when silence changes it, if nothing else does
        self._view: WorkerView | None = None  # as of now; None once anything has changed

    def __setattr__(self, name: str, value: object) -> None:
        """Whatever is set drops the view: a look at thousands of workers costs what has changed."""
        object.__setattr__(self, name, value)
        if name not in ("_view", "view_until"):
            self._drop_view()

    def _drop_view(self) -> None:
        self._view = None
        self.stale[self] = None

    # -- asking for its status --------------------------------------------------------------------------------------

    def start(self) -> None:
        for work in (self._poll, self._report_quiet, self.adapters.run):
            self._keep(work)

    def _keep(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        running = keep_running(work, "a link to a worker", self._note_bug, address=self.address)
        self._tasks.append(asyncio.get_running_loop().create_task(running))

    def _note_adapters(self) -> None:
        self._drop_view()
        self._mark()

    def _note_bug(self, bug: BaseException) -> None:
        self._bug = f"has a link that failed ({bug!r})"
        self._poll_soon()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _poll(self) -> None:
        while True:
            version = self.adapters.version
            try:
                timeout_s = self.find_patience() or self._heartbeat_s
                status = await self._worker.Status(self.keys.ask(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                self._miss(error)
            else:
                self._learn(status, version)
            while (pause_s := self._next_poll - self._clock()) > 0:
                self._hurry.clear()
                try:
                    async with asyncio.timeout(pause_s):
                        await self._hurry.wait()
                except TimeoutError:
                    break

    def find_patience(self) -> float:
        """Seconds that a call may take which a living worker answers at once; 0 if it has been dead for longer.

        A heartbeat, but no longer than a pause between polls after silence counts as death: polls notice it by then.
        """
        left_s = self._heard + self._heartbeat_s + self._between_s - self._clock()
        return max(min(left_s, self._heartbeat_s), 0.0)

    async def _report_quiet(self) -> None:
        await asyncio.sleep(QUIET_S)
        if self._silence is None:
            log.warning("worker does not answer", address=self.address, reason=f"nothing came for {QUIET_S:g} s")

    def _learn(self, status: worker_pb2.WorkerStatus, version: int) -> None:
        if self.status.peer.incarnation not in ("", status.peer.incarnation):
            log.warning("worker restarted", address=self.address, incarnation=status.peer.incarnation)
        elif self._silence:
            log.info("worker answers again", address=self.address)
        self._silence = ""
        self.status = status
        self.adapters.learn(status, version)
        self.keys.learn(status)
        status.ClearField("keys")
        status.ClearField("saved_keys")
        self._num_others = max(status.num_running - self.num_mine, 0)
        self._layout = status.peer.layout.SerializeToString(deterministic=True)
        self._heard = self._clock()
        self._trouble = self._bug = ""
        self._is_doubted = False
        self._end_poll(self._between_s)

    def _miss(self, error: grpc.aio.AioRpcError) -> None:
        """Note a poll without an answer. Its reason is logged when it is new. Distrust does not go away by waiting."""
        distrust = rpc.find_distrust(error)
        silence = f"does not answer ({distrust or error.code().name})"
        if silence != self._silence and distrust is not None:
            log.error("worker not trusted", address=self.address, reason=distrust)
        elif silence != self._silence:
            reason = f"{error.code().name}: {error.details()}"
            log.warning("worker does not answer", address=self.address, reason=reason)
        self._silence = self._trouble = silence
        self._end_poll(RETRY_S)

    def _end_poll(self, pause_s: float) -> None:
        self.was_asked = True
        self._pause_s, self._next_poll = pause_s, self._clock() + pause_s
        self.is_full = False  # try it again at the latest now
        self._judge()
        self._mark()

    def _judge(self) -> None:
        """End work under way that is lost, by the last answer or its absence."""

    # -- what is known of it -----------------------------------------------------------------------------------------

    def find_trouble(self) -> str | None:
        """Why this worker cannot take work; None when it can."""
        if (stall := self.find_stall()) is not None:
            return stall
        if self._bug:
            return self._bug
        if self.status.draining:
            return "is draining"
        if self.status.pause:
            return self.status.pause
        if self.status.peer.layout.weights in self.replaced:
            return "has weights that POST /v1/weights replaced, and is to get the new ones"
        if self.is_leaving:
            return f"is no longer in {self.source}"
        if self.stray_because:
            return self.stray_because
        if self.duplicate_of:
            return f"is the worker at {self.duplicate_of}"
        if self.is_closed:
            return f"takes {', '.join(self.status.roles)} requests only"
        return "did not take a call" if self._is_doubted else None

    @property
    def identity(self) -> Identity:
        return self.role, self.status.peer.incarnation

    @property
    def is_closed(self) -> bool:
        """Whether it has this role, but takes no new requests in it."""
        return bool(self.status.roles) and self.role not in self.status.roles

    def find_stall(self) -> str | None:
        """Why the work that it has makes no progress; None when it does."""
        return self.find_silence() or self.find_stuck()

    def find_silence(self) -> str | None:
        """Why it counts as dead; None while it answers."""
        if self._clock() - self._heard > self._heartbeat_s:
            return self._trouble or f"has been silent for more than {self._heartbeat_s:g} s"
        return None

    def find_stuck(self) -> str | None:
        """Why its engine was stuck when it last answered; None if it was not."""
        return find_stuck(self.status.step_age_s, self.status.step_predicted_s, self._stall_s)

    async def order(self, call: Callable[[worker_pb2_grpc.WorkerStub], Awaitable[T]]) -> T:
        """Make a call that is not part of a request, and ask soon for what it has changed. Raises AioRpcError."""
        try:
            return await call(self._worker)
        finally:
            self._poll_soon()

    @property
    def incarnation(self) -> str:
        """The incarnation of the worker that would get a request."""
        return self.status.peer.incarnation

    def view(self) -> WorkerView:
        """The worker as policies see it."""
        if self._view is None or self._clock() > self.view_until:
            self._drop_view()
            silent_at = self._heard + self._heartbeat_s
            self.view_until = silent_at if self._clock() <= silent_at else float("inf")
            self._view = self._build_view(self.find_trouble())
        return self._view

    def _build_view(self, trouble: str | None) -> WorkerView:
        status, peer, costs = self.status, self.status.peer, self.status.chunk_costs
        return WorkerView(
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            layout=self._layout,
            is_alive=trouble is None,
            trouble=trouble or "",
            max_running=max(min(status.max_running, status.goal_answers or status.max_running), 1),
            num_mine=self.num_mine,
            num_others=self._num_others,
            is_full=self.is_full,
            free_pages=status.free_pages,
            empty_pages=max(status.free_pages - status.cached_pages, 0),
            num_pages=peer.num_pages,
            page_tokens=peer.layout.page_tokens,
            weights=peer.layout.weights,
            revision=peer.revision,
            key_tokens_after=status.key_tokens_after,
            keys=self.keys,
            dtype=peer.layout.dtype,
            adapters=self.adapters.loaded,
            has_slots=self.adapters.has_slots,
            store=status.kv_store,
            takes_images=status.takes_images,
            embeds=status.embeds,
            is_draining=(status.draining or self.is_closed) and self.find_stall() is None,
            is_paused=bool(status.pause) and self.find_stall() is None,
            is_closed=self.is_closed,
            host=peer.host,
            num_threads=status.threads,
            cpus=frozenset(status.cpus),
            cpu_group=status.cpu_group,
            num_cores=status.cores,
            tokens_waiting=status.prompt_tokens_waiting,
            tokens_per_s=status.prompt_tokens_per_second,
            costs=ChunkCosts(
                costs.quiet_seconds, costs.fixed_seconds, costs.token_seconds, costs.tokens, costs.read_token_seconds
            ),
        )

    # -- places and calls --------------------------------------------------------------------------------------------

    def release(self, is_refused: bool = False) -> None:
        """A place here is free again. `is_refused`: the worker had no room for a request.

        It then gets no other until a place there is free or it has been polled, soon.
        """
        self.num_mine -= 1
        self.is_full = is_refused
        if is_refused:
            self._poll_soon()
        self._mark()

    def refuse_adapter(self, digest: str, is_loaded: bool) -> None:
        """Note that it refused a request with this adapter, which it lacks, or for which it has no slot.

        It then gets no other with this adapter, or with any, before its next answer, soon.
        """
        if is_loaded:
            self.adapters.has_slots = False
        else:
            self.adapters.forget(digest)
        self._poll_soon()

    def _poll_soon(self) -> None:
        self._next_poll = min(self._next_poll, self._clock() + HURRY * self._pause_s)
        self._hurry.set()

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """Doubt the worker if a call in the block finds none: no more work until it answers a poll, soon."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() in GONE:
                self._is_doubted = True
                self._poll_soon()
            raise
