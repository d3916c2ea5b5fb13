"""The gateway's memory of workers' caches: chains of keys, bounded, least recently used first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.router.prefix_index import MAX_KEYS, PrefixIndex
from wire.messages import pack_tokens
from wire.page_keys import PageKey, page_keys, root_key


def chain(*token_ids: int) -> list[PageKey]:
    """Keys of one-token pages."""
    return list(page_keys(root_key("w", ""), pack_tokens(np.array(token_ids, np.int32)), 1))


def longest(memory: PrefixIndex, incarnation: str, keys: list[PageKey]) -> int:
    return memory.find(keys).get(incarnation, 0)


def test_nothing_grows_without_bound() -> None:
    memory = PrefixIndex()
    keys = [number.to_bytes(16, "little") for number in range(MAX_KEYS + 100)]
    memory.remember("D1", keys)
    assert len(memory) == longest(memory, "D1", keys) == MAX_KEYS


def test_forgetting() -> None:
    memory = PrefixIndex()
    for incarnation in ("D1", "D2"):
        memory.remember(incarnation, chain(1, 2, 3))
    memory.forget("D1", chain(1, 2, 3)[1:])
    memory.forget("D3", chain(1, 2, 3))
    assert (longest(memory, "D1", chain(1, 2, 3)), longest(memory, "D2", chain(1, 2, 3))) == (1, 3)
    memory.keep({"D1", "P1"})
    assert (longest(memory, "D1", chain(1, 2, 3)), longest(memory, "D2", chain(1, 2, 3)), len(memory)) == (1, 0, 1)


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12), st.integers(1, 8))
def test_it_is_a_list_of_the_last_chains(chains: list[list[int]], max_keys: int) -> None:
    """The slow twin is a list of all prefixes of chains by last use; of one chain the longest is forgotten first."""
    memory, used = PrefixIndex(), list[tuple[int, ...]]()  # least recently used first
    for one in chains:
        memory.remember("D1", chain(*one), max_keys)
        beginnings = [tuple(one[:end]) for end in range(len(one), 0, -1)]
        used = [old for old in used if old not in beginnings] + beginnings
        used = used[-max_keys:]
        for other in chains:
            known = [end for end in range(1, len(other) + 1) if tuple(other[:end]) in used]
            assert longest(memory, "D1", chain(*other)) == len(known)
            assert known == list(range(1, len(known) + 1)), "the known keys are a prefix"
        assert len(memory) == len(used)
