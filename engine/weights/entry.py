"""A tensor as a file's header describes it, of any format. Imports no torch."""

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
