"""The order of KV in a pool's pages, and each rank's part of it. Pure; the only file that knows the order.

A page is contiguous, and so is any range of its heads, so a rank of another tensor-parallel degree reads its heads as
one range. Changing the order means a new protocol version (kvtransfer/layout.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

PAGES, KV_HEADS, LAYERS, KEY_VALUE, TOKENS, HEAD_DIM = range(6)  # axes of a pool, outermost first


def pool_sizes(
    *, num_pages: int, num_kv_heads: int, num_layers: int, page_tokens: int, head_dim: int, has_values: bool = True
) -> tuple[int, ...]:
    """Sizes of a pool's axes, in order; on the axis KEY_VALUE keys are 0 and values, if there are any, 1."""
    sizes = {
        PAGES: num_pages,
        KV_HEADS: num_kv_heads,
        LAYERS: num_layers,
        KEY_VALUE: 1 + has_values,
        TOKENS: page_tokens,
        HEAD_DIM: head_dim,
    }
    return tuple(sizes[axis] for axis in sorted(sizes))


def describe_token(kept_bytes: float, head_bytes: float) -> str:
    """A token's size in pages, hand-offs and files, in words. head_bytes: of the heads that a latent replaces, or 0."""
    less = f", {head_bytes / kept_bytes:.0f} times less than its heads" if head_bytes else ""
    return f"{kept_bytes / 1024:.3g} KiB of KV a token{less}"


TEST_BYTES = 64 << 10  # random, behind the last page of a pool on a GPU: a peer that reads them right reads pages right


def find_test_bytes(pages_bytes: int) -> int:
    """Where the TEST_BYTES begin, behind pages of `pages_bytes`: on a multiple of 256, as an allocation does."""
    return -(-pages_bytes // 256) * 256


class KvPart(NamedTuple):
    """Layers of one model whose KV is alike, on one rank. A page has their parts one after the other."""

    num_layers: int
    num_heads: int  # KV heads
    head_dim: int  # of keys and of values; the narrower of the two is padded
    has_values: bool = True  # False: values are part of the keys

    def pool_sizes(self, num_pages: int, page_tokens: int) -> tuple[int, ...]:
        """The sizes of a tensor that holds the part in all pages."""
        return pool_sizes(
            num_pages=num_pages,
            num_kv_heads=self.num_heads,
            num_layers=self.num_layers,
            page_tokens=page_tokens,
            head_dim=self.head_dim,
            has_values=self.has_values,
        )


class StatePart(NamedTuple):
    """A state that layers of one model keep of each sequence, on one rank. A slot has such parts one after the other.

    Slots are pages of a pool of their own, whose size does not depend on tokens.
    """

    num_layers: int
    num_heads: int
    sizes: tuple[int, ...]  # of a head's state in one layer

    def pool_sizes(self, num_pages: int, page_tokens: int) -> tuple[int, ...]:
        """The sizes of a tensor that holds the part in all slots."""
        return (num_pages, self.num_heads, self.num_layers, *self.sizes)


class PagePart(NamedTuple):
    """One part of a page or slot, over all ranks: the model's parts come first, then the draft model's."""

    num_heads: int  # that ranks divide
    head_bytes: int  # all layers; of pages, keys and values
    num_layers: int = 1  # that stages divide


def can_divide(num_kv_heads: int, size: int) -> bool:
    """Whether `size` ranks can share the heads: each has the same number, or several share each head."""
    return size > 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def heads_of(num_kv_heads: int, rank: int, size: int) -> range:
    """A rank's heads. The caller has checked `can_divide`."""
    count = max(num_kv_heads // size, 1)
    first = rank * num_kv_heads // size
    return range(first, first + count)


def stage_of(rank: int, size: int, stages: int) -> int:
    """The stage of one of all `size` ranks. Rank 0 is in the last, which ends each step and has the tokens."""
    return stages - 1 - rank * stages // size


def layers_of(num_layers: int, stage: int, stages: int) -> range:
    """A stage's layers; the first stages have one more if they cannot be equal."""
    few, more = divmod(num_layers, stages)
    first = stage * few + min(stage, more)
    return range(first, first + few + (stage < more))


def most_layers(num_layers: int, stages: int) -> int:
    """Layers for which each stage's pages have room, so that those of all ranks have the same size."""
    return -(-num_layers // stages)


def page_bytes_of(parts: Sequence[PagePart], rank: int, size: int, stages: int = 1) -> int:
    """Bytes of one rank's page. size: of all stages together."""
    tp = size // stages
    return sum(len(heads_of(part.num_heads, rank % tp, tp)) * head_bytes_of(part, stages) for part in parts)


def head_bytes_of(part: PagePart, stages: int) -> int:
    """Bytes of a head in the page of one rank."""
    return part.head_bytes // part.num_layers * most_layers(part.num_layers, stages)
