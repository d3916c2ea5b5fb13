"""The adapters (LoRA) of a worker: which are loaded, which slot has each, and how many sequences have them. Pure.

    unknown ──load──► idle ◄──acquire, release──► held by sequences
                       │                           │
                       └── unload, no holder left ─┴─► dropped, until the engine thread has freed its memory

An adapter is known by the digest of its content. Each load of it has a key of its own, so that dropping an earlier load
never meets a later one. A slot keeps its adapter without holders, until another one needs the slot.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from worker.interfaces import Adapters, NoSlotError, UnknownAdapterError
from worker.sequences import NO_ADAPTER, HeldAdapter

NO_SLOT = NO_ADAPTER.slot


@dataclass(slots=True)
class LoadedAdapter:
    """One adapter whose weights are in the memory of all ranks."""

    name: str
    key: str
    num_bytes: int  # on the host, over all ranks
    slot: int = NO_SLOT
    num_holders: int = 0
    is_unloading: bool = False  # new sequences cannot have it


class AdapterSlots(Adapters):
    """Owns the slots. The caller serialises calls."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._loaded: dict[str, LoadedAdapter] = {}  # digest |-> adapter, least recently used first
        self._free = list(range(num_slots))  # slots without an adapter
        self._dropped: list[str] = []  # keys
        self._numbers = count()

    @property
    def names(self) -> dict[str, str]:
        return {digest: one.name for digest, one in list(self._loaded.items()) if not one.is_unloading}

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    @property
    def num_bytes(self) -> int:
        """Bytes of all loaded adapters, on the host."""
        return sum(one.num_bytes for one in self._loaded.values())

    @property
    def num_held(self) -> int:
        """Slots whose adapter a sequence has."""
        return sum(one.num_holders > 0 for one in list(self._loaded.values()))

    # -- loads ---------------------------------------------------------------------------------------------------

    def new_key(self, digest: str) -> str:
        """For a load that begins; `add` or `drop` ends it."""
        return f"{digest}.{next(self._numbers)}"

    def add(self, digest: str, key: str, name: str, num_bytes: int) -> None:
        """All ranks have it in memory under `key`."""
        self._loaded[digest] = LoadedAdapter(name, key, num_bytes)

    def rename(self, digest: str, name: str) -> bool:
        """False if it is not loaded. One that is being unloaded stays."""
        if (one := self._loaded.get(digest)) is None:
            return False
        one.name, one.is_unloading = name, False
        return True

    def unload(self, digest: str) -> None:
        """No new sequence gets it; without holders it is dropped. Idempotent."""
        if (one := self._loaded.get(digest)) is not None:
            one.is_unloading = True
            self._drop_if_unused(digest)

    def drop(self, key: str) -> None:
        """A load failed on some rank: free what the others have."""
        self._dropped.append(key)

    def take_dropped(self) -> list[str]:
        dropped, self._dropped = self._dropped, []
        return dropped

    # -- sequences -----------------------------------------------------------------------------------------------

    def check_room(self, digest: str) -> None:
        if not digest:
            return
        one = self._loaded.get(digest)
        if one is None or one.is_unloading:
            raise UnknownAdapterError(f"adapter {digest[:64]!r} is not loaded here")
        if one.slot == NO_SLOT and not self._free and self._find_idle() is None:
            raise NoSlotError(f"{self.num_slots} other adapters are in use, the most allowed by --max-loras")

    def acquire(self, digest: str) -> HeldAdapter:
        self.check_room(digest)
        if not digest:
            return NO_ADAPTER
        one = self._loaded[digest] = self._loaded.pop(digest)
        if one.slot == NO_SLOT:
            one.slot = self._take_slot()
        one.num_holders += 1
        return HeldAdapter(one.slot, one.key)

    def release(self, digest: str) -> None:
        if not digest:
            return
        one = self._loaded[digest] = self._loaded.pop(digest)
        one.num_holders -= 1
        self._drop_if_unused(digest)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        idle = self._find_idle()
        assert idle is not None, "check_room found one"
        slot, idle.slot = idle.slot, NO_SLOT
        return slot

    def _find_idle(self) -> LoadedAdapter | None:
        """The least recently used of those that have a slot and no holder."""
        return next((one for one in self._loaded.values() if one.slot != NO_SLOT and not one.num_holders), None)

    def _drop_if_unused(self, digest: str) -> None:
        one = self._loaded[digest]
        if one.is_unloading and not one.num_holders:
            del self._loaded[digest]
            self._dropped.append(one.key)
            if one.slot != NO_SLOT:
                self._free.append(one.slot)

    def check(self, held: Seq[HeldAdapter]) -> None:
        expected = {HeldAdapter(one.slot, one.key): one.num_holders for one in self._loaded.values() if one.num_holders}
        if (counted := dict(Counter(one for one in held if one != NO_ADAPTER))) != expected:
            raise AssertionError(f"adapters are held {expected}, by sequences {counted}")
        slots = [one.slot for one in self._loaded.values() if one.slot != NO_SLOT]
        if sorted(slots + self._free) != list(range(self.num_slots)):
            raise AssertionError("a slot belongs to two adapters, or to none and is not free")
        if NO_ADAPTER.slot in (slot for slot, _key in expected):
            raise AssertionError("a sequence has an adapter without a slot")
