"""Copies any number of pages, or the same part of each, between pools on a GPU in one launch.

Knows words and addresses, not the owners of pages. Needs triton: import it where a CUDA device is chosen.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 4096  # of 4 bytes: a program copies 16 KiB, eight 16-byte words per thread


@triton.jit
def copy_pages_kernel(
    source: tl.int64, source_stride, target, target_stride, pages, into, num_words, BLOCK: tl.constexpr
):
    """Program (i, j) copies the j-th BLOCK of num_words words of page pages[i] to page into[i].

    source: an address: memory of another process is not a tensor here. target: int32. Strides: words between pages.
    """
    # the cast to a pointer loses the alignment, and with it the 16-byte loads
    words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    home = tl.load(into + tl.program_id(0)).to(tl.int64)
    offsets = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < num_words
    values = tl.load(words + page * source_stride + offsets, mask=is_inside)
    tl.store(target + home * target_stride + offsets, values, mask=is_inside)


def copy_pages(source: int, source_words: int, target: Tensor, pages: Tensor, into: Tensor) -> None:
    """target[into[i]] = the first words of page pages[i] at `source`, on the current stream. Does not wait.

    source: 16-byte-aligned address that target's device can read, of pages that begin `source_words` apart.
    target: [P, W] int32, rows contiguous. pages, into: [n] int64 on its device, n > 0. The caller checks bounds.
    """
    if source % 16:
        raise ValueError(f"pages at address {source:#x} are not aligned to 16 bytes")
    if pages.shape != into.shape:
        raise ValueError(f"{len(pages)} pages cannot be copied into {len(into)}")
    num_words = target.shape[1]
    grid = (len(pages), triton.cdiv(num_words, BLOCK_WORDS))
    copy_pages_kernel[grid](
        source, source_words, target, target.stride(0), pages, into, num_words, BLOCK=BLOCK_WORDS
    )  # fmt: skip
