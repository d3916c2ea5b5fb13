"""Where a request goes, by load and by what workers have of its prompt, as they report. Pure.

What requests at the same time share is computed once: one waits while another computes a long part of its prompt that
no worker has, and while the decode worker to which it would go is about to have all its whole pages for another one.
That one has its places, so no two requests wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from zlib import crc32

from gateway.router.coming import Coming, ComingIndex
from gateway.router.placement import (
    MANY,
    NO_PREFILL,
    Need,
    Placement,
    Wait,
    choose_placement,
    find_candidates,
)
from gateway.router.policies import HomeFinder, LocalPrefill, Revisions
from gateway.router.readiness import Unready, find_unusable
from gateway.router.request import Request
from gateway.router.worker_keys import count_known
from gateway.router.worker_view import WorkerView
from runtime.config_parts import NoPrefill
from wire.page_keys import PageKey


@dataclass(frozen=True, slots=True)
class Held:
    """Another request computes what it would have to compute again."""

    key: PageKey  # of its last whole page


class Placer:
    """Chooses workers."""

    def __init__(
        self,
        local_prefill: LocalPrefill | None = None,
        uses_cache: bool = True,
        no_prefill: NoPrefill = "fallback",
        expects_prefill: bool = True,
        revisions: Revisions | None = None,
        homes: HomeFinder | None = None,
    ) -> None:
        """`uses_cache`: False chooses by load only. `expects_prefill`: whether there are to be prefill workers."""
        self.revisions = revisions or Revisions()
        self.no_prefill: NoPrefill = no_prefill
        self.expects_prefill = expects_prefill
        self.local_prefill = local_prefill or LocalPrefill()
        self._uses_cache = uses_cache
        self._coming = ComingIndex()
        self._homes = homes or HomeFinder()

    def find_key(self, workers: Sequence[WorkerView], request: Request) -> PageKey | None:
        """The key of the last whole page that the request needs; None without one, or if it uses no cached pages."""
        keys, _ = self._find_keys(self.find_usable(workers, request), request)
        return keys[-1] if keys else None

    def find_unusable(self, workers: Sequence[WorkerView], request: Request) -> Unready | None:
        """Why none of the workers that could serve others can serve the request; None when one can."""
        before, workers = workers, self._choose_revision(workers, request)
        if not workers and any(view.is_alive for view in before if view.answers):
            return Unready(self.revisions.explain(before))
        if not (request.adapter or request.computes):
            return None
        name, no_prefill = request.wanted.adapter, self._no_prefill_of(request)
        return find_unusable(workers, name, request.adapter, request.computes, no_prefill)

    def find_usable(self, workers: Sequence[WorkerView], request: Request) -> Sequence[WorkerView]:
        """The workers that may serve it: with its adapter, and its revision or the weights that it began with."""
        workers = self._choose_revision(workers, request)
        if not (request.adapter or request.computes):
            return workers
        return [view for view in workers if request.can_use(view)]

    def _choose_revision(self, workers: Sequence[WorkerView], request: Request) -> Sequence[WorkerView]:
        if request.computes:
            return workers
        wanted = request.wanted
        return self.revisions.choose(workers, wanted.session or wanted.call or wanted.request_id)

    def _no_prefill_of(self, request: Request) -> NoPrefill:
        return "fallback" if request.emitted else self.no_prefill  # an answer that has begun goes on

    def choose(
        self, workers: Sequence[WorkerView], request: Request, decodes: frozenset[str] | None = None
    ) -> Placement | Wait | Held | Unready:
        """Changes nothing: the caller that takes the placement calls `begin`. `decodes`: incarnations; None: any."""
        all_workers = workers
        workers = self.find_usable(workers, request)
        if decodes is not None:
            workers = [view for view in workers if view.role == "prefill" or view.incarnation in decodes]
        if request.adapter:
            workers = [view if view.has_slots else replace(view, is_full=True) for view in workers]
        homes = self._homes.find(request.wanted.session, workers) if self._uses_cache else frozenset[str]()
        some = self._find_candidates(workers, request, homes)
        choice = self._choose(some, homes, request)
        if isinstance(choice, Wait) and len(some) < len(workers):
            choice = self._choose(workers, homes, request)
        if not request.adapter or isinstance(choice, Wait | Unready | Held) or choice.why != NO_PREFILL:
            return choice
        if any(view.is_alive for view in all_workers if view.role == "prefill"):
            return replace(choice, why="no prefill worker that is alive has the adapter")
        return choice

    def _find_candidates(
        self, workers: Sequence[WorkerView], request: Request, homes: frozenset[str] = frozenset()
    ) -> Sequence[WorkerView]:
        keys, page_tokens = self._find_keys(workers, request)
        coming = {one.incarnation for one in islice(self._coming.find(keys, page_tokens).coming, MANY)}
        draw = crc32(f"{request.wanted.request_id} {request.attempt}".encode())
        return find_candidates(workers, keys, homes | coming, draw)

    def _choose(
        self, workers: Sequence[WorkerView], homes: frozenset[str], request: Request
    ) -> Placement | Wait | Held | Unready:
        keys, page_tokens = self._find_keys(workers, request)
        overlap = self._coming.find(keys, page_tokens)
        known = [view for view in workers if request.believes(view)]
        cached = {view.incarnation: view.keys.count(keys) * page_tokens for view in known}
        stores = _find_stores(workers)
        saved = {store: count_known(keys, files) * page_tokens for store, files in stores.items()}
        stored = {view.incarnation: saved[view.store] for view in known if view.store}
        names = {view.incarnation for view in workers}
        num_there = max([*cached.values(), *saved.values()], default=0)
        if any(one.incarnation in names for one in overlap.find_worth(num_there)):
            return Held(keys[-1])
        coming = {one.incarnation for one in overlap.find_equal(len(keys) * page_tokens)}
        cached |= dict.fromkeys(coming, len(keys) * page_tokens)
        need = Need(
            request.num_missing, self.local_prefill, frozenset(request.avoid), cached, stored,
            self._no_prefill_of(request), bool(request.wanted.images), frozenset(coming),
            homes,
            draw=int.from_bytes(keys[-1][:4]) if keys else 0,
        )  # fmt: skip
        choice = choose_placement(workers, need)
        if isinstance(choice, Placement) and choice.decode.incarnation in coming:
            return Held(keys[-1])
        return choice

    def count_cached(self, workers: Sequence[WorkerView], request: Request) -> int:
        """Tokens of the request whose KV the worker, or the store of files, that has most of it has."""
        keys, page_tokens = self._find_keys(workers, request)
        saved = [count_known(keys, files) for files in _find_stores(workers).values()]
        return max([*saved, *(view.keys.count(keys) for view in workers)], default=0) * page_tokens

    def begin(self, request: Request, placement: Placement, workers: Sequence[WorkerView]) -> Coming | None:
        """The request's KV is about to be there. What to `end`; None when it is there already. `workers`: all."""
        keys, page_tokens = self._find_keys([placement.decode], request)
        is_there = placement.num_cached == len(keys) * page_tokens and placement.lender is None
        if not keys or is_there:
            return None
        num_there = self.count_cached(self._find_candidates(workers, request), request)
        return self._coming.begin(keys, page_tokens, placement.decode.incarnation, num_there)

    def end(self, coming: Coming) -> None:
        """End the wait of others for this KV: it is there, or will never be."""
        self._coming.end(coming)

    def remember(self, worker: WorkerView, request: Request) -> None:
        """Note that the worker has the KV of all the request's tokens but the last."""
        if self._uses_cache:
            worker.keys.expect(request.page_keys(worker))

    def correct(self, worker: WorkerView, request: Request, num_cached: int) -> None:
        """Note that the worker has no more than the first `num_cached` tokens of the request."""
        worker.keys.correct(request.page_keys(worker)[num_cached // max(worker.page_tokens, 1) :])

    def _find_keys(self, workers: Sequence[WorkerView], request: Request) -> tuple[Sequence[PageKey], int]:
        """Keys of the request's whole pages, and the tokens in a page: as the first living decode worker has them."""
        decode = next((view for view in workers if view.role == "decode" and view.is_alive), None)
        if decode is None or not self._uses_cache or request.num_prompt_logprobs is not None:
            return (), 0
        return request.page_keys(decode), decode.page_tokens


def _find_stores(workers: Sequence[WorkerView]) -> dict[str, list[set[bytes]]]:
    """Where KV is saved |-> the keys that each worker has there. All workers with this store read them."""
    stores: dict[str, list[set[bytes]]] = {}
    for view in workers:
        if view.store:
            stores.setdefault(view.store, []).append(view.keys.files.keys)
    return stores
