"""Keys of KV pages, computed from their content, so that equal prompts share pages. Pure.

    root = H(model, cache_salt, adapter)        key[i] = H(key[i - 1], tokens of page i)        H: BLAKE2b, 128 bits

A key stands for all tokens up to its page's end, since KV depends on everything before it. A draft head's KV depends on
the token after it, too: with one, a key stands for the first token of the next page as well. Different models, salts or
adapters never share keys, nor do different images (wire/images.py). Workers key their pages with them, and report to
gateways which ones they have.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from wire.images import ImageSpan, name_images

PageKey = bytes
KEY_BYTES = 16
SENT_KEY_BYTES = 8  # of a key, where workers report which ones they have
TOKEN_BYTES = 4


class NamedPage(NamedTuple):
    """A page that has a key. A copy of it counts only if the page still has this generation afterwards."""

    page: int
    generation: int
    key: PageKey
    has_draft: bool  # the draft model's KV is complete, too


def root_key(model: str, cache_salt: str, adapter: str = "") -> PageKey:
    """The parent of the first page's key. `model`: fingerprint of the weights; `adapter`: digest of its content."""
    own = f"\1{adapter}" if adapter else ""  # not \0: a salt may have any characters, even those of an adapter's root
    return blake2b(f"{model}{own}\0{cache_salt}".encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def next_key(parent: PageKey, packed_tokens: bytes) -> PageKey:
    """The key of a page with these tokens (int32, little-endian) that continues the page of `parent`."""
    return blake2b(parent + packed_tokens, digest_size=KEY_BYTES).digest()


def page_keys(
    parent: PageKey, packed_tokens: bytes, page_tokens: int, num_after: int = 0, images: Sequence[ImageSpan] = (),
    first: int = 0,
) -> Iterator[PageKey]:  # fmt: skip
    """Keys of the whole pages that these tokens fill, in order, after the page of `parent`. 0.7 us each.

    num_after: tokens after each page that its key stands for too. images: of the prompt; first: position of the first
    of these tokens in it.
    """
    page_bytes = page_tokens * TOKEN_BYTES
    key_bytes = page_bytes + num_after * TOKEN_BYTES
    for begin in range(0, len(packed_tokens) - key_bytes + 1, page_bytes):
        tokens = packed_tokens[begin : begin + key_bytes]
        if images:
            at = first + begin // TOKEN_BYTES
            tokens += name_images(images, at, at + len(tokens) // TOKEN_BYTES)
        parent = next_key(parent, tokens)
        yield parent
