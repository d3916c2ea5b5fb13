"""Plans reads into a worker's pools from files or other workers, and loans to these. Pure."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from wire.page_keys import PageKey
from worker.admission import AdmittingTable
from worker.kv_cache import KVCacheManager, Restore
from worker.prefix_cache import NoRoomError


class RestorePlan(NamedTuple):
    """Pages and a slot to read from elsewhere, so that a prompt can continue there."""

    keys: Seq[PageKey]  # of pages, behind those that are cached
    slot_keys: Seq[PageKey]  # of one slot, or none
    before: Seq[PageKey] = ()  # of cached pages that these continue


def plan_restore(
    keys: Seq[PageKey], num_there: int, num_usable: int, num_found: int, has_slot: Callable[[PageKey], bool] | None
) -> RestorePlan:
    """A prompt's keys: `num_there` are cached, a step could continue behind `num_usable`, `num_found` are to be had.

    `has_slot`: whether a key's checkpoint is to be had; None: the model has no states.
    """
    if has_slot is None:
        return RestorePlan(keys[num_there:num_found], (), keys[:num_there])
    end = next((at for at in range(num_found, num_usable, -1) if has_slot(keys[at - 1])), 0)
    return RestorePlan(keys[num_there:end], keys[end - 1 : end] if end else (), keys[:num_there])


def plan_loan(keys: Seq[PageKey], begin: int, num_pages: int, num_slots: int) -> RestorePlan:
    """Another worker's loan of the pages of these keys: from `begin` on, and perhaps the slot behind the last."""
    end = begin + num_pages
    return RestorePlan(keys[begin:end], keys[end - 1 : end] if num_slots else (), keys[:begin])


def begin_restore(
    table: AdmittingTable, keys: Seq[PageKey], slot_keys: Seq[PageKey], before: Seq[PageKey] = ()
) -> Restore:
    """Pages and slots for these keys, which are not cached, until `end_restore`. What is `before` stays until then.

    NoRoomError: there are too few, or answers may soon need them.
    """
    kv = table.kv
    found = kv.cache.find(before)
    table.check_spare(found, len(keys))
    slots = kv.states.cache.allocate(len(slot_keys))
    try:
        kv.cache.hold(found)
        restore = Restore(keys, kv.cache.allocate(len(keys)), slot_keys, slots, found)
    except NoRoomError:
        kv.cache.release(found)
        kv.states.cache.release(slots)
        raise
    kv.restores.append(restore)
    return restore


def end_restore(kv: KVCacheManager, restore: Restore, drafts: Seq[bool], num_slots: int) -> None:
    """Leading pages are filled, `drafts` says which with the draft model's KV, and so many slots: now cached."""
    kv.restores.remove(restore)
    for page, key, has_draft in zip(restore.pages, restore.keys, drafts, strict=False):
        if has_draft:
            kv.cache.mark_draft(page)
        elif kv.needs_draft:
            break
        kv.cache.name(page, key)
    for slot, key in zip(restore.slots[:num_slots], restore.slot_keys, strict=False):
        kv.states.cache.name(slot, key)
    kv.cache.release([*restore.before, *restore.pages])
    kv.states.cache.release(restore.slots)


class Loan(NamedTuple):
    """Pages, and perhaps the slot behind the last one, that another worker is about to read. Nothing holds them."""

    pages: list[int]
    slots: list[int]


def find_loan(kv: KVCacheManager, keys: Seq[PageKey], begin: int, most: int) -> Loan:
    """Finds the pages of these keys that a step can continue behind: those from `begin` on, at most so many.

    The slot comes with the last of them; then all count as used now, once for all parts of a loan: that takes a
    decode step's time where there are 10,000.
    """
    hit = kv.find(keys[begin:])
    pages = hit.pages[: min(hit.num_usable, most)]
    if not pages or len(pages) < hit.num_usable:
        return Loan(pages, [])
    slots = [hit.checkpoint] if hit.checkpoint >= 0 else []
    for cache, used in ((kv.cache, kv.cache.find(keys[:begin]) + pages), (kv.states.cache, slots)):
        cache.hold(used)
        cache.release(used)
    return Loan(pages, slots)
