"""Keys of KV pages, computed from their content, so that equal prompts share pages. Pure.

    root = H(model, cache_salt, adapter)        key[i] = H(key[i - 1], tokens of page i)        H: BLAKE2b, 128 bits

A key stands for all tokens up to its page's end, since KV depends on everything before it. Different models, salts or
adapters never share keys. Workers key their pages with them, and the gateway remembers which keys it sent where.
"""

from collections.abc import Iterator
from hashlib import blake2b

PageKey = bytes
KEY_BYTES = 16
TOKEN_BYTES = 4


def root_key(model: str, cache_salt: str, adapter: str = "") -> PageKey:
    """The parent of the first page's key. `model`: fingerprint of the weights; `adapter`: digest of its content."""
    own = f"\1{adapter}" if adapter else ""  # not \0: a salt may have any characters, even those of an adapter's root
    return blake2b(f"{model}{own}\0{cache_salt}".encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def next_key(parent: PageKey, packed_tokens: bytes) -> PageKey:
    """The key of a page with these tokens (int32, little-endian) that continues the page of `parent`."""
    return blake2b(parent + packed_tokens, digest_size=KEY_BYTES).digest()


def page_keys(parent: PageKey, packed_tokens: bytes, page_tokens: int) -> Iterator[PageKey]:
    """Keys of the whole pages that these tokens fill, in order, after the page of `parent`. 0.7 us each."""
    page_bytes = page_tokens * TOKEN_BYTES
    for begin in range(0, len(packed_tokens) - page_bytes + 1, page_bytes):
        parent = next_key(parent, packed_tokens[begin : begin + page_bytes])
        yield parent
