"""Which workers serve a request. Pure: views in, a decision out.

Filter, score, pick: a worker that cannot serve is filtered out with a reason, the rest are scored by what they would
have to compute and by load (`score`: another term goes there), and the one with the least is picked:

    score [tokens] = positions whose KV the worker probably lacks + BUSY_TOKENS * num_running / max_running
                     (those that it has in files, or can read from another worker, count READ_SHARE each)
                   - HOME_TOKENS where the request's session is at home

The first term is the time until the first token, counted in tokens of prefill. The second is what the requests there
cost: on a prefill worker they are computed before or beside this one, on a decode worker each makes every step longer.
So a request goes where its prefix is as long as that saves more than the queue there costs, and a prefix that all
requests have spreads over all workers. The third lets several gateways choose alike where none knows what is cached.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from gateway.router.policies import LocalPrefill
from gateway.router.readiness import Unready, find_no_vision, find_unready
from gateway.router.worker_view import Role, WorkerView
from runtime.config_parts import NoPrefill
from wire.page_keys import PageKey

# What a full worker costs more than an idle one, in tokens of prefill. A decode worker takes 64 sequences: 128 tokens
# each. An answer of 250 tokens waits 250 times for what one more sequence adds to a step (on an H100 with an 8B model
# 2,000 tokens of KV take 80 us), 20 ms in all, and that worker's prefill computes 200 to 400 tokens meanwhile. A
# prefill worker takes 16 prompts: 512 tokens each, a chunk.
BUSY_TOKENS = 8192
READ_SHARE = 0.25  # what it costs to read a token's KV, against computing it; workers measure, and decide
MANY = 64  # workers: of more, those that may be the best are looked for first
DRAWN = 8  # of these, of each role, by chance; as many of those that have most of a prompt
LEAST_LENT = 128  # tokens: for fewer a worker does not ask another one: that takes it some milliseconds
HOME_TOKENS = 512  # a chunk: four more sequences at a decode worker, or one prompt at a prefill worker, outweigh it
NO_PREFILL = "no prefill worker is alive"
TAKES_BOTH = "the decode worker takes prompts, too, and no other one is better"
SPARE_PAGES = 0.25  # of a pool: with fewer free, requests of no hurry could take pages from running ones
NO_LIMIT = 2**32 - 1  # local prefill of any length


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one attempt goes. Without a prefill worker the decode worker prefills."""

    decode: WorkerView
    prefill: WorkerView | None
    local_prefill_max_tokens: int  # decode prefills by itself when at most this many positions are missing
    num_cached: int = 0  # tokens whose KV decode probably has
    is_fallback: bool = False  # decode prefills a long prompt because no prefill worker is alive
    why: str = ""  # the prompt is computed where it is; empty: there was no choice
    lender: WorkerView | None = None  # another worker, which probably has more of the prompt than the one that computes
    num_lent: int = 0  # tokens whose KV it probably has


@dataclass(frozen=True, slots=True)
class Wait:
    """Workers are alive, but have no room now."""


@dataclass(frozen=True, slots=True)
class Need:
    """The needs of one request, and the KV that workers probably have for it."""

    num_missing: int  # positions whose KV it needs
    local_prefill: LocalPrefill = field(default_factory=LocalPrefill)
    avoid: frozenset[str] = frozenset()  # incarnations that failed this request before
    # incarnation |-> tokens of the prompt whose KV is there, in whole pages
    cached: Mapping[str, int] = field(default_factory=dict)
    stored: Mapping[str, int] = field(default_factory=dict)  # the same of its files
    no_prefill: NoPrefill = "fallback"
    has_images: bool = False  # only workers that take images compute it
    coming: frozenset[str] = frozenset()  # incarnations that are about to have what `cached` says
    homes: frozenset[str] = frozenset()  # incarnations
    num_lent: int = 0  # tokens whose KV another worker has, for one that has less
    draw: int = 0  # of 32 bits: orders workers that are equal in all else; 0: the first is taken

    def find_cached(self, view: WorkerView) -> int:
        return self.cached.get(view.incarnation, 0)

    def find_there(self, view: WorkerView) -> int:
        """Tokens that are cached or in files."""
        return max(self.find_cached(view), self.stored.get(view.incarnation, 0))

    def can_borrow(self, view: WorkerView) -> bool:
        return self.num_lent - self.find_there(view) >= LEAST_LENT

    def can_compute(self, view: WorkerView) -> bool:
        return view.takes_images or not self.has_images


def score(view: WorkerView, need: Need) -> tuple[float, int, int, int, int]:
    """The cost of the request at the worker; at equal cost fewer waiting tokens are better, then more free pages.

    Cached pages are free. Of idle workers the one is better that evicts less, so that histories spread over all pools.
    """
    num_there = need.num_lent if need.can_borrow(view) else need.find_there(view)
    num_lacking = need.num_missing - num_there + READ_SHARE * (num_there - need.find_cached(view))
    load = BUSY_TOKENS * view.num_running / view.max_running
    cost = num_lacking + load - HOME_TOKENS * (view.incarnation in need.homes)
    draw = crc32(view.incarnation.encode(), need.draw) if need.draw else 0
    return cost, view.tokens_waiting, -view.free_pages, -view.empty_pages, draw


def find_candidates(
    workers: Sequence[WorkerView], keys: Sequence[PageKey], named: frozenset[str], draw: int
) -> Sequence[WorkerView]:
    """Choose, of many workers, those that have most of a prompt, some with room, and the `named` incarnations.

    The best of DRAWN workers that are drawn has less load than most.
    """
    if len(workers) <= MANY:
        return workers
    chosen = {holder.incarnation for holder in workers[0].keys.index.find(keys, DRAWN)} | named
    drawn: Counter[Role] = Counter()
    for count in range(8 * DRAWN):
        view = workers[crc32(count.to_bytes(2, "big"), draw) % len(workers)]
        if view.is_alive and _has_room(view) and drawn[view.role] < DRAWN:
            drawn[view.role] += 1
            chosen.add(view.incarnation)
    return [view for view in workers if view.incarnation in chosen]


def choose_placement(workers: Sequence[WorkerView], need: Need) -> Placement | Wait | Unready:
    """Place a request. `workers`: those that have its adapter.

    Workers to avoid: one is asked again only when no other can serve, and a prefill worker never while decode may
    prefill instead.
    """
    unready = find_unready(workers) or (find_no_vision(workers) if need.has_images else None)
    if unready is not None:
        return unready
    having = [view for view in workers if need.find_cached(view)]
    lenders = [view for view in having if view.can_lend and view.incarnation not in need.coming]
    workers = _leave_out(workers, need.avoid, need.no_prefill) if need.avoid else workers
    with_room = [view for view in workers if view.is_alive and _has_room(view)]
    decodes = [view for view in with_room if view.answers]
    for decode in sorted(decodes, key=lambda view: score(view, need)):
        if (choice := _place_at(decode, workers, lenders, need)) is not None:
            return choice
    return (find_unready(workers, need.no_prefill) if with_room else None) or Wait()


def _find_lender(view: WorkerView, lenders: Sequence[WorkerView], need: Need) -> tuple[WorkerView | None, int]:
    """The other worker that has most of the prompt in pages that fit the view's, and how much. None: it has too little.

    A prefill worker is preferred to a decode worker that has a page more: it has its memory for that, and no answers.
    """

    def judge(other: WorkerView) -> tuple[int, bool]:
        is_prefill = other.role == "prefill"
        return need.find_cached(other) + is_prefill * other.page_tokens, is_prefill

    fitting = [other for other in lenders if other.layout == view.layout and other.incarnation != view.incarnation]
    lender = max(fitting, key=judge, default=None)
    num_lent = need.find_cached(lender) if lender is not None else 0
    return (lender, num_lent) if num_lent >= LEAST_LENT else (None, 0)


def _place_at(
    decode: WorkerView, workers: Sequence[WorkerView], lenders: Sequence[WorkerView], need: Need
) -> Placement | None:
    """Place it at `decode` with the best prefill worker, or without; None while one is needed and none has room.

    The decode worker prefills by itself what lies within its limit, the rest of a page behind cached ones, and what no
    compatible prefill worker is alive for if `no_prefill` is fallback. The worker that computes reads what it lacks
    from one of `lenders`; what a prefill worker has that could compute is handed over. A prefill worker is told of one
    even if it probably lacks nothing: it knows what it has evicted.
    """
    if decode.embeds:
        return Placement(decode, None, NO_LIMIT)
    matching = [view for view in workers if view.role == "prefill" and view.partners == decode.partners]
    known = [view for view in matching if need.can_compute(view)]
    partners = [view for view in known if view.is_alive]
    lender, num_lent = _find_lender(decode, lenders, need)
    need = replace(need, num_lent=max(num_lent, need.find_cached(decode) if decode in lenders else 0))
    is_lent = need.can_borrow(decode) and lender not in partners
    num_cached = need.num_lent if is_lent else need.find_there(decode)
    num_lacking = need.num_missing - num_cached
    limit, why = need.local_prefill.choose(decode, partners or known, num_lacking)
    is_within = num_lacking <= limit
    is_short = is_within or (num_cached > 0 and num_lacking < decode.page_tokens)
    lent = (lender, num_lent) if is_lent else (None, 0)
    if not partners and need.no_prefill == "fallback" and need.can_compute(decode):
        return Placement(decode, None, NO_LIMIT, num_cached, not is_short, NO_PREFILL, *lent)
    if is_short and need.can_compute(decode):
        why = why if is_within else "the rest of a page behind cached ones"
        return Placement(decode, None, limit, num_cached, False, why, *lent)
    prefill = min(filter(_has_room, partners), key=lambda view: score(view, need), default=None)
    if prefill is None:
        return None
    if prefill.incarnation == decode.incarnation:
        return Placement(decode, None, NO_LIMIT, num_cached, False, TAKES_BOTH, *lent)
    lent = _find_lender(prefill, lenders, need)
    return Placement(decode, prefill, limit, need.find_there(decode), False, why, *lent)


def _leave_out(workers: Sequence[WorkerView], avoid: frozenset[str], no_prefill: NoPrefill) -> list[WorkerView]:
    """The workers without those to avoid, except those of a needed role that would have none alive."""
    rest = [view for view in workers if view.incarnation not in avoid]
    if no_prefill != "fallback" and not any(view.is_alive for view in rest if view.role == "prefill"):
        rest += [view for view in workers if view.role == "prefill" and view.incarnation in avoid]
    if find_unready(rest) is None:
        return rest
    return rest + [view for view in workers if view.answers and view.incarnation in avoid]


def count_places(workers: Sequence[WorkerView]) -> tuple[int, int]:
    """(places on living decode workers; those of them that are free, on workers that have pages to spare)."""
    decodes = [view for view in workers if view.answers and view.is_alive]
    spare = [view for view in decodes if _has_room(view) and view.free_pages > SPARE_PAGES * view.num_pages]
    return sum(view.max_running for view in decodes), sum(max(view.max_running - view.num_running, 0) for view in spare)


def _has_room(view: WorkerView) -> bool:
    return not view.is_full and view.num_mine < view.max_running
