"""Files of pages and slots below the pools: they outlive a worker's incarnations, and may be torn or foreign.

The rules are the real ones (kv_cache.py, scheduler.py, page_files.py); saving and reading take time here.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer import page_files
from tests.simulator.world import Action
from wire.page_keys import NamedPage, PageKey
from worker.kv_cache import Restore
from worker.prefix_cache import NoRoomError, PrefixCache
from worker.tiers import plans
from worker.tiers.named import NamedPages

if TYPE_CHECKING:
    from tests.simulator.worker import SimWorker


@dataclass(frozen=True, slots=True)
class SavedPage:
    """A page's positions, or a slot's one number, and the draft model's part."""

    key: PageKey
    main: list[int]
    draft: list[int]
    has_draft: bool
    is_whole: bool  # its checksum is right


class Files:
    """Those of one folder, which workers may share."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._bad = rng.choice([0.0, 0.0, 0.2])  # share of files that are torn or foreign
        self._slow = rng.choice([0.0, 0.3])
        self._pages: dict[PageKey, SavedPage] = {}
        self._slots: dict[PageKey, SavedPage] = {}

    def begin_on(self, worker: "SimWorker") -> None:
        """A new incarnation saves what gets a key."""
        kv = worker.scheduler.kv
        for cache, is_states in ((kv.cache, False), (kv.states.cache, True)):
            self._watch(worker, cache, is_states)

    def _watch(self, worker: "SimWorker", cache: PrefixCache, is_states: bool) -> None:
        named = NamedPages(cache, lambda: self._later(worker, lambda: self._take(worker, named, is_states)))

    def _later(self, worker: "SimWorker", action: Action) -> None:
        delay = self._rng.random() * 3.0 if self._rng.random() < self._slow else self._rng.random() * 0.02
        worker.later(delay, action)

    # -- saving ------------------------------------------------------------------------------------------------------

    def _take(self, worker: "SimWorker", named: NamedPages, is_states: bool) -> None:
        entries = named.take(self._rng.randint(1, 4))
        if entries:
            self._later(worker, lambda: self._save(worker, entries, is_states))
            self._later(worker, lambda: self._take(worker, named, is_states))

    def _save(self, worker: "SimWorker", entries: Sequence[NamedPage], is_states: bool) -> None:
        memory = worker.memory
        generations = memory.slot_generations if is_states else memory.generations
        for at in page_files.find_unchanged(entries, [generations[entry.page] for entry in entries]):
            page, _, key, has_draft = entries[at]
            saved = self._slots if is_states else self._pages
            rank = self._rng.randrange(worker.num_ranks)
            is_bad = self._rng.random() < self._bad
            if is_states:
                one = SavedPage(key, [memory.states[rank][page]], [], False, not is_bad)
            else:
                main, draft = memory.main[rank][page], memory.draft[rank][page]
                one = SavedPage(key, list(main), list(draft), has_draft, not is_bad)
            saved[key] = self._spoil(one) if is_bad else one

    def _spoil(self, one: SavedPage) -> SavedPage:
        """It is torn, or another page's under its name."""
        others = list(self._pages.values())
        if others and len(one.main) > 1 and self._rng.random() < 0.5:
            return self._rng.choice(others)
        return SavedPage(one.key, [0] * len(one.main), [0] * len(one.draft), one.has_draft, is_whole=False)

    # -- reading -----------------------------------------------------------------------------------------------------

    def restore(self, worker: "SimWorker", keys: Sequence[PageKey], then: Action) -> None:
        kv = worker.scheduler.kv
        num_there = len(kv.cache.find(keys))
        num_found = next((at for at in range(num_there, len(keys)) if keys[at] not in self._pages), len(keys))
        has_slot = self._slots.__contains__ if worker.num_slots else None
        plan = plans.plan_restore(keys, num_there, kv.find(keys).num_usable, num_found, has_slot)
        try:
            is_wanted = plan.keys or plan.slot_keys
            restore = plans.begin_restore(worker.scheduler, *plan) if is_wanted else None
        except NoRoomError:
            restore = None
        if restore is None:
            then()
        else:
            worker.is_changed = True
            self._later(worker, lambda: self._read(worker, restore, [], then))

    def _read(self, worker: "SimWorker", restore: Restore, drafts: list[bool], then: Action) -> None:
        """One page after the other, then the slot."""
        at, memory, num_slots = len(drafts), worker.memory, 0
        if at < len(restore.pages):
            saved = self._pages.get(restore.keys[at])
            if saved is not None and self.is_usable(saved, restore.keys[at]):
                for main, draft in zip(memory.main, memory.draft, strict=True):
                    main[restore.pages[at]], draft[restore.pages[at]] = list(saved.main), list(saved.draft)
                drafts.append(saved.has_draft)
                self._later(worker, lambda: self._read(worker, restore, drafts, then))
                return
        elif restore.slots:
            saved = self._slots.get(restore.slot_keys[0])
            if saved is not None and self.is_usable(saved, restore.slot_keys[0]):
                num_slots = 1
                for states in memory.states:
                    states[restore.slots[0]] = saved.main[0]
        plans.end_restore(worker.scheduler.kv, restore, drafts, num_slots)
        worker.loop.thread.wake()
        then()

    @staticmethod
    def is_usable(saved: SavedPage, key: PageKey) -> bool:
        """What a file's header and checksum show."""
        return saved.is_whole and saved.key == key
