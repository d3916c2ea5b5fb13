"""All sequences of a worker and the pages they hold. Pure: ints, with `now` passed in; the caller serialises calls.

sequences.py draws a sequence's life and what frees its pages; prefix_cache.py describes pages.
"""

from array import array
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from wire.logprobs import TokenLogprobs
from wire.page_keys import TOKEN_BYTES, PageKey, next_key, page_keys, root_key
from worker.prefix_cache import NeverFitsError, NoRoomError, PrefixCache, num_pages_for
from worker.sequences import ANY_NUMBER, AnswerFailedError, Phase, ScheduledSequence, Sequence, SequenceParams, Update
from worker.states import StateSlots


class OfferRefusedError(Exception):
    """The sequence does not accept this offer. `reason` is one word, as in OfferResponse.reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Scheduler:
    """All sequences of a worker, and the pages of its pool."""

    cache: PrefixCache
    page_tokens: int
    max_running: int
    lease_s: float
    model: str = ""  # fingerprint of the weights
    max_offer_pages: int = ANY_NUMBER  # bounds the duration of a read
    on_empty: Callable[[], None] = lambda: None  # called when the last sequence is gone
    states: StateSlots | None = None  # of a model whose layers keep some
    num_preemptions: int = 0
    num_expired: int = 0  # expired leases
    num_queried: int = 0  # prompt tokens looked up in the cache
    num_hit: int = 0  # of those, the cached ones
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

        `is_kept`: the pages stay until `end`. `keys`: `keys_of(params)`. A repeated (gateway, handle) returns the same
        sequence. Raises NeverFitsError or NoRoomError.
        """
        if params.handle and (params.gateway, params.handle) in self._by_handle:
            return self._sequences[self._by_handle[params.gateway, params.handle]]
        keys = self.keys_of(params) if keys is None else keys
        found = self.cache.find(keys) if params.num_prompt_logprobs is None else []  # scores need the computation
        num_usable, checkpoint = self._find_checkpoint(keys[: len(found)])
        is_here = self._computes_here(params, num_usable * self.page_tokens)
        branch = len(found) * self.page_tokens
        if is_here:
            found = found[:num_usable]
        elif self.states and branch == params.end:
            found.pop()  # the state comes with some pages
        num_missing = num_pages_for(params.num_prompt if params.max_tokens else params.end, self.page_tokens) - len(
            found
        )
        self._check_room(params, found, num_missing)
        state = None
        if self.states and is_here:
            state = self.states.open(checkpoint, num_usable * self.page_tokens, branch)
        elif self.states:
            state = self.states.open_receiving(has_checkpoint=params.end >= self.page_tokens)
        self.cache.hold(found)
        num_cached = len(found) * self.page_tokens
        self.num_queried += params.end if params.num_prompt_logprobs is None else 0
        self.num_hit += num_cached
        sequence = Sequence(
            id=self._next_id,
            params=params,
            phase=Phase.ACTIVE if is_here else Phase.RECEIVING,
            tokens=array("i", params.prompt),
            keys=keys,
            pages=found + self.cache.allocate(num_missing),
            admitted_at=now,
            deadline=now + self.lease_s,
            scored=1 if is_here and params.num_prompt_logprobs is not None else params.num_prompt,
            num_cached=num_cached,
            is_kept=is_kept,
            kv_at=now if num_cached == params.end else None,
            state=state,
        )
        self._take_cached(sequence, num_cached)
        self._next_id += 1
        self._sequences[sequence.id] = sequence
        if params.handle:
            self._by_handle[params.gateway, params.handle] = sequence.id
        return sequence

    def keys_of(self, params: SequenceParams) -> list[PageKey]:
        """Keys of the whole pages before `params.end`. 6 ms for 128k tokens: computed before locking."""
        return list(page_keys(self._root_of(params), params.prompt[: params.end * TOKEN_BYTES], self.page_tokens))

    def _root_of(self, params: SequenceParams) -> PageKey:
        """The parent key of the first page."""
        return root_key(self.model, params.cache_salt)

    def _check_room(self, params: SequenceParams, found: Seq[int], needed: int) -> None:
        """Raises NeverFitsError or NoRoomError if a params that needs this many new pages cannot be taken now."""
        most_tokens = max(params.end, params.num_prompt + params.max_tokens if params.max_tokens else 0)
        most = num_pages_for(most_tokens, self.page_tokens)
        if most > self.cache.num_pages:
            raise NeverFitsError(
                f"prompt and answer of {most_tokens} tokens need {most} pages; "
                f"this worker has {self.cache.num_pages}: raise --kv-memory-mib or lower max_tokens"
            )
        running = self.num_running
        if running >= self.max_running:
            raise NoRoomError(f"{running} sequences are running, the most allowed by --max-running")
        growing = sum(other.params.max_tokens > 0 for other in self if other.phase is not Phase.ENDED)
        is_tight = bool(self.in_phase(Phase.PREEMPTED)) or not self.cache.can_take(found, needed + growing)
        if (growing and is_tight) or not self.cache.can_take(found, needed):  # a growing sequence may soon need a page
            raise NoRoomError(f"{needed} pages are needed, {max(self.cache.num_spare - growing, 0)} are spare")

    def _find_checkpoint(self, keys: Seq[PageKey]) -> tuple[int, int]:
        """How many of the pages with these keys a step can continue, and the slot of their state."""
        return self.states.find(keys) if self.states else (len(keys), -1)

    def _computes_here(self, params: SequenceParams, num_cached: int) -> bool:
        """Whether nothing comes from another worker. A partial page does not justify a transfer."""
        num_missing = params.end - num_cached
        return num_missing <= params.local_prefill_max_tokens or (num_cached > 0 and num_missing < self.page_tokens)

    def _take_cached(self, sequence: Sequence, num_cached: int) -> None:
        """The first `num_cached` positions of the sequence are in cached pages."""
        sequence.num_named = num_cached // self.page_tokens
        sequence.computed = sequence.launched = num_cached
        sequence.draft_computed = 0
        for page in sequence.pages[: sequence.num_named]:
            if not self.cache.has_draft(page):
                break
            sequence.draft_computed += self.page_tokens
        sequence.draft_launched = sequence.draft_computed

    # -- offers --------------------------------------------------------------------------------------------------

    def next_offer(self, sequence: Sequence, begin: int) -> range | None:
        """Positions from `begin` on that can be offered now: whole pages, plus the last part once all are computed."""
        computed, end = sequence.computed, sequence.params.end
        whole = computed if computed == end else computed // self.page_tokens * self.page_tokens
        stop = min(whole, begin + self.max_offer_pages * self.page_tokens)
        return range(begin, stop) if stop > begin else None

    def pages_of(self, sequence: Sequence, positions: range) -> list[int]:
        """The pages that hold `positions`, which start on a page boundary."""
        return sequence.pages[positions.start // self.page_tokens : num_pages_for(positions.stop, self.page_tokens)]

    def states_of(self, sequence: Sequence, positions: range) -> list[int]:
        """The slots to offer with `positions`: with the last ones the state after them, and that after whole pages."""
        state, end = sequence.state, sequence.params.end
        if state is None or positions.stop < end:
            return []
        whole = end // self.page_tokens * self.page_tokens
        return [state.source, *([state.checkpoint] if 0 < whole == state.checkpoint_at < end else [])]

    def renew(self, sequence_id: int, attempt: int, now: float) -> None:
        """The prompt is still being computed: restart the lease. Raises OfferRefusedError."""
        self._find_receiving(sequence_id, attempt).deadline = now + self.lease_s

    def begin_read(
        self, sequence_id: int, attempt: int, begin: int, end: int, num_pages: int, num_slots: int = 0
    ) -> tuple[list[int], list[int]]:
        """Accept an offer of positions [begin, end), and of states as `states_of` has them.

        Returns the pages and the slots to copy into, held until `finish_read`. A sequence's offers come in order, one
        at a time. Raises OfferRefusedError.
        """
        sequence = self._find_receiving(sequence_id, attempt)
        if sequence.is_read:
            raise OfferRefusedError("session", f"session {sequence_id} is reading another offer")
        limit = sequence.params.end
        is_aligned = begin % self.page_tokens == 0 and (end % self.page_tokens == 0 or end == limit)
        if begin != sequence.computed or not begin < end <= limit or not is_aligned:
            raise OfferRefusedError(
                "bounds", f"offer of [{begin}, {end}) where [{sequence.computed}, {limit}) is wanted, page by page"
            )
        targets = self.pages_of(sequence, range(begin, end))
        if len(targets) != num_pages:
            raise OfferRefusedError("bounds", f"{num_pages} pages offered for [{begin}, {end}), not {len(targets)}")
        slots = sequence.state.targets if sequence.state else []
        least = 1 if sequence.state and end == limit else 0
        if not least <= num_slots <= (len(slots) - 1) * least:
            raise OfferRefusedError("bounds", f"{num_slots} states offered with [{begin}, {end}) of [0, {limit})")
        sequence.is_read = True
        return targets, slots[:num_slots]

    def _find_receiving(self, sequence_id: int, attempt: int) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.phase is Phase.ENDED:
            raise OfferRefusedError("session", f"session {sequence_id} is not open here")
        if sequence.params.attempt != attempt:
            raise OfferRefusedError(
                "attempt", f"offer of attempt {attempt}; session {sequence_id} is {sequence.params.attempt}"
            )
        if sequence.phase is not Phase.RECEIVING:
            raise OfferRefusedError("session", f"session {sequence_id} takes no offer now ({sequence.phase.value})")
        return sequence

    def finish_read(self, sequence_id: int, end: int, now: float, num_slots: int = 0) -> None:
        """The copy of an accepted offer is done and checked: KV up to `end` is here, for both models, and states."""
        sequence = self._sequences[sequence_id]
        sequence.is_read = False
        if sequence.phase is Phase.RECEIVING:
            sequence.deadline = now + self.lease_s
            if sequence.draft_computed == sequence.computed:  # no gap before it
                self.advance_draft(sequence, end)
            sequence.launched = end
            if self.states and sequence.state and num_slots:
                whole = end // self.page_tokens * self.page_tokens
                self.states.finish_receiving(sequence.state, whole if num_slots > 1 else 0)
            self._advance(sequence, end, now)
            if end == sequence.params.end:
                sequence.phase = Phase.ACTIVE
        self._remove_if_over(sequence)

    def fail_read(self, sequence_id: int) -> None:
        """The copy of an accepted offer failed: its data is not used, and the same positions may be offered again."""
        sequence = self._sequences[sequence_id]
        sequence.is_read = False
        self._remove_if_over(sequence)

    # -- room ----------------------------------------------------------------------------------------------------

    def resume_preempted(self) -> None:
        """Resume preempted sequences, oldest first, while there are pages for all that each needs."""
        for sequence in self.in_phase(Phase.PREEMPTED):
            is_scored = sequence.scored > sequence.params.end  # unscored prompt positions must be computed again
            keys = sequence.keys if is_scored else sequence.keys[: (sequence.scored - 1) // self.page_tokens]
            found = self.cache.find(keys)
            branch = len(found) * self.page_tokens
            num_usable, checkpoint = self._find_checkpoint(keys[: len(found)])
            found = found[:num_usable]
            needed = num_pages_for(len(sequence.tokens), self.page_tokens) - len(found)
            if not self.cache.can_take(found, needed):
                return
            if self.states:
                try:
                    sequence.state = self.states.open(checkpoint, num_usable * self.page_tokens, branch)
                except NoRoomError:
                    return
            self.cache.hold(found)
            sequence.pages = found + self.cache.allocate(needed)
            self._take_cached(sequence, len(found) * self.page_tokens)
            sequence.phase = Phase.ACTIVE

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend an active sequence's pages to `num_tokens` positions, preempting the newest active ones if needed.

        False if there is no room in this step: the sequence itself was the newest and got preempted, it is the only
        active one and receiving ones hold the pages, or others are in launched steps (`is_short`).
        """
        needed = num_pages_for(num_tokens, self.page_tokens) - len(sequence.pages)
        if needed <= 0:
            return True
        while needed > self.cache.num_spare:
            active = self.in_phase(Phase.ACTIVE)
            if active == [sequence]:
                return False
            if self.num_launched:
                self.is_short = True
                return False
            self._preempt(active[-1])
            if active[-1] is sequence:
                return False
        sequence.pages += self.cache.allocate(needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = sequence.launched = sequence.num_named = 0
        sequence.draft_computed = sequence.draft_launched = 0
        sequence.phase = Phase.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def make_room_for_drafts(self, sequence: Sequence, count: int) -> int:
        """Extend an active sequence's pages by up to `count` positions beyond those launched, using spare pages only.

        Drafts take no page that another sequence may need in this step. Returns the number of drafts that fit.
        """
        room = len(sequence.pages) * self.page_tokens - sequence.launched
        while room < count and self.cache.num_spare > len(self._sequences):
            sequence.pages += self.cache.allocate(1)
            room += self.page_tokens
        return max(min(count, room), 0)

    def find_stops(self, sequence: Sequence, count: int) -> list[int]:
        """Where parts of the next `count` positions end: two parts at most, the first where its state is to be kept."""
        begin, end = sequence.launched, sequence.launched + count
        if self.states is None or sequence.state is None:
            return [end]
        first = self.states.find_stop(sequence.state, begin, sequence.num_known)
        if first >= end or sequence.num_to_score(count):
            return [min(first, end)]
        return [first, min(self.states.find_stop(sequence.state, first, sequence.num_known), end)]

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: ScheduledSequence) -> None:
        """The step will be launched: the sequence's pages stay held until `finish_step` or `drop_step`."""
        sequence = step.sequence
        step.num_unjudged = sequence.num_unjudged
        if sequence.row < 0:
            sequence.row = self._free_rows.pop()
        if self.states and sequence.state:
            step.slots = self.states.begin_step(sequence.state, sequence.launched, sequence.num_known)
            self._name_state(sequence)
        sequence.launched += step.count
        sequence.scored += step.num_scored
        sequence.num_coming += step.wants_token
        sequence.num_steps_launched += 1
        self.num_launched += 1

    def add_drafts(self, step: ScheduledSequence) -> None:
        """The step, which is about to be launched, has `num_drafted` drafts, or the draft model catches up."""
        sequence = step.sequence
        if step.draft_lead is not None and not step.num_drafted:
            sequence.draft_launched = max(sequence.draft_launched, step.begin + step.count + step.draft_lead)
        sequence.launched += step.num_drafted
        sequence.num_coming += step.num_drafted
        sequence.num_unjudged += step.num_drafted

    def drop_step(self, step: ScheduledSequence) -> None:
        """The step was not computed, at least not for this sequence."""
        self.take_back(step)
        self._end_step(step)
        self._remove_if_over(step.sequence)

    def take_back(self, step: ScheduledSequence) -> None:
        """The step's result will not be used: its positions are to be launched again. It has no drafts."""
        step.is_dropped = True
        step.sequence.launched -= step.count
        step.sequence.scored -= step.num_scored
        step.sequence.num_coming -= step.wants_token
        if self.states and step.sequence.state:
            self.states.take_back(step.sequence.state, step.slots, step.sequence.launched)

    def end_dropped(self, step: ScheduledSequence) -> None:
        """A launched step that was taken back is over."""
        self._end_step(step)
        self._remove_if_over(step.sequence)

    def _end_step(self, step: ScheduledSequence) -> None:
        step.sequence.num_steps_launched -= 1
        self.num_launched -= 1

    def fail_step(self, step: ScheduledSequence, error: Exception | None, now: float) -> Update | None:
        """Drop the step and end its sequence: with `error`, or as complete if None. None if it has already ended."""
        self._judge(step, 0)
        self.drop_step(step)
        if step.sequence.state:
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
        self._judge(step, num_right)
        sequence.num_coming -= num_right + step.wants_token
        self._end_step(step)
        if sequence.phase is Phase.ENDED:
            self._remove_if_over(sequence)
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
        if step.draft_lead is not None:
            self.advance_draft(sequence, min(sequence.computed + step.count + step.draft_lead, computed))
        self._advance(sequence, min(computed, len(sequence.tokens) - 1), now)
        if not sequence.num_steps_launched:
            sequence.launched = sequence.computed
        if not (kept or reason or prompt_logprobs or sequence.is_kept):
            return None
        update = Update(sequence, kept, reason, "", logprobs[: len(kept)], prompt_logprobs)
        if reason:
            update.timing = sequence.timing(now)
            self._end(sequence)
        return update

    def _judge(self, step: ScheduledSequence, num_right: int) -> None:
        """So many of the step's drafts were right; what was launched and chosen counted all."""
        sequence, num_wrong = step.sequence, step.num_drafted - num_right
        sequence.launched -= num_wrong
        sequence.num_coming -= num_wrong
        sequence.num_unjudged -= step.num_drafted

    def _advance(self, sequence: Sequence, computed: int, now: float) -> None:
        """KV of positions [0, computed) is in the sequence's pages; whole pages get their keys."""
        sequence.computed = computed
        if sequence.kv_at is None and computed >= sequence.params.end:
            sequence.kv_at = now
        size = self.page_tokens
        while (at := sequence.num_named) < computed // size:
            if at == len(sequence.keys):
                parent = sequence.keys[-1] if sequence.keys else self._root_of(sequence.params)
                sequence.keys.append(next_key(parent, sequence.tokens[at * size : (at + 1) * size].tobytes()))
            self.cache.name(sequence.pages[at], sequence.keys[at])
            sequence.num_named += 1
        if self.states and sequence.state:
            self._name_state(sequence)
            self.states.finish_step(sequence.state, computed)

    def _name_state(self, sequence: Sequence) -> None:
        if self.states and sequence.state:
            self.states.name(sequence.state, sequence.computed, sequence.params.end, sequence.keys)

    def advance_draft(self, sequence: Sequence, computed: int) -> None:
        """The draft model's KV of positions [0, computed) is in the pages; a lower number invalidates the rest."""
        before, sequence.draft_computed = sequence.draft_computed, computed
        sequence.draft_launched = max(sequence.draft_launched, computed)
        for page in sequence.pages[before // self.page_tokens : computed // self.page_tokens]:
            self.cache.mark_draft(page)

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

    def expire(self, now: float) -> list[Update]:
        """End sequences whose KV did not arrive within the lease."""
        error = f"no KV arrived within the lease of {self.lease_s:g} s (--lease-s)"
        late = [sequence for sequence in self._find_leased() if sequence.deadline <= now]
        self.num_expired += len(late)
        return [self.fail(sequence, error, now, "expired") for sequence in late]

    def next_deadline(self) -> float | None:
        """When `expire` must be called next."""
        return min((sequence.deadline for sequence in self._find_leased()), default=None)

    def _find_leased(self) -> list[Sequence]:
        """Sequences that wait for the next offer; reads have their own time limit."""
        return [sequence for sequence in self.in_phase(Phase.RECEIVING) if not sequence.is_read]

    def _end(self, sequence: Sequence) -> None:
        sequence.phase = Phase.ENDED
        self._remove_if_over(sequence)

    def _remove_if_over(self, sequence: Sequence) -> None:
        if sequence.phase is not Phase.ENDED or sequence.num_steps_launched:
            return
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
        if sequence.is_read or sequence.is_kept:
            return
        self._release(sequence)
        del self._sequences[sequence.id]
        self._by_handle.pop((sequence.params.gateway, sequence.params.handle), None)
        if not self._sequences:
            self.on_empty()

    def _release(self, sequence: Sequence) -> None:
        if self.states and sequence.state:
            self.states.close(sequence.state, sequence.computed, sequence.launched, sequence.keys)
            sequence.state = None
        self.cache.release(sequence.pages)
        sequence.pages = []
        sequence.num_pages_in_row = min(sequence.num_pages_in_row, 0)

    def check(self) -> None:
        """Check holder counts, that no two sequences write to one page, and that KV counts fit the pages."""
        self.cache.check(page for sequence in self for page in sequence.pages)
        if self.states:
            self.states.check([sequence.state for sequence in self if sequence.state])
        writers: set[int] = set()
        for sequence in self:
            end = max(sequence.computed, sequence.launched, sequence.draft_computed)
            if end > len(sequence.pages) * self.page_tokens:
                raise AssertionError(f"sequence {sequence.id} has KV, or will have, beyond its pages")
            if (
                sequence.phase is Phase.ACTIVE
                and sequence.params.max_tokens
                and len(sequence.tokens) <= sequence.computed
            ):
                raise AssertionError(f"active sequence {sequence.id} has no token left to step on")
            if sequence.phase is Phase.PREEMPTED and sequence.pages:
                raise AssertionError(f"sequence {sequence.id} is preempted and holds pages")
            writable = sequence.pages[sequence.computed // self.page_tokens :]
            if not writers.isdisjoint(writable):
                raise AssertionError(f"sequence {sequence.id} may write to a page that another one writes to")
            writers.update(writable)
        for sequence in self:
            if not writers.isdisjoint(sequence.pages[: sequence.computed // self.page_tokens]):
                raise AssertionError(f"a page that sequence {sequence.id} has completed may be written to")
        rows = [sequence.row for sequence in self if sequence.row >= 0]
        if sorted(rows + self._free_rows) != list(range(num_rows_for(self.max_running))):
            raise AssertionError("a row belongs to two sequences, or to none and is not free")


def num_rows_for(max_running: int) -> int:
    """Rows that the engine needs: ended sequences keep theirs until their last step is collected."""
    return 2 * max_running
