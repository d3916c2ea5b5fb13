"""Which pages workers probably have: the keys of the prompts and answers computed there. Pure.

A guess: a worker evicts pages without a report, and other gateways fill it too. The worker's own answer is right.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence

from wire.page_keys import PageKey

# Per worker. A million tokens in pages of 16: more than most pools have, and 10 MB here at 150 bytes a key.
MAX_KEYS = 1 << 16


class PrefixIndex:
    """A bounded memory for each incarnation of a worker. What was used longest ago goes first.

    Keys come as chains, each from the first page on. The first key of a chain counts as used last, so it is never
    forgotten before those that follow it, and the remembered part of a chain is always its beginning.
    """

    def __init__(self) -> None:
        self._keys: dict[str, OrderedDict[PageKey, None]] = {}  # incarnation |-> keys, the next one to forget first

    def remember(self, incarnation: str, keys: Sequence[PageKey], max_keys: int = MAX_KEYS) -> None:
        """The worker has the pages of this chain. `max_keys`: the most that it has room for."""
        known = self._keys.setdefault(incarnation, OrderedDict())
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > min(max_keys, MAX_KEYS):
            known.popitem(last=False)

    def find(self, keys: Sequence[PageKey]) -> dict[str, int]:
        """Incarnation |-> how many keys at the chain's beginning it probably has, where it has any. Changes nothing."""
        if not keys:
            return {}
        return {name: _count_known(known, keys) for name, known in self._keys.items() if keys[0] in known}

    def forget(self, incarnation: str, keys: Sequence[PageKey]) -> None:
        """The worker does not have the pages of the end of a chain."""
        known = self._keys.get(incarnation, OrderedDict())
        for key in keys:
            known.pop(key, None)

    def keep(self, incarnations: Collection[str]) -> None:
        """Forget all other incarnations: they are gone for good."""
        for gone in self._keys.keys() - incarnations:
            del self._keys[gone]

    def __len__(self) -> int:
        """Keys in all."""
        return sum(map(len, self._keys.values()))


def _count_known(known: Collection[PageKey], keys: Sequence[PageKey]) -> int:
    return bisect_left(keys, True, key=lambda key: key not in known)
