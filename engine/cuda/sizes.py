"""A GPU's sizes that others plan by. Imports no torch."""

from engine.layer_config import MAX_LOGITS_AT_ONCE

SLOT_TILES = (16, 64)  # rows an expert multiplies at once on a GPU: where it has up to so many on average, and more
LARGE_DEVICE_BYTES = 38 << 30  # a GPU of 40 GB or more computes four times as many: all answers fit one captured step


def most_logits(memory_bytes: float) -> int:
    """Of a step, computed at once, on a GPU with so much memory; 0: on a CPU."""
    return MAX_LOGITS_AT_ONCE << (2 if memory_bytes >= LARGE_DEVICE_BYTES else 0)
