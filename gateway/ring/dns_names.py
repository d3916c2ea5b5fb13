"""Workers that DNS knows by one name: which addresses the gateway keeps links to. Pure; discovery.py asks.

    in an answer ──► used ──MISSES answers in a row without it──► leaving: no new work ──no work left──► forgotten
                      ▲                                              │
                      └────────────── in an answer again ────────────┘

A link with running requests stays until they end. An empty answer changes nothing.
"""

from collections.abc import Collection, Mapping, Set

MISSES = 2  # more than one, as a server may leave out an address by chance


def reconcile(known: Mapping[str, int], found: Set[str], busy: Collection[str]) -> dict[str, int]:
    """Addresses (host:port) to keep links to, the known ones first: address |-> answers in a row without it.

    `found`: the addresses of an answer. `busy`: addresses where requests of this gateway run.
    """
    if not found:
        return dict(known)
    kept = {address: 0 if address in found else num + 1 for address, num in known.items()}
    kept |= dict.fromkeys(sorted(found - kept.keys()), 0)
    return {address: num for address, num in kept.items() if not is_leaving(num) or address in busy}


def is_leaving(num_missed: int) -> bool:
    """Whether an address that `num_missed` answers in a row left out gets no new work."""
    return num_missed >= MISSES
