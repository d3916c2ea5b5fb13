"""Structured logs: one line an event, JSON unless stderr is a terminal or --log-format says otherwise.

Writing them never fails: readers leave, and disks get full.
"""

import atexit
import faulthandler
import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import structlog


class Output(io.TextIOWrapper):
    """Writes at once, without a buffer; what cannot be written is lost.

    With a buffer, what Python cannot flush when it ends would turn the exit status into 120.
    """

    def __init__(self, fd: int, encoding: str) -> None:
        """`fd` is not closed here."""
        super().__init__(io.FileIO(fd, "w", closefd=False), encoding, "backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        """Raises nothing; always the length of `text`."""
        with suppress(OSError):
            super().write(text)
        return len(text)


def unfailing(stream: TextIO | None) -> TextIO:
    """An Output to the file of `stream`; to nowhere for None, as Python has it where the file was closed at start."""
    return Path(os.devnull).open("w") if stream is None else Output(stream.fileno(), stream.encoding)


def is_text(log_format: str, stream: TextIO) -> bool:
    """Whether people read what is written there. log_format: of `ProcessConfig`."""
    return stream.isatty() if log_format == "auto" else log_format == "text"


def setup_logging(role: str, level: str, log_format: str = "auto") -> None:
    """Send structlog's events to stderr, each with `role` and what is bound to the context (request_id).

    From now on writing to sys.stderr raises nothing: a request never fails because a log line cannot be written.
    """
    sys.stderr = unfailing(sys.stderr)
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if is_text(log_format, sys.stderr)
        else structlog.processors.JSONRenderer()
    )

    def add_role(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("role", role)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            add_role,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),  # as it is then: see tap_native_stderr
    )


def tap_native_stderr(take: Callable[[str], bool]) -> None:
    """Call `take` on a thread with every line that native libraries write to stderr; True keeps it from the log.

    For libraries that report errors only there. Python's own stderr bypasses the tap. An abort() may lose its last
    line, so faulthandler reports crashes from now on. Once per process; undone when the process ends.
    """
    shown = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    sys.stderr = Output(shown, sys.stderr.encoding)
    faulthandler.enable(sys.stderr)

    def read() -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                if not take(line.decode(errors="replace").rstrip()):
                    with suppress(OSError):  # keep reading, or the next writer finds the pipe full
                        os.write(shown, line)

    thread = threading.Thread(target=read, name="native-stderr", daemon=True)
    thread.start()

    def undo() -> None:
        os.dup2(shown, 2)
        thread.join(1.0)  # the pipe's writing end is closed now, so the thread ends

    atexit.register(undo)
