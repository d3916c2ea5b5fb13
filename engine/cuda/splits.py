"""How FlashInfer's fa2 divides long contexts among programs of a decode step. Pure: ints in, ints out.

A program reads the keys of one KV head for a tile of queries, from all of a sequence's context or from a part of it.
FlashInfer looks for the smallest part that gives at most as many programs as run at once, two on each multiprocessor.
Where the step has more tiles than that already, it divides nothing, and one long context makes all others wait for it.
A captured step has a program for each tile *and some more*, since its tiles are counted for queries of any lengths:

    programs of 64 answers of 4 query heads a KV head:   64 · 4 / 16 + 64 - 1 = 79   ->   15 for parts of long contexts

Read from FlashInfer 0.7.2's scheduler.cuh: PrefillSplitQOKVIndptr, PrefillPlanImpl; utils.cuh: FA2DetermineCtaTileQ.
"""

import numpy as np

from engine.attention.shape import AttentionShape
from engine.staging import Ints

PROGRAMS_EACH = 2  # of a multiprocessor, that FlashInfer plans for
LEAST_TOKENS = 128  # of a part
LARGE_HEAD = 512  # FlashInfer divides the values of such heads


def find_tile(num_rows: int, head_dim: int) -> int:
    """Rows of a program's tile, if each sequence has so many: new tokens times the query heads of a KV head."""
    if head_dim >= LARGE_HEAD:
        return 16 if num_rows <= 32 else 32
    if num_rows > 64 and head_dim < 256:
        return 128
    return 64 if num_rows > 16 else 16


def count_programs(shape: AttentionShape, num_sequences: int, num_tokens: int) -> int:
    """That a step with `num_tokens` new ones of each sequence may have for a KV head, parts of contexts included."""
    group = shape.num_heads // shape.num_kv_heads
    tile = find_tile(num_tokens * group, shape.head_dim)
    if num_tokens > 1:
        return num_sequences * -(-num_tokens * group // tile)
    return -(-num_sequences * group // tile) + num_sequences - 1


def scratch_bytes(shape: AttentionShape, num_sequences: int, num_tokens: int, num_processors: int) -> int:
    """Scratch memory of a captured step: a float32 row of values and a sum for each row of each program's tile."""
    group = shape.num_heads // shape.num_kv_heads
    at_once = PROGRAMS_EACH * num_processors // shape.num_kv_heads
    programs = max(at_once, count_programs(shape, num_sequences, num_tokens))
    rows = -(-programs * find_tile(num_tokens * group, shape.head_dim) // group)
    return shape.num_heads * rows * (shape.head_dim + 1) * 4 + 32  # two buffers, each aligned to 16 bytes


def latent_scratch_bytes(latent_dim: int, num_processors: int) -> int:
    """Scratch memory of any step with latents (MLAPlan): two tiles of 64 rows for each multiprocessor, of 16-bit values
    and a float32 sum, each aligned to 16 bytes."""
    return 2 * num_processors * 64 * (2 * latent_dim + 4) + 32


def choose_part(
    num_pages: Ints, page_tokens: int, num_tokens: int, shape: AttentionShape, num_processors: int
) -> int | None:
    """Pages of the parts into which contexts are divided; None: FlashInfer's choice is as good, or nothing is divided.

    num_pages: [B] of each context; num_tokens: new ones of each sequence. Padding, with which steps are captured, is
    not divided: where FlashInfer is given the parts, it would be captured as a step that never divides any.
    """
    programs = count_programs(shape, len(num_pages), num_tokens)
    if programs <= PROGRAMS_EACH * num_processors // shape.num_kv_heads:
        return None
    tile = find_tile(num_tokens * (group := shape.num_heads // shape.num_kv_heads), shape.head_dim)
    most_parts = programs // -(-num_tokens * group // tile)
    low, longest = max(LEAST_TOKENS // page_tokens, 1), int(num_pages.max())
    high = longest
    while low < high:
        middle = (low + high) // 2
        if int(np.sum(-(-num_pages // middle))) > most_parts:
            low = middle + 1
        else:
            high = middle
    return low if low < longest else None
