"""Rules broken on purpose, each in one place: the simulator must notice.

Each entry of MUTATIONS is a context manager that disables one rule.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from gateway.router import fleet
from gateway.router.decode_client import DecodeClient, Session
from gateway.router.engine_client import State
from gateway.router.order import Order
from gateway.router.placer import Placer
from gateway.router.prefill_client import PrefillClient
from gateway.router.request import Request
from gateway.router.worker_client import WorkerClient
from gateway.router.worker_view import WorkerView
from gateway.scaling import sleep_policy, sleepers
from gateway.scaling.model_gate import ModelGate
from gateway.scaling.sleep_policy import Decision, ModelView
from kvtransfer import page_files, reader
from prefill_worker.main import BothRunners
from tests.simulator.decode import SimDecode
from tests.simulator.engine import VirtualRunner
from tests.simulator.files import Files, SavedPage
from tests.simulator.loans import Lent, Loans
from tests.simulator.prefill import HandOver, SimPrefill
from tests.simulator.worker import SimWorker
from wire import page_keys
from wire.page_keys import PageKey
from worker import kv_cache, loop, receiving
from worker.admission import AdmittingTable
from worker.kv_cache import Hit, KVCacheManager, Restore
from worker.params import SequenceParams
from worker.peers import other_ranks
from worker.prefix_cache import EvictionOrder, PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import NO_STATE, Phase, ScheduledSequence, Update
from worker.sequences import Sequence as Tokens
from worker.states.slots import HeldSlots, StateSlots
from worker.tiers import plans
from worker.tiers.kept_pages import KeptPages
from worker.tiers.plans import RestorePlan

Mutation = Callable[[], AbstractContextManager[object]]
ANY_GENERATION = -1


def patched(*changes: tuple[Any, str, Any]) -> Mutation:
    """`changes`: owner, attribute, replacement."""

    @contextmanager
    def mutate() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in changes:
                stack.enter_context(patch.object(owner, name, value))
            yield

    return mutate


admit = Scheduler.admit
allocate = PrefixCache.allocate
begin_read = receiving.begin_read
begin_restore = plans.begin_restore
begin_state_step = StateSlots.begin_step
begin_step = Scheduler.begin_step
check_room = Scheduler._check_room
check_generations = reader.check_generations
choose = Placer.choose
move_path = VirtualRunner._move
end_loan = Loans.end
end_restore = plans.end_restore
end_sequence = Scheduler._end
find = StateSlots.find
find_hit = KVCacheManager.find
find_receiving = receiving._find_receiving
finish_read = receiving.finish_read
finish_step = Scheduler.finish_step
generations_of = SimPrefill._generations_of
make_room = Scheduler.make_room
plan_loan = plans.plan_loan
release = PrefixCache.release
root_key = page_keys.root_key
offered = StateSlots.offered
deliver = DecodeClient._deliver
take_back = Scheduler.take_back
change = ModelGate.change
enter = ModelGate.enter
decide = sleep_policy.decide
inside = ModelGate.inside


# -- pages and their generations -----------------------------------------------------------------------------------


def _allocate_silently(self: PrefixCache, count: int) -> list[int]:
    pages = allocate(self, count)
    for page in pages:
        self.generations[page] -= 1
    return pages


def _evict_silently(self: PrefixCache, count: int) -> list[int]:
    num_free = len(self._free)
    pages = allocate(self, count)
    for page in pages[num_free:]:
        self.generations[page] -= 1
    return pages


def _allocate_with_drafts(self: PrefixCache, count: int) -> list[int]:
    before = list(self._has_draft)
    pages = allocate(self, count)
    for page in pages:
        self._has_draft[page] = before[page]
    return pages


def _take_without_hint(self: KeptPages, page: int) -> None:
    if not self._is_hinted(page):
        EvictionOrder.take(self, page)


def _evict_any(self: PrefixCache) -> int:
    key, page = next(iter(self._page.items()))
    del self._page[key]
    self._key[page] = None
    self._cached.pop(page, None)
    return page


def _release_for_all(self: PrefixCache, pages: Sequence[int]) -> None:
    held = [page for page in pages if self._num_holders[page]]
    for page in held:
        self._num_holders[page] = 1
    release(self, held)


def _check_nothing(sources: Sequence[reader.PageRef], found: Sequence[int]) -> None:
    pass


def _find_common_failure(results: Sequence[BaseException | None]) -> BaseException | None:
    return None if None in results else results[0]


def _promise_nothing_of_cached(self: SimPrefill, work: HandOver, pages: Sequence[int]) -> list[int]:
    cached = work.sequence.pages[: work.sequence.num_cached // self.scheduler.kv.page_tokens]
    promised = generations_of(self, work, pages)
    return [ANY_GENERATION if page in cached else one for page, one in zip(pages, promised, strict=True)]


def _check_promised(sources: Sequence[reader.PageRef], found: Sequence[int]) -> None:
    promised = [at for at, source in enumerate(sources) if source.generation != ANY_GENERATION]
    check_generations([sources[at] for at in promised], [found[at] for at in promised])


# -- keys ----------------------------------------------------------------------------------------------------------


def _root_without_salt(model: str, cache_salt: str, adapter: str) -> PageKey:
    return root_key(model, "", adapter)


def _key_without_parent(parent: PageKey, packed_tokens: bytes) -> PageKey:
    """The key keeps only the root's model and salt."""
    return parent[:8] + blake2b(packed_tokens, digest_size=8).digest()


def _name_early(self: Scheduler, step: ScheduledSequence) -> None:
    begin_step(self, step)
    sequence = step.sequence
    whole = min(sequence.launched // self.kv.page_tokens, len(sequence.keys))
    for page, key in zip(sequence.pages[:whole], sequence.keys, strict=False):
        self.kv.cache.name(page, key)


# -- the ends of sequences -----------------------------------------------------------------------------------------


def _finish_and_end(self: Scheduler, step: ScheduledSequence, *args: Any) -> Update | None:
    update = finish_step(self, step, *args)
    sequence = step.sequence
    if sequence.is_kept and sequence.computed == sequence.params.end:
        self.end(sequence)
    return update


def _end_freeing(is_in_use: Callable[[Tokens], object]) -> Callable[[Scheduler, Tokens], None]:
    def end(self: Scheduler, sequence: Tokens) -> None:
        sequence.phase = Phase.ENDED
        if is_in_use(sequence):
            self.kv.release(sequence)
            sequence.computed = sequence.draft_computed = 0
        self.remove_if_over(sequence)

    return end


def _make_room_in_flight(self: Scheduler, sequence: Tokens, num_tokens: int) -> bool:
    launched, self.num_launched = self.num_launched, 0
    try:
        return make_room(self, sequence, num_tokens)
    finally:
        self.num_launched = launched


def _move_siblings(self: VirtualRunner, pages: Sequence[int], begin: int, path: Sequence[int], count: int) -> None:
    others = [((index - 1) ^ 1) + 1 if index else 0 for index in path]
    move_path(self, pages, begin, [index if index < count else 0 for index in others], count)


# -- the draft model's KV ------------------------------------------------------------------------------------------


def _finish_read_with_draft(scheduler: Scheduler, sequence_id: int, *args: Any) -> None:
    sequence = scheduler[sequence_id]
    sequence.draft_computed = sequence.computed
    finish_read(scheduler, sequence_id, *args)


def _launch_draft_last(self: Any, requests: Any) -> Any:
    launched = self._runner.launch(requests)
    self._draft_runner.launch([part._replace(num_logits=0, num_given=0) for part in requests])
    return launched


def _launch_without_settling(self: BothRunners, requests: Any, launch: Any) -> Any:
    self._draft_runner.launch([part._replace(num_logits=0, num_given=0) for part in requests])
    return launch(requests)


# -- states --------------------------------------------------------------------------------------------------------


def _keep_first(name: Callable[[Tokens], object]) -> Callable[[Any, Tokens, list[int]], list[int]]:
    """The slots that were first right for what `name` names."""
    first: WeakKeyDictionary[PrefixCache, dict[object, list[int]]] = WeakKeyDictionary()

    def keep(self: Any, sequence: Tokens, slots: list[int]) -> list[int]:
        kept = first.setdefault(self.cache, {})
        return (kept.setdefault(name(sequence), slots) + slots)[: len(slots)] if slots else slots

    return keep


_find_early = _keep_first(lambda sequence: sequence.id)
_find_old = _keep_first(lambda sequence: sequence.params.request_id)


def _offer_states_early(self: StateSlots, sequence: Tokens, positions: range) -> list[int]:
    slots = _find_early(self, sequence, offered(self, sequence, range(sequence.params.end)))
    return slots if positions.stop == sequence.params.end else []


def _offer_states_of_request(self: StateSlots, sequence: Tokens, positions: range) -> list[int]:
    return _find_old(self, sequence, offered(self, sequence, positions))


def _find_any_checkpoint(self: StateSlots, keys: Sequence[PageKey]) -> tuple[int, int]:
    count, slot = find(self, keys)
    return (count, next(iter(self.cache._page.values()))) if count else (count, slot)


def _use_all_pages(self: KVCacheManager, keys: Sequence[PageKey]) -> Hit:
    hit = find_hit(self, keys)
    return hit._replace(num_usable=len(hit.pages) if hit.num_usable else 0)


def _end_freeing_slots(is_in_use: Callable[[Tokens], object]) -> Callable[[Scheduler, Tokens], None]:
    def end(self: Scheduler, sequence: Tokens) -> None:
        if is_in_use(sequence):
            if isinstance(sequence.state, HeldSlots):
                self.kv.states.cache.release(sequence.state.held)
            sequence.state = NO_STATE
        end_sequence(self, sequence)

    return end


def _read_into_first(scheduler: Scheduler, sequence_id: int, *args: Any) -> tuple[list[int], list[int]]:
    pages, slots = begin_read(scheduler, sequence_id, *args)
    return pages, _find_old(scheduler.kv, scheduler[sequence_id], slots)


def _write_in_place(is_wanted: Callable[[bool], bool]) -> Callable[..., tuple[int, int]]:
    def begin_step(self: StateSlots, sequence: Tokens) -> tuple[int, int]:
        source, target = begin_state_step(self, sequence)
        state = sequence.state
        if isinstance(state, HeldSlots) and source >= 0 and is_wanted(source == state.checkpoint):
            state.source = target = source
        return source, target

    return begin_step


def _keep_source(self: Scheduler, step: ScheduledSequence) -> None:
    state = step.sequence.state
    source = state.source if isinstance(state, HeldSlots) else -1
    take_back(self, step)
    if isinstance(state, HeldSlots):
        state.source = source


def _restore_source(self: Scheduler, step: ScheduledSequence) -> None:
    take_back(self, step)
    if isinstance(step.sequence.state, HeldSlots):
        step.sequence.state.source = step.slots[0]


# -- files ---------------------------------------------------------------------------------------------------------


def _use_unless(is_foreign: bool) -> Callable[[SavedPage, PageKey], bool]:
    """Only one of the two checks of a file."""
    return staticmethod(lambda saved, key: saved.key == key if is_foreign else saved.is_whole)


def _name_at_once(table: AdmittingTable, keys: Sequence[PageKey], *others: Sequence[PageKey]) -> Restore:
    restore = begin_restore(table, keys, *others)
    for page, key in zip(restore.pages, keys, strict=True):
        table.kv.cache.name(page, key)
    return restore


def _end_with_all(self: KVCacheManager, restore: Restore, drafts: Sequence[bool], num_slots: int) -> None:
    missing = len(restore.pages) - len(drafts)
    end_restore(self, restore, [*drafts, *[True] * missing], num_slots)


def _end_with_drafts(self: KVCacheManager, restore: Restore, drafts: Sequence[bool], num_slots: int) -> None:
    end_restore(self, restore, [True] * len(drafts), num_slots)


def _end_with_slots(self: KVCacheManager, restore: Restore, drafts: Sequence[bool], num_slots: int) -> None:
    end_restore(self, restore, drafts, len(restore.slots))


def _end_without_draft(self: KVCacheManager, restore: Restore, drafts: Sequence[bool], num_slots: int) -> None:
    needs_draft, self.needs_draft = self.needs_draft, False
    end_restore(self, restore, drafts, num_slots)
    self.needs_draft = needs_draft


# -- loans ---------------------------------------------------------------------------------------------------------


def _promise_nothing(self: Loans, pages: Sequence[int]) -> list[int]:
    return [ANY_GENERATION] * len(pages)


def _end_loan_as_if_read(self: Loans, restore: Restore, lent: Lent, failure: BaseException | None) -> None:
    end_loan(self, restore, lent, None)


def _plan_loan_of_next(keys: Sequence[PageKey], begin: int, num_pages: int, num_slots: int) -> RestorePlan:
    plan = plan_loan(keys, begin, num_pages, num_slots)
    return plan._replace(keys=[*keys[begin + 1 :], *keys[:1]][:num_pages])


# -- attempts, incarnations, leases --------------------------------------------------------------------------------


def _name_by_request(self: Scheduler, params: SequenceParams, now: float, is_kept: bool = False) -> Tokens:
    if params.max_tokens:
        self._next_id = int(params.request_id[1:]) + 1
    return admit(self, params, now, is_kept)


def _find_any_attempt(scheduler: Scheduler, sequence_id: int, attempt: int, adapter: str) -> Tokens:
    sequence = scheduler.get(sequence_id)
    return find_receiving(scheduler, sequence_id, sequence.params.attempt if sequence else attempt, adapter)


def _open_session_of_request(self: DecodeClient, attempt: int, silent_since: float, on_over: Any) -> Session:
    """The first session's handle for all: its stream names the request's sessions alike."""
    session = Session(1, attempt, self._stream, silent_since, on_over)
    self._sessions[session.handle] = session
    return session


def _deliver_any_attempt(self: DecodeClient, delta: Any, now: float) -> None:
    if delta.handle in self._sessions:
        delta.attempt = self._sessions[delta.handle].attempt
    deliver(self, delta, now)


def _choose_credulously(self: Placer, workers: Sequence[Any], request: Request) -> Any:
    request.mistaken.clear()
    request.num_mistakes = 0
    return choose(self, workers, request)


take_back_slots = StateSlots.take_back


def _take_back_undrafted(self: StateSlots, step: ScheduledSequence) -> None:
    if not step.drafts:
        take_back_slots(self, step)


def _check_room_without_goal(self: Scheduler, *args: Any) -> None:
    most_answers, self.most_answers = self.most_answers, lambda limit: limit
    try:
        check_room(self, *args)
    finally:
        self.most_answers = most_answers


def _due_whatever_began(self: Request) -> float:
    return self.deadline if self.first_by is None else min(self.first_by, self.deadline)


# -- models that sleep ---------------------------------------------------------------------------------------------


def _decide_ignoring_falls(models: Sequence[ModelView], *args: Any) -> Decision:
    return decide([replace(one, state="asleep") if one.state == "falling asleep" else one for one in models], *args)


async def _enter_after_a_change_of_state(self: ModelGate, timeout_s: float) -> float:
    before, wish = self.state, object()
    if not self.is_open:
        self._wishes[wish] = self._clock()
        self._changes.mark()
        try:
            await self._changes.until(lambda: self.state != before, timeout_s)
        finally:
            del self._wishes[wish]
    return await enter(self, timeout_s)


def _fail_silently(self: ModelGate, state: State, reason: str = "") -> None:
    wishes = dict(self._wishes)
    change(self, state, reason)
    self._wishes = wishes


@contextmanager
def _inside_for_good(self: ModelGate) -> Iterator[None]:
    """A request whose client leaves stays inside."""
    with inside(self):
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_inside += 1
            raise


def _nothing(*_: object) -> None:
    pass


def _no_updates(*_: object) -> Iterable[Any]:
    return []


MUTATIONS: dict[str, Mutation] = {
    "an answer goes on with any weights": patched((WorkerView, "computes", "")),
    "a request's roles are of two revisions": patched((WorkerView, "partners", "")),
    "generations are not compared after a read": patched((reader, "check_generations", _check_nothing)),
    "a page's generation stays when its owner changes": patched((PrefixCache, "allocate", _allocate_silently)),
    "a cached page keeps its generation when given out anew": patched((PrefixCache, "allocate", _evict_silently)),
    "offers of cached pages accept any generation": patched(
        (SimPrefill, "_generations_of", _promise_nothing_of_cached), (reader, "check_generations", _check_promised)
    ),
    "a page with a hint can be evicted while it is held": patched((KeptPages, "take", _take_without_hint)),
    "a held page is evicted": patched((PrefixCache, "_evict", _evict_any)),
    "a shared page is free with its first holder": patched((PrefixCache, "release", _release_for_all)),
    "a key without salt": patched((kv_cache, "root_key", _root_without_salt)),
    "a key without parent": patched(
        (page_keys, "next_key", _key_without_parent), (kv_cache, "next_key", _key_without_parent)
    ),
    "a page has its key before its KV": patched((Scheduler, "begin_step", _name_early)),
    "a page without draft KV is used as if it had it": patched((PrefixCache, "has_draft", lambda self, page: True)),
    "a page has its draft mark when given out anew": patched((PrefixCache, "allocate", _allocate_with_drafts)),
    "pages read behind some without draft KV hide these": patched((receiving, "finish_read", _finish_read_with_draft)),
    "prefill launches the draft model's forward last": patched((BothRunners, "launch", _launch_draft_last)),
    "prefill does not wait for a failed launch's draft forward": patched(
        (BothRunners, "_launch", _launch_without_settling)
    ),
    "a sibling's KV is kept": patched((VirtualRunner, "_move", _move_siblings)),
    "a path's KV is not moved": patched((VirtualRunner, "_move", lambda *_: None)),
    "a step with drafts is in flight alone": patched((loop, "_has_drafts", lambda planned: False)),
    "prefill frees pages before they are acknowledged": patched((Scheduler, "finish_step", _finish_and_end)),
    "prefill frees pages under a step": patched(
        (Scheduler, "_end", _end_freeing(lambda it: it.num_steps_launched and not it.params.max_tokens))
    ),
    "decode frees pages under a step": patched(
        (Scheduler, "_end", _end_freeing(lambda it: it.num_steps_launched and it.params.max_tokens))
    ),
    "a read is good when one rank's was": patched((other_ranks, "find_failure", _find_common_failure)),
    "decode frees pages under a read": patched((Scheduler, "_end", _end_freeing(lambda it: it.is_read))),
    "a sequence is preempted under a step": patched((Scheduler, "make_room", _make_room_in_flight)),
    "decode forgets the attempt": patched(
        (Scheduler, "admit", _name_by_request), (receiving, "_find_receiving", _find_any_attempt)
    ),
    "the gateway forgets the attempt": patched(
        (DecodeClient, "open_session", _open_session_of_request), (DecodeClient, "_deliver", _deliver_any_attempt)
    ),
    "decode ignores a ticket's incarnation": patched((SimDecode, "_check_ticket", _nothing)),
    "decode ignores a ticket's incarnation and attempt": patched(
        (SimDecode, "_check_ticket", _nothing), (receiving, "_find_receiving", _find_any_attempt)
    ),
    "decode ignores incarnation, attempt and handshake": patched(
        (SimDecode, "_check_ticket", _nothing),
        (receiving, "_find_receiving", _find_any_attempt),
        (SimDecode, "_forget_peers", _nothing),
    ),
    "a state is offered that was right at an earlier offer": patched((StateSlots, "offered", _offer_states_early)),
    "a state's generation is not compared after a read": patched((SimWorker, "_check_slots", _nothing)),
    "a checkpoint is that of any key": patched((StateSlots, "find", _find_any_checkpoint)),
    "a hit goes on beyond its checkpoint": patched((KVCacheManager, "find", _use_all_pages)),
    "slots are freed under a step": patched((Scheduler, "_end", _end_freeing_slots(lambda it: it.num_steps_launched))),
    "slots are freed under a read": patched((Scheduler, "_end", _end_freeing_slots(lambda it: it.is_read))),
    "prefill offers the slots of an earlier attempt": patched((StateSlots, "offered", _offer_states_of_request)),
    "decode reads into the slots of an earlier attempt": patched((receiving, "begin_read", _read_into_first)),
    "a wrong draft stays in the state": patched((StateSlots, "take_back", _take_back_undrafted)),
    "a step writes into the slot that it reads": patched(
        (StateSlots, "begin_step", _write_in_place(lambda is_checkpoint: not is_checkpoint))
    ),
    "a step writes into a checkpoint": patched(
        (StateSlots, "begin_step", _write_in_place(lambda is_checkpoint: is_checkpoint))
    ),
    "a step begins on what a dropped one was to leave": patched((Scheduler, "take_back", _keep_source)),
    "what a failed step left becomes a checkpoint": patched((Scheduler, "take_back", _restore_source)),
    "a page is saved that has had another holder": patched(
        (page_files, "find_unchanged", lambda entries, generations: list(range(len(entries))))
    ),
    "a torn file is used": patched((Files, "is_usable", _use_unless(is_foreign=True))),
    "another page's file is used": patched((Files, "is_usable", _use_unless(is_foreign=False))),
    "pages are found while they are read from files": patched((plans, "begin_restore", _name_at_once)),
    "pages behind a file that cannot be used count as read": patched((plans, "end_restore", _end_with_all)),
    "a checkpoint whose file cannot be used counts as read": patched((plans, "end_restore", _end_with_slots)),
    "a file without draft KV counts as one with it": patched((plans, "end_restore", _end_with_drafts)),
    "prefill uses files without draft KV": patched((plans, "end_restore", _end_without_draft)),
    "loans accept any generation": patched(
        (Loans, "promise", _promise_nothing), (reader, "check_generations", _check_promised)
    ),
    "a loan that failed counts as read": patched((Loans, "end", _end_loan_as_if_read)),
    "a loan's pages get the keys of the next ones": patched((plans, "plan_loan", _plan_loan_of_next)),
    "leases do not end": patched((Scheduler, "expire", _no_updates), (Scheduler, "next_deadline", _nothing)),
    "requests stay held back": patched((Placer, "end", _nothing)),
    "a gateway goes on believing a wrong memory": patched(
        (Placer, "choose", _choose_credulously), (Placer, "correct", _nothing)
    ),
    "a deadline ends an answer that has begun": patched((Request, "due", property(_due_whatever_began))),
    "an answer begins after its deadline": patched((Request, "due", property(lambda self: self.deadline))),
    "answers are taken that break the goal": patched((Scheduler, "_check_room", _check_room_without_goal)),
    "a refused request goes before all others": patched((Request, "is_retry", property(lambda self: self.attempt > 1))),
    "requests that are gone count for their owners": patched((Order, "leave_place", _nothing)),
    "runs at a silent prefill worker go on": patched((PrefillClient, "_judge", _nothing)),
    "sessions at a silent decode worker go on": patched((DecodeClient, "_judge", _nothing)),
    "a call at a silent worker takes a heartbeat": patched(
        (WorkerClient, "find_patience", lambda self: self._heartbeat_s)
    ),
    "silence does not change a view": patched((fleet, "CHECK_S", 1e9)),
    "a view is not built anew": patched((WorkerClient, "_drop_view", _nothing)),
    "a retry forgets the tokens emitted": patched((Request, "packed_tokens", property(lambda self: self._prompt))),
    "a retry asks for all tokens again": patched((Request, "num_left", property(lambda self: self.wanted.max_tokens))),
}

MODEL_MUTATIONS: dict[str, Mutation] = {  # shown by the schedules of models.py
    "a model with requests falls asleep": patched(
        (ModelView, "is_idle", property(lambda self: self.state == "awake" and self.waiting_since is None))
    ),
    "a model that falls asleep counts as asleep": patched((sleepers, "decide", _decide_ignoring_falls)),
    "a turn does not end": patched((sleep_policy, "TURN_S", 1e9)),
    "requests wait on when a closed model opens": patched((ModelGate, "enter", _enter_after_a_change_of_state)),
    "requests wait on when a wake fails": patched((ModelGate, "change", _fail_silently)),
    "a request that leaves stays inside": patched((ModelGate, "inside", _inside_for_good)),
    "a model is awake although no worker is linked": patched((sleepers, "find_unready", _nothing)),
}
