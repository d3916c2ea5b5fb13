"""Pages with contents that depend on all earlier tokens, and a model whose next token depends on all the KV it reads.

A model with states keeps a position's number in a slot, and computes the next position's from it.

Like KV, a position's content is a number computed from the previous one and the token; the first depends on the cache
salt. Each position has exactly one right number, so content that is missing or belongs to other tokens, another salt
or another place is detected at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from zlib import crc32

from protos import kv_pb2

PAGE_TOKENS = 2
WEIGHTS = "weights"  # fingerprint of most workers' model
Cells = list[list[int]]  # page |-> content of each position


class Memory:
    """The pools of one incarnation's ranks. Peers that mapped them can read them after their owner's death.

    A real rank has a part of every page; here it has the whole page, so that each part alone reveals errors.
    """

    def __init__(self, num_pages: int, num_ranks: int = 1, num_slots: int = 0) -> None:
        self.main = [_empty(num_pages) for _ in range(num_ranks)]
        self.draft = [_empty(num_pages) for _ in range(num_ranks)]  # the draft model's part of the same pages
        self.states = [[0] * num_slots for _ in self.main if num_slots]  # slot |-> content of the last position seen
        self.generations = [0] * num_pages
        self.slot_generations = [0] * num_slots
        self.dead: set[int] = set()  # ranks; the rest of the worker dies a little later

    def read_page(self, rank: int, page: int, peer: "Memory", peer_page: int) -> None:
        """Copy into one rank's part. RuntimeError: the peer's rank that has it is dead."""
        there = peer.find_rank(rank)
        self.main[rank][page] = list(peer.main[there][peer_page])
        self.draft[rank][page] = list(peer.draft[there][peer_page])

    def read_slot(self, rank: int, slot: int, peer: "Memory", peer_slot: int) -> None:
        """`read_page` for a slot."""
        self.states[rank][slot] = peer.states[peer.find_rank(rank)][peer_slot]

    def find_rank(self, reading: int) -> int:
        """The rank that has what a peer's rank reads. RuntimeError: it is dead."""
        rank = reading % len(self.main)
        if rank in self.dead:
            raise RuntimeError(f"rank {rank} is gone")
        return rank


def _empty(num_pages: int) -> Cells:
    return [[0] * PAGE_TOKENS for _ in range(num_pages)]


def read(cells: Cells, pages: Iterable[int], num_tokens: int) -> list[int]:
    """Contents of the first `num_tokens` positions of `pages`."""
    found: list[int] = []
    for page in pages:
        found += cells[page]
    return found[:num_tokens]


def find_seed(cache_salt: str) -> int:
    """The value that the first position's content depends on."""
    return crc32(cache_salt.encode())


def with_weights(seed: int, weights: str) -> int:
    """The seed of a request at a model with these weights."""
    return seed ^ (crc32(weights.encode()) if weights != WEIGHTS else 0)


def extend(contents: list[int], seed: int, token_ids: Iterable[int]) -> None:
    """Append the contents of the next tokens' positions."""
    last = contents[-1] if contents else seed
    for token in token_ids:
        last = hash((last, token))
        contents.append(last)


_vocabulary: Sequence[int] = range(1 << 24)


@contextmanager
def speaking(vocabulary: Sequence[int]) -> Iterator[None]:
    """Within it the model's tokens are these; one that is there more often comes more often."""
    global _vocabulary
    before, _vocabulary = _vocabulary, vocabulary
    try:
        yield
    finally:
        _vocabulary = before


def choose_token(contents: Sequence[int]) -> int:
    return _vocabulary[hash(tuple(contents)) % len(_vocabulary)]


def answer(prompt_ids: Sequence[int], max_tokens: int, cache_salt: str) -> list[int]:
    """The answer of an undisturbed service."""
    return follow(prompt_ids, max_tokens, find_seed(cache_salt))


def follow(prompt_ids: Sequence[int], max_tokens: int, seed: int) -> list[int]:
    """The same for a request with this seed."""
    contents: list[int] = []
    tokens = list(prompt_ids)
    extend(contents, seed, tokens)
    for _ in range(max_tokens):
        tokens.append(choose_token(contents))
        extend(contents, seed, tokens[-1:])
    return tokens[len(prompt_ids) :]


@dataclass(slots=True)
class Truth:
    """The right KV of one sequence."""

    seed: int
    num_tokens: int = 0
    main: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)

    def follow(self, tokens: Sequence[int]) -> None:
        """Update: the sequence has these tokens now."""
        if len(tokens) > self.num_tokens:
            new = tokens[self.num_tokens :]
            extend(self.main, self.seed, new)
            extend(self.draft, ~self.seed, new)
            self.num_tokens = len(tokens)


@dataclass(frozen=True, slots=True)
class Offer:
    """Like kv.proto's."""

    ticket: kv_pb2.Ticket
    incarnation: str  # of the prefill worker
    owner: tuple[str, int]  # request and attempt it is made for
    positions: range
    pages: list[int]
    generations: list[int]
    slots: list[int]
    slot_generations: list[int]
