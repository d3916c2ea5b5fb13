"""Whole pages copied from one pool to another on a GPU: one launch for any number of pages.

Knows words and addresses, not whose pages they are. Needs triton: load it where a CUDA device was chosen.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 4096  # of 4 bytes: a program copies 16 KiB, eight 16-byte words a thread


@triton.jit
def copy_pages_kernel(source: tl.int64, target, pages, into, num_words, BLOCK: tl.constexpr):
    """Program (i, j) copies the j-th BLOCK of num_words words of page pages[i] to page into[i].

    source: an address, as memory of another process is no tensor here. target: [P, num_words] int32.
    """
    # int -> pointer loses what is known of the alignment, and with it the 16-byte loads
    words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    home = tl.load(into + tl.program_id(0)).to(tl.int64)
    offsets = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < num_words
    values = tl.load(words + page * num_words + offsets, mask=is_inside)
    tl.store(target + home * num_words + offsets, values, mask=is_inside)


def copy_pages(source: int, target: Tensor, pages: Tensor, into: Tensor) -> None:
    """target[into[i]] = page pages[i] of the memory at `source`, on the current stream. Does not wait.

    source: address divisible by 16 that target's device can read, of pages as large as target's.
    target: [P, W] int32, contiguous. pages, into: [n] int64 on its device, n > 0. The caller checks bounds.
    """
    if source % 16:
        raise ValueError(f"pages at address {source:#x} do not begin on 16 bytes")
    if pages.shape != into.shape:
        raise ValueError(f"{len(pages)} pages cannot be copied into {len(into)}")
    num_words = target.shape[1]
    grid = (len(pages), triton.cdiv(num_words, BLOCK_WORDS))
    copy_pages_kernel[grid](source, target, pages, into, num_words, BLOCK=BLOCK_WORDS)
