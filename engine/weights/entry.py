"""A tensor as a file's header describes it, of any format. Imports no torch."""

import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a file's header describes it."""

    path: Path
    dtype: str  # the format's name: "BF16", "F32", "Q4_K", ...
    shape: tuple[int, ...]
    begin_bytes: int  # offset in the file
    num_bytes: int


def read_samples(file_descriptor: int, entry: TensorEntry, num_windows: int, window_bytes: int) -> bytes:
    """Evenly spaced windows of a tensor's bytes, including its first and last; all of it if it is that small."""
    if entry.num_bytes <= num_windows * window_bytes:
        return os.pread(file_descriptor, entry.num_bytes, entry.begin_bytes)
    stride = (entry.num_bytes - window_bytes) / (num_windows - 1)
    begins = [entry.begin_bytes + math.floor(index * stride) for index in range(num_windows)]
    return b"".join(os.pread(file_descriptor, window_bytes, begin) for begin in begins)
