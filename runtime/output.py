"""Standard output and error as streams that fail nobody: whoever reads them may leave, and disks get full.

Knows file descriptors, nothing of what is written.
"""

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class Output(io.TextIOWrapper):
    """Writes at once; what cannot be written is lost.

    Nothing is kept for later, either: what Python cannot flush at its end turns the exit status into 120.
    """

    def __init__(self, fd: int, encoding: str) -> None:
        """`fd` stays its owner's."""
        super().__init__(io.FileIO(fd, "w", closefd=False), encoding, "backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        """Raises nothing; always the length of `text`."""
        with suppress(OSError):
            super().write(text)
        return len(text)


def unfailing(stream: TextIO | None) -> TextIO:
    """An Output to where `stream` goes; to nowhere for None, which Python has for what was closed at its start."""
    return Path(os.devnull).open("w") if stream is None else Output(stream.fileno(), stream.encoding)
