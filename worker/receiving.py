"""KV that goes from one worker's sequences to another's: what is offered, what is accepted, and reads. Pure."""

from worker.kv_cache import KVCacheManager
from worker.scheduler import Scheduler
from worker.sequences import Phase, Sequence


class OfferRefusedError(Exception):
    """The sequence does not accept this offer. `reason` is one word, as in OfferResponse.reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def next_offer(kv: KVCacheManager, sequence: Sequence, begin: int, factor: int = 1) -> range | None:
    """Positions from `begin` on to offer now: whole pages, the last part at the end; `factor` offers at most."""
    computed, end = sequence.computed, sequence.params.end
    whole = computed if computed == end else computed // kv.page_tokens * kv.page_tokens
    stop = min(whole, begin + factor * kv.max_offer_pages * kv.page_tokens)
    return range(begin, stop) if stop > begin else None


def renew(scheduler: Scheduler, sequence_id: int, attempt: int, now: float, adapter: str = "") -> None:
    """The prompt is still being computed, by this adapter: restart the lease. Raises OfferRefusedError."""
    _find_receiving(scheduler, sequence_id, attempt, adapter).deadline = now + scheduler.lease_s


def begin_read(
    scheduler: Scheduler,
    sequence_id: int,
    attempt: int,
    begin: int,
    end: int,
    num_pages: int,
    num_slots: int = 0,
    adapter: str = "",
) -> tuple[list[int], list[int]]:
    """Accept an offer of positions [begin, end), and of states as `States.offered` has them.

    `adapter`: the one that computed them. Returns the pages and the slots to copy into, held until `finish_read` or
    `fail_read`. A sequence's offers come in order, one at a time. Raises OfferRefusedError.
    """
    sequence, page_tokens = _find_receiving(scheduler, sequence_id, attempt, adapter), scheduler.kv.page_tokens
    if sequence.is_read:
        raise OfferRefusedError("session", f"session {sequence_id} is reading another offer")
    limit = sequence.params.end
    is_aligned = begin % page_tokens == 0 and (end % page_tokens == 0 or end == limit)
    if begin != sequence.computed or not begin < end <= limit or not is_aligned:
        raise OfferRefusedError(
            "bounds", f"offer of [{begin}, {end}) where [{sequence.computed}, {limit}) is wanted, page by page"
        )
    targets = scheduler.kv.pages_of(sequence, range(begin, end))
    if len(targets) != num_pages:
        raise OfferRefusedError("bounds", f"{num_pages} pages offered for [{begin}, {end}), not {len(targets)}")
    slots = sequence.state.targets
    least = 1 if slots and end == limit else 0
    if not least <= num_slots <= (len(slots) - 1) * least:
        raise OfferRefusedError("bounds", f"{num_slots} recurrent states offered with [{begin}, {end}) of [0, {limit})")
    sequence.is_read = True
    return targets, slots[:num_slots]


def _find_receiving(scheduler: Scheduler, sequence_id: int, attempt: int, adapter: str) -> Sequence:
    sequence = scheduler.get(sequence_id)
    if sequence is None or sequence.phase is Phase.ENDED:
        raise OfferRefusedError("session", f"session {sequence_id} is not open here")
    if sequence.params.attempt != attempt:
        raise OfferRefusedError(
            "attempt", f"offer of attempt {attempt}; session {sequence_id} is {sequence.params.attempt}"
        )
    if sequence.params.adapter != adapter:
        raise OfferRefusedError(
            "adapter", f"offer of adapter {adapter!r}; session {sequence_id} has {sequence.params.adapter!r}"
        )
    if sequence.phase is not Phase.RECEIVING:
        raise OfferRefusedError("session", f"session {sequence_id} takes no offer now ({sequence.phase.value})")
    return sequence


def finish_read(scheduler: Scheduler, sequence_id: int, end: int, now: float, num_slots: int = 0) -> None:
    """The copy of an accepted offer is done and checked: KV up to `end` is here, for both models, and states."""
    sequence = scheduler[sequence_id]
    if sequence.phase is Phase.RECEIVING:
        kv = scheduler.kv
        sequence.deadline = now + scheduler.lease_s
        if sequence.draft_computed == sequence.computed:  # no gap before it
            kv.advance_draft(sequence, end)
        sequence.launched = end
        if num_slots:
            kv.states.finish_receiving(sequence.state, end // kv.page_tokens * kv.page_tokens if num_slots > 1 else 0)
        scheduler.advance(sequence, end, now)
        if end == sequence.params.end:
            sequence.phase = Phase.ACTIVE
    _end_read(scheduler, sequence)


def fail_read(scheduler: Scheduler, sequence_id: int) -> None:
    """The copy of an accepted offer failed: its data is not used, and the same positions may be offered again."""
    _end_read(scheduler, scheduler[sequence_id])


def _end_read(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.is_read = False
    scheduler.remove_if_over(sequence)
