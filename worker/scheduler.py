"""All sequences of a worker: admission, room, steps and ends. Pure: `now` is passed in; the caller serialises calls.

sequences.py draws a sequence's life and what frees its pages; kv_cache.py owns these, adapters/ what computes
them; receiving.py takes offers.
"""

from array import array
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf

from wire.logprobs import TokenLogprobs
from wire.page_keys import PageKey
from worker.adapters.slots import NO_ADAPTER, AdapterSlots
from worker.kv_cache import KVCacheManager, Restore
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.sequences import AnswerFailedError, Phase, ScheduledSequence, Sequence, SequenceParams, Update


class OverGoalError(NoRoomError):
    """One more answer would make all of them slower than --itl-goal-ms."""


@dataclass(slots=True)
class Scheduler:
    """Decides which sequences run, and which of them get the pages of `kv`."""

    kv: KVCacheManager
    max_running: int
    lease_s: float
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    on_empty: Callable[[], None] = lambda: None  # called when the last sequence is gone
    most_answers: Callable[[int], int] = lambda limit: limit  # that keep the goal, at most `limit` (chunks.py)
    num_preemptions: int = 0
    num_expired: int = 0  # expired leases
    num_launched: int = 0  # steps launched and not collected, summed over sequences
    is_short: bool = False  # the last plan lacked pages: collect launched steps, then others can be preempted
    _sequences: dict[int, Sequence] = field(default_factory=dict)  # id |-> sequence, oldest first
    _by_handle: dict[tuple[str, int], int] = field(default_factory=dict)  # (gateway, handle) |-> id
    _next_id: int = 1
    _free_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free_rows = list(range(num_rows_for(self.max_running)))

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._sequences.values()))  # a copy: metrics read from another thread, and loops end sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, sequence_id: int) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def __getitem__(self, sequence_id: int) -> Sequence:
        return self._sequences[sequence_id]

    @property
    def num_running(self) -> int:
        return sum(sequence.phase is not Phase.ENDED for sequence in self)

    @property
    def num_waiting(self) -> int:
        return sum(sequence.is_waiting for sequence in self)

    @property
    def num_tokens_waiting(self) -> int:
        """Tokens whose KV is still to be computed here, besides each answer's last one."""
        computing = [sequence for sequence in self if sequence.phase in (Phase.ACTIVE, Phase.PREEMPTED)]
        return sum(max(sequence.num_missing - (sequence.params.max_tokens > 0), 0) for sequence in computing)

    def in_phase(self, phase: Phase) -> list[Sequence]:
        """Oldest first."""
        return [sequence for sequence in self if sequence.phase is phase]

    # -- admission -----------------------------------------------------------------------------------------------

    def admit(
        self, params: SequenceParams, now: float, is_kept: bool = False, keys: list[PageKey] | None = None
    ) -> Sequence:
        """Hold the cached pages of the prompt's start, and allocate the rest.

        `is_kept`: the pages stay until `end`. `keys`: `kv.keys_of(params)`. A repeated (gateway, handle) returns the
        same sequence. Raises NeverFitsError, NoRoomError (OverGoalError: only new answers) or UnknownAdapterError.
        """
        if params.handle and (params.gateway, params.handle) in self._by_handle:
            return self._sequences[self._by_handle[params.gateway, params.handle]]
        if keys is None:
            keys = self.kv.keys_of(params)
        is_scored = params.num_prompt_logprobs is not None  # scores need the computation
        hit = self.kv.find([] if is_scored else keys)
        is_here = self._computes_here(params, hit.num_usable * self.kv.page_tokens)
        sequence = Sequence(
            id=self._next_id,
            params=params,
            phase=Phase.ACTIVE if is_here else Phase.RECEIVING,
            tokens=array("i", params.prompt),
            keys=keys,
            pages=[],
            admitted_at=now,
            deadline=now + self.lease_s,
            scored=1 if is_here and is_scored else params.num_prompt,
            is_kept=is_kept,
        )
        found = self.kv.choose_pages(hit, sequence)
        self._check_room(params, found, self.kv.num_needed(sequence) - len(found))
        self.kv.open(sequence, hit, found)
        if params.adapter:
            sequence.adapter = self.adapters.acquire(params.adapter)
        sequence.num_cached = sequence.computed
        sequence.kv_at = now if sequence.num_cached == params.end else None
        self.kv.num_queried += 0 if is_scored else params.end
        self.kv.num_hit += sequence.num_cached
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        if params.handle:
            self._by_handle[params.gateway, params.handle] = sequence.id
        return sequence

    def _check_room(self, params: SequenceParams, found: Seq[int], needed: int) -> None:
        """Raises like `admit` if a params that needs this many new pages cannot be taken now."""
        if params.adapter:
            self.adapters.check_room(params.adapter)
        most_tokens = max(params.end, params.num_prompt + params.max_tokens if params.max_tokens else 0)
        most, num_pages = self.kv.num_pages(most_tokens), self.kv.cache.num_pages
        if most > num_pages:
            raise NeverFitsError(
                f"prompt and answer of {most_tokens} tokens need {most} pages; "
                f"this worker has {num_pages}: raise --kv-memory-mib or lower max_tokens"
            )
        running = self.num_running
        if running >= self.max_running:
            raise NoRoomError(f"{running} sequences are running, the most allowed by --max-running")
        growing = self._count_answers()
        if params.max_tokens and not params.num_emitted and growing >= (most_answers := self.most_answers(growing + 1)):
            raise OverGoalError(f"{growing} answers run, and more than {most_answers} would break --itl-goal-ms")
        self._check_spare(found, needed)

    def _count_answers(self) -> int:
        return sum(other.params.max_tokens > 0 for other in self if other.phase is not Phase.ENDED)

    def _check_spare(self, found: Seq[int], needed: int) -> None:
        """Raise NoRoomError unless this many pages are spare beside those `found`."""
        cache = self.kv.cache
        growing = self._count_answers()
        is_tight = bool(self.in_phase(Phase.PREEMPTED)) or not cache.can_take(found, needed + growing)
        if (growing and is_tight) or not cache.can_take(found, needed):  # a growing sequence may soon need a page
            raise NoRoomError(f"{needed} pages are needed, {max(cache.num_spare - growing, 0)} are spare")

    def begin_restore(self, keys: Seq[PageKey], slot_keys: Seq[PageKey]) -> Restore:
        """`KVCacheManager.begin_restore`, unless answers may soon need the pages. NoRoomError."""
        self._check_spare((), len(keys))
        return self.kv.begin_restore(keys, slot_keys)

    def _computes_here(self, params: SequenceParams, num_cached: int) -> bool:
        """Whether nothing comes from another worker. A partial page does not justify a transfer.

        NoRoomError: it must not, but images' encodings are not here.
        """
        if params.lacks_images(num_cached):
            if not params.max_tokens:
                raise NoRoomError("KV of the prompt's images was evicted just now")
            return False
        num_missing = params.end - num_cached
        return num_missing <= params.local_prefill_max_tokens or (num_cached > 0 and num_missing < self.kv.page_tokens)

    # -- room ----------------------------------------------------------------------------------------------------

    def resume_preempted(self) -> None:
        """Resume preempted sequences, oldest first, while there are pages for all that each needs."""
        for sequence in self.in_phase(Phase.PREEMPTED):
            is_scored = sequence.scored > sequence.params.end  # unscored prompt positions must be computed again
            num_keys = len(sequence.keys) if is_scored else (sequence.scored - 1) // self.kv.page_tokens
            hit = self.kv.find(sequence.keys[:num_keys])
            found = self.kv.choose_pages(hit, sequence)
            if not self.kv.cache.can_take(found, self.kv.num_needed(sequence) - len(found)):
                return
            try:
                self.kv.open(sequence, hit, found)
            except NoRoomError:
                return
            sequence.phase = Phase.ACTIVE

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend an active sequence's pages to `num_tokens` positions, preempting the newest active ones if needed.

        False if there is no room in this step: the sequence itself was the newest and got preempted, it is the only
        active one and receiving ones hold the pages, or others are in launched steps (`is_short`).
        """
        needed = self.kv.num_pages(num_tokens) - len(sequence.pages)
        if needed <= 0:
            return True
        while needed > self.kv.cache.num_spare:
            active = self.in_phase(Phase.ACTIVE)
            if active == [sequence]:
                return False
            if self.num_launched:
                self.is_short = True
                return False
            self._preempt(active[-1])
            if active[-1] is sequence:
                return False
        self.kv.extend(sequence, needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.kv.release(sequence)
        sequence.computed = sequence.launched = sequence.num_named = 0
        sequence.draft_computed = sequence.draft_launched = 0
        sequence.phase = Phase.PREEMPTED
        if sequence.params.lacks_images():  # it cannot be computed again here: its gateway asks anew, once this expires
            sequence.phase, sequence.deadline = Phase.RECEIVING, -inf
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def make_room_for_drafts(self, sequence: Sequence, count: int) -> int:
        """Extend an active sequence's pages by up to `count` positions beyond those launched, using spare pages only.

        Drafts take no page that another sequence may need in this step. Returns the number of drafts that fit.
        """
        count = min(count, self.kv.states.find_stop(sequence, sequence.launched - 1) - sequence.launched)
        room = len(sequence.pages) * self.kv.page_tokens - sequence.launched
        while room < count and self.kv.cache.num_spare > len(self._sequences):
            self.kv.extend(sequence, 1)
            room += self.kv.page_tokens
        return max(min(count, room), 0)

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: ScheduledSequence) -> None:
        """The step will be launched: the sequence's pages stay held until `finish_step` or `drop_step`."""
        sequence = step.sequence
        if sequence.row < 0:
            sequence.row = self._free_rows.pop()
        step.slots = self.kv.states.begin_step(sequence)
        sequence.launched += step.count
        sequence.scored += step.num_scored
        sequence.num_coming += step.wants_token
        sequence.num_steps_launched += 1
        self.num_launched += 1

    def note_draft_lead(self, step: ScheduledSequence, lead: int) -> None:
        """The draft model has launched all that goes before the step's drafts, but for -`lead` positions."""
        sequence = step.sequence
        sequence.draft_launched = max(sequence.draft_launched, step.begin + step.count + min(lead, 0))

    def drop_step(self, step: ScheduledSequence) -> None:
        """The step was not computed, at least not for this sequence."""
        self.take_back(step)
        self.end_step(step)

    def take_back(self, step: ScheduledSequence) -> None:
        """The step's result will not be used: its positions are to be launched again."""
        step.is_dropped = True
        step.sequence.launched -= step.count
        step.sequence.scored -= step.num_scored
        step.sequence.num_coming -= step.wants_token
        self.kv.states.take_back(step)

    def end_step(self, step: ScheduledSequence) -> None:
        """A launched step is over: computed, failed, or taken back."""
        step.sequence.num_steps_launched -= 1
        self.num_launched -= 1
        self.remove_if_over(step.sequence)

    def fail_step(self, step: ScheduledSequence, error: Exception | None, now: float) -> Update | None:
        """Drop the step and end its sequence: with `error`, or as complete if None. None if it has already ended."""
        self.drop_step(step)
        step.sequence.state.source = -1  # a later step may have begun on what this one left
        return None if step.sequence.phase is Phase.ENDED else self.end_answer(step.sequence, error, now)

    def end_answer(self, sequence: Sequence, error: Exception | None, now: float) -> Update:
        """End an answer with `error`, or as complete if None."""
        if error is None:
            return self.fail(sequence, "", now, "stop")
        reason = error.finish_reason if isinstance(error, AnswerFailedError) else "error"
        return self.fail(sequence, str(error), now, reason)

    def finish_step(
        self, step: ScheduledSequence, tokens: Seq[int], now: float, logprobs: Seq[TokenLogprobs] = (),
        prompt_logprobs: Seq[TokenLogprobs] = (), is_whole: bool = False,
    ) -> Update | None:  # fmt: skip
        """The step was computed and chose `tokens`, if any, as the next ones. None: nothing to report.

        If there are several tokens, all but the last are drafts that were right. Tokens beyond the answer's end are
        dropped. `logprobs`: one per token, or none; `prompt_logprobs`: of the prompt tokens that the step scored;
        `is_whole`: the answer is complete with these tokens.
        """
        sequence, num_right = step.sequence, max(len(tokens) - 1, 0)
        sequence.num_coming -= step.wants_token
        self.end_step(step)
        if sequence.phase is Phase.ENDED:
            return None
        kept: Seq[int] = ()
        reason = ""
        if tokens:
            kept, reason = sequence.keep(tokens)
            sequence.tokens.extend(kept)
            sequence.num_steps += 1
            sequence.last_token_at = now
            if sequence.first_token_at is None:
                sequence.first_token_at = now
        reason = "stop" if is_whole else reason
        computed = sequence.computed + step.count + num_right
        if sequence.state.held and num_right < step.num_drafted:  # the state after it has seen a wrong draft
            computed = sequence.launched = step.begin
            self.kv.states.take_back(step)
        if computed >= len(sequence.tokens):  # it ends, and its state has seen more
            computed, sequence.state.source = len(sequence.tokens) - 1, -1
        if self.kv.num_after and sequence.draft_computed == sequence.computed:  # a head follows each step
            self.kv.advance_draft(sequence, computed)
        elif step.draft_lead is not None:
            self.kv.advance_draft(sequence, min(sequence.computed + step.count + step.draft_lead, computed))
        self.advance(sequence, computed, now)
        if not sequence.num_steps_launched:
            sequence.launched = sequence.computed
        if not (kept or reason or prompt_logprobs or sequence.is_kept):
            return None
        update = Update(sequence, kept, reason, "", logprobs[: len(kept)], prompt_logprobs)
        if reason:
            update.timing = sequence.timing(now)
            self._end(sequence)
        return update

    def advance(self, sequence: Sequence, computed: int, now: float) -> None:
        """KV of positions [0, computed) is in the sequence's pages."""
        if sequence.kv_at is None and computed >= sequence.params.end:
            sequence.kv_at = now
        self.kv.advance(sequence, computed)

    # -- ends ----------------------------------------------------------------------------------------------------

    def fail(self, sequence: Sequence, error: str, now: float, reason: str = "error") -> Update:
        """End a sequence with `error`, or another `reason`. Its pages stay held while something needs them."""
        update = Update(sequence, (), reason, error, timing=sequence.timing(now))
        self._end(sequence)
        return update

    def end(self, sequence: Sequence) -> None:
        """Its Run call is over, with any result. Idempotent."""
        sequence.is_kept = False
        if sequence.id in self._sequences:
            self._end(sequence)

    def abort(self, gateway: str, handles: Collection[int] | None = None) -> list[Sequence]:
        """End sequences of `gateway`: all, or those with these handles. Ignores unknown handles. Returns the ended."""
        ended = [
            sequence for sequence in self
            if sequence.phase is not Phase.ENDED and sequence.params.gateway == gateway
            and (handles is None or sequence.params.handle in handles)
        ]  # fmt: skip
        for sequence in ended:
            self._end(sequence)
        return ended

    def _end(self, sequence: Sequence) -> None:
        sequence.phase = Phase.ENDED
        self.remove_if_over(sequence)

    def remove_if_over(self, sequence: Sequence) -> None:
        """An ended sequence goes once no step, read or Run call needs its pages."""
        if sequence.phase is not Phase.ENDED or sequence.num_steps_launched:
            return
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
        if sequence.is_read or sequence.is_kept:
            return
        self.kv.release(sequence)
        if sequence.adapter is not NO_ADAPTER:
            self.adapters.release(sequence.params.adapter)
        del self._sequences[sequence.id]
        self._by_handle.pop((sequence.params.gateway, sequence.params.handle), None)
        if not self._sequences:
            self.on_empty()

    def check(self) -> None:
        """Check pages, slots, adapters and rows, and that each sequence's phase fits what it has."""
        sequences = list(self)
        self.kv.check(sequences)
        self.adapters.check([sequence.adapter for sequence in sequences if sequence.params.adapter])
        for sequence in sequences:
            is_answering = sequence.phase is Phase.ACTIVE and sequence.params.max_tokens
            if is_answering and len(sequence.tokens) <= sequence.computed:
                raise AssertionError(f"active sequence {sequence.id} has no token left to step on")
            if sequence.phase is Phase.PREEMPTED and sequence.pages:
                raise AssertionError(f"sequence {sequence.id} is preempted and holds pages")
        rows = [sequence.row for sequence in sequences if sequence.row >= 0]
        if sorted(rows + self._free_rows) != list(range(num_rows_for(self.max_running))):
            raise AssertionError("a row belongs to two sequences, or to none and is not free")


def num_rows_for(max_running: int) -> int:
    """Rows that the engine needs: ended sequences keep theirs until their last step is collected."""
    return 2 * max_running
