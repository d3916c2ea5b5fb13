"""Which of a worker's sequences run, and what their steps change. Pure: `now` is passed in.

admission.py lets sequences in, table.py ends them, kv_cache.py gives them pages. The caller serialises calls.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf

from wire.logprobs import TokenLogprobs
from worker.admission import AdmittingTable
from worker.prefix_cache import NoRoomError
from worker.sequences import AnswerFailedError, Phase, ScheduledSequence, Sequence, Update


@dataclass(slots=True)
class Scheduler(AdmittingTable):
    """Decides which sequences get pages, and keeps the books of launched steps."""

    def resume_preempted(self) -> None:
        """Resume preempted sequences, oldest first, while there are pages for all that each needs."""
        for sequence in self.in_phase(Phase.PREEMPTED):
            is_scored = sequence.scored > sequence.params.end  # unscored prompt positions must be computed again
            num_keys = len(sequence.keys) if is_scored else (sequence.scored - 1) // self.kv.page_tokens
            hit = self.kv.find(sequence.keys[:num_keys])
            found = self.kv.choose_pages(hit, sequence)
            needed = self.kv.num_needed(sequence.params, len(sequence.tokens))
            if not self.kv.cache.can_take(found, needed - len(found)):
                return
            try:
                self.kv.open(sequence, hit, found)
            except NoRoomError:
                return
            sequence.phase = Phase.ACTIVE

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend an active sequence's pages to `num_tokens` positions, preempting the newest active ones if needed.

        False if there is no room in this step: the sequence itself was the newest and got preempted, it is the only
        active one and others hold the pages, or others are in launched steps (`is_short`).
        """
        needed = self.kv.num_pages(num_tokens) - len(sequence.pages)
        if needed <= 0:
            return True
        while needed > self.kv.cache.num_spare:
            active = [one for one in self.in_phase(Phase.ACTIVE) if not one.is_kept]  # whose pages are being read
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
        self.kv.states.forget(step.sequence)  # a later step may have begun on what this one left
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
        computed = self.kv.states.count_computed(step, num_right)
        if computed >= len(sequence.tokens):  # it ends, and its state has seen more
            computed = len(sequence.tokens) - 1
            self.kv.states.forget(sequence)
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
