"""Common to both roles of worker: the real scheduler, cache, plan and loop over a virtual device and thread."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from kvtransfer import reader
from protos import decode_pb2, kv_pb2, prefill_pb2, worker_pb2
from tests.simulator.engine import VirtualRows
from tests.simulator.files import Files
from tests.simulator.loans import Loans
from tests.simulator.model import PAGE_TOKENS, WEIGHTS, Memory, Offer, Truth, find_seed, read, with_weights
from tests.simulator.world import Action, Process, ViolationError, World
from worker.interfaces import States
from worker.kv_cache import KVCacheManager
from worker.loop import WorkerLoop
from worker.params import ANY_NUMBER, SequenceParams
from worker.peers import other_ranks
from worker.plan import TokenBudget
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import Phase, ScheduledSequence, Update
from worker.sequences import Sequence as Tokens
from worker.states.slots import HeldSlots, StateSlots
from worker.table import num_rows_for
from worker.thread import Progress
from worker.tiers.kept_pages import KeptPages
from worker.tiers.key_log import KeyLog

LEASE_S = 4.0
BUDGET = TokenBudget(4, "--chunk-tokens")
MAX_LOST = 8  # keys that a worker remembers to have lost: a gateway that is further behind gets all
SPACING = 2 * PAGE_TOKENS  # of checkpoints
NO_LOCK = nullcontext()
UNCOUNTED = SimpleNamespace(inc=lambda *_: None, observe=lambda *_: None)
NO_METRICS: Any = SimpleNamespace(step_seconds=UNCOUNTED, count_step=lambda *_: None)
POOL: Any = SimpleNamespace(size_mib=1)


class VirtualThread:
    """Like worker.thread.EngineThread: runs steps while there is work, sleeps until woken or until a deadline."""

    lock = NO_LOCK
    core_share = 1.0

    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker
        self._is_asleep = True
        self._has_news = False
        self._num_sleeps = 0

    def wake(self) -> None:
        self._has_news = self._worker.is_changed = True
        if self._is_asleep:
            self._is_asleep = False
            self._worker.later(0.0, self._run)

    def progress(self) -> Progress:
        return Progress(0, 0.0, 0.0)

    def _run(self) -> None:
        self._has_news = False
        self._worker.loop.begin_step()

    def end_step(self, had_work: bool) -> None:
        if had_work or self._has_news:
            self._run()
            return
        self._is_asleep = True
        self._num_sleeps += 1
        deadline, sleep = self._worker.scheduler.next_deadline(), self._num_sleeps
        if deadline is not None:
            self._worker.later(max(deadline - self._worker.world.now, 0.0), lambda: self._alarm(sleep))

    def _alarm(self, sleep: int) -> None:
        if self._is_asleep and sleep == self._num_sleeps:
            self.wake()


class SteppedLoop(WorkerLoop):
    """The real loop except for `step`: time passes, and other events happen, until a step is collected."""

    worker: "SimWorker"

    def begin_on(self, worker: "SimWorker") -> None:
        self.worker = worker
        self.thread: Any = VirtualThread(worker)
        self._ends: deque[float] = deque()  # end times of launched steps

    def begin_step(self) -> None:
        """The first half of `step`."""
        self.worker.is_changed = True
        self._updates = self._scheduler.expire(self.worker.world.now)
        self._step_planned = self._plan(self._updates)
        if self._step_planned:
            self._launch(self._step_planned, self._updates)
        self._is_busy = bool(self._step_planned or self._in_flight)
        self._go_on()

    def _go_on(self) -> None:
        """The second half."""
        if len(self._in_flight) > (self._steps_ahead if self._step_planned else 0):
            self.worker.later(max(self._ends[0] - self.worker.world.now, 0.0), self._collect_and_go_on)
            return
        self._complete(self._updates)
        if self._updates:
            self._publish(0, self._updates)
        self.thread.end_step(self._is_busy or bool(self._updates))

    def _collect_and_go_on(self) -> None:
        self._updates += self._collect()
        self._go_on()

    def _launch(self, planned: list[ScheduledSequence], updates: list[Update]) -> None:
        num_flights = len(self._in_flight)
        super()._launch(planned, updates)
        if len(self._in_flight) > num_flights:
            now = self.worker.world.now
            self._ends.append(max(now, *self._ends, now) + self.worker.step_delay())

    def _collect(self) -> list[Update]:
        self._ends.popleft()
        self.worker.is_changed = True
        planned = self._in_flight[0].planned
        updates = super()._collect()
        for step in planned:
            if step.sequence.phase is not Phase.ENDED:
                self.worker.check_kv(step.sequence)
        return updates

    def stepped(self) -> list[Tokens]:
        """Sequences in launched steps."""
        return [step.sequence for flight in self._in_flight for step in flight.planned]


class SimWorker(Process):
    """A pool, a scheduler and a loop."""

    loop: SteppedLoop
    weights = WEIGHTS  # fingerprint
    revision = ""
    model = ""  # its name, where the fleet has several
    is_changed = False  # changed since the last check
    max_offer_pages = ANY_NUMBER

    def __init__(
        self, world: World, name: str, num_pages: int, max_running: int, steps_ahead: int, has_draft: bool,
        num_ranks: int, num_slots: int,
    ) -> None:  # fmt: skip
        self.num_pages = num_pages
        self.max_running = max_running
        self.steps_ahead = steps_ahead
        self.has_draft = has_draft
        self.num_ranks = num_ranks
        self.num_slots = num_slots  # 0: the model has no states
        self.files: Files | None = None  # below the pools; they outlive incarnations
        self.loans = Loans(self)
        super().__init__(world, name)

    def boot(self) -> None:
        self.memory = Memory(self.num_pages, self.num_ranks, self.num_slots)
        self.order = KeptPages(self.num_pages, PAGE_TOKENS, lambda: self.world.now)
        cache = PrefixCache(self.num_pages, self.memory.generations, self.order)
        slots = PrefixCache(self.num_slots, self.memory.slot_generations)
        states = StateSlots(slots, PAGE_TOKENS, SPACING) if self.num_slots else States()
        self.keys = KeyLog(max_lost=MAX_LOST)
        cache.watchers.append(self.keys)
        kv = KVCacheManager(cache, PAGE_TOKENS, self.weights, states=states, max_offer_pages=self.max_offer_pages)
        self.scheduler = Scheduler(kv, self.max_running, LEASE_S)
        self.rows = VirtualRows(num_rows_for(self.max_running), self.weights)
        self._truths: dict[int, Truth] = {}  # sequence id |-> its KV
        self.loop = self.build_loop()
        self.loop.begin_on(self)
        if self.files is not None:
            self.files.begin_on(self)

    def build_loop(self) -> SteppedLoop:
        raise NotImplementedError

    def step_delay(self) -> float:
        """A step's duration."""
        return self.world.delay()

    def status(self, request: worker_pb2.StatusRequest) -> worker_pb2.WorkerStatus:
        """The answer to a poll."""
        layout = kv_pb2.KvLayout(page_tokens=PAGE_TOKENS, weights=self.weights)
        peer = kv_pb2.Peer(
            incarnation=self.incarnation, layout=layout, num_pages=self.num_pages, model=self.model,
            revision=self.revision,
        )  # fmt: skip
        return worker_pb2.WorkerStatus(
            peer=peer, max_running=self.max_running, free_pages=self.scheduler.kv.cache.num_spare,
            num_running=self.scheduler.num_running, prompt_tokens_waiting=self.scheduler.num_tokens_waiting,
            keys=self.keys.pack(request.keys_since if request.incarnation == self.incarnation else 0),
        )  # fmt: skip

    def publish(self, step: int, updates: Sequence[Update]) -> None:
        """Send what a step changed."""
        raise NotImplementedError

    def check(self) -> None:
        """Check a scheduler that may have changed: every change wakes the thread."""
        if not self.is_changed:
            return
        self.is_changed = False
        self.scheduler.check()
        self.order.check()
        if any(self.scheduler.get(sequence.id) is None for sequence in self.loop.stepped()):
            raise ViolationError("a sequence is gone under a launched step")

    def restore(
        self, params: SequenceParams, request: decode_pb2.ReserveRequest | prefill_pb2.RunRequest, then: Action
    ) -> None:
        """`then` follows when the prompt's KV was read from files, and from the request's source, where it is there."""
        keys = self.scheduler.kv.keys_of(params)
        borrow = partial(self.loans.borrow, request.source, keys, then) if request.HasField("source") else then
        if self.files is None:
            borrow()
        else:
            self.files.restore(self, keys, borrow)

    # -- reads of other workers' pages ---------------------------------------------------------------------------

    def read_offer(self, offer: Offer, memory: Memory, into: tuple[list[int], list[int]], then: "ReadEnd") -> None:
        """Each rank copies the pages and slots, one after the other, and compares generations."""
        results: list[BaseException | None] = []
        for rank in range(self.num_ranks):
            copies = [partial(self.memory.read_page, rank, page, memory) for page in into[0]]
            copies += [partial(self.memory.read_slot, rank, slot, memory) for slot in into[1]]
            todo = list(zip(copies, [*offer.pages, *offer.slots], strict=True))
            self._read_later(rank, offer, memory, todo[::-1], results, then)

    def _read_later(self, *args: Any) -> None:
        """`_read` when the next copy is done."""
        self.later(self.world.slow_delay(self.world.faults.slow_reads), lambda: self._read(*args))

    def _read(
        self, rank: int, offer: Offer, memory: Memory, todo: list[tuple[Callable[[int], None], int]],
        results: list[BaseException | None], then: "ReadEnd",
    ) -> None:  # fmt: skip
        """`todo`: each copy and what it reads, last first. `results`: of the ranks that are done; all end the read."""
        if rank in self.memory.dead:
            return  # the worker is about to die, too
        try:
            copy, source = todo.pop()
            copy(source)
            if todo:
                self._read_later(rank, offer, memory, todo, results, then)
                return
            sources = [reader.PageRef(*promised) for promised in zip(offer.pages, offer.generations, strict=True)]
            reader.check_generations(sources, [memory.generations[page] for page in offer.pages])
            self._check_slots(offer, memory)
            results.append(None)
        except (reader.ReadError, RuntimeError) as error:
            results.append(error)
        if len(results) == self.num_ranks:
            then(other_ranks.find_failure(results))

    def _check_slots(self, offer: Offer, memory: Memory) -> None:
        sources = [reader.PageRef(*promised) for promised in zip(offer.slots, offer.slot_generations, strict=True)]
        reader.check_generations(sources, [memory.slot_generations[slot] for slot in offer.slots])

    # -- checks ------------------------------------------------------------------------------------------------------

    def find_seed(self, sequence: Tokens) -> int:
        """What the content of its first position follows from."""
        return with_weights(find_seed(sequence.params.cache_salt), self.weights)

    def check_kv(self, sequence: Tokens) -> None:
        """The sequence's KV is that of its tokens and its salt, for both models, and so are its states."""
        truth = self._truths.get(sequence.id)
        if truth is None:
            truth = self._truths[sequence.id] = Truth(self.find_seed(sequence))
        truth.follow(sequence.tokens)
        name = f"{sequence.params.request_id}#{sequence.params.attempt}"
        computed, pages = sequence.computed, sequence.pages
        if any(read(cells, pages, computed) != truth.main[:computed] for cells in self.memory.main):
            raise ViolationError(f"{name} runs on KV that is not its own")
        state = sequence.state if isinstance(sequence.state, HeldSlots) else HeldSlots([])
        for slot, at in ((state.checkpoint, state.checkpoint_at), (state.source, sequence.launched)):
            is_there = slot >= 0 and at <= computed
            if is_there and any(slots[slot] != truth.main[at - 1] for slots in self.memory.states):
                raise ViolationError(f"{name} has a state that is not its own")
        computed = sequence.draft_computed
        if not self.has_draft or not computed:
            return
        if any(read(cells, pages, computed) != truth.draft[:computed] for cells in self.memory.draft):
            raise ViolationError(f"{name} drafts from KV that is not its own")


Answer = Callable[[Any], None]
ReadEnd = Callable[[BaseException | None], None]  # gets the failure
