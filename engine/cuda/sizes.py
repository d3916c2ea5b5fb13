"""A GPU's sizes that others plan by. Imports no torch."""

from engine.layer_config import MAX_LOGITS_AT_ONCE

SLOT_TILES = (16, 64)  # rows an expert multiplies at once on a GPU: where it has up to so many on average, and more
# Of heads that latents are expanded to, from the first step on, so that it is measured: eight of DeepSeek V3's of 100k
# tokens, so that a chunk of 2,048 has work for 128 multiprocessors.
EXPANDED_BYTES = 512 << 20
LARGE_DEVICE_BYTES = 38 << 30  # a GPU of 40 GB or more computes four times as many: all answers fit one captured step


def most_logits(memory_bytes: float) -> int:
    """Logits that a step computes at once, at most, on a GPU with so much memory; 0: on a CPU."""
    return MAX_LOGITS_AT_ONCE << (2 if memory_bytes >= LARGE_DEVICE_BYTES else 0)
