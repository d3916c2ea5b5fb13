"""Which sequences a worker takes, and what each holds from then on. Pure.

`now` is passed in; the caller serialises calls.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from wire.page_keys import PageKey
from worker.params import SequenceParams
from worker.prefix_cache import NeverFitsError, NoRoomError
from worker.sequences import Phase, Sequence
from worker.table import SequenceTable


class OverGoalError(NoRoomError):
    """One more answer would make all of them slower than --itl-goal-ms."""


@dataclass(slots=True)
class AdmittingTable(SequenceTable):
    """Lets sequences in."""

    def admit(
        self, params: SequenceParams, now: float, is_kept: bool = False, keys: list[PageKey] | None = None
    ) -> Sequence:
        """Hold the cached pages of the prompt's start, and allocate the rest.

        `is_kept`: the pages stay until `end`. `keys`: `kv.keys_of(params)`. A repeated (gateway, handle) returns the
        same sequence. Raises NeverFitsError, NoRoomError (OverGoalError: only new answers) or UnknownAdapterError.
        """
        if params.handle and (params.gateway, params.handle) in self._by_handle:
            return self._sequences[self._by_handle[params.gateway, params.handle]]
        keys = self.kv.keys_of(params) if keys is None else keys
        is_scored = params.num_prompt_logprobs is not None  # scores need the computation
        hit = self.kv.find([] if is_scored else keys)
        is_here = self._computes_here(params, hit.num_usable * self.kv.page_tokens)
        sequence = Sequence(
            id=self._next_id, params=params, phase=Phase.ACTIVE if is_here else Phase.RECEIVING,
            tokens=array("i", params.prompt), keys=keys, pages=[], admitted_at=now, deadline=now + self.lease_s,
            scored=1 if is_here and is_scored else params.num_prompt, is_kept=is_kept,
        )  # fmt: skip
        found = self.kv.choose_pages(hit, sequence)
        self._check_room(params, found)
        self.kv.open(sequence, hit, found)
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

    def check_room(self, params: SequenceParams, keys: list[PageKey]) -> None:
        """Raises like `admit` if a prompt cannot be taken now, even if its first pages come from elsewhere before."""
        if (params.gateway, params.handle) not in self._by_handle:
            self._check_room(params, self.kv.cache.find(keys))

    def _check_room(self, params: SequenceParams, found: Seq[int]) -> None:
        """Raises like `admit` if a prompt cannot be taken now that has these pages."""
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
        needed = self.kv.num_needed(params, params.num_prompt) - len(found)
        self.check_spare(found, needed, self.kv.cache.order.count_awaited(found, needed, params.retention))

    def _count_answers(self) -> int:
        return sum(other.params.max_tokens > 0 for other in self if other.phase is not Phase.ENDED)

    def check_spare(self, found: Seq[int], needed: int, awaited: int = 0) -> None:
        """Raise NoRoomError unless this many pages are spare beside those `found` and `awaited` ones."""
        cache, growing = self.kv.cache, self._count_answers()
        is_tight = bool(self.in_phase(Phase.PREEMPTED)) or not cache.can_take(found, needed + awaited + growing)
        if (growing and is_tight) or not cache.can_take(found, needed + awaited):  # an answer may soon need a page
            raise NoRoomError(f"{needed} pages are needed, {max(cache.num_spare - awaited - growing, 0)} are spare")

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
