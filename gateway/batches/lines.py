"""The lines of a batch: those of its input, and what is written of each, once."""

import codecs
import fcntl
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

MAX_LINES = 50_000
MAX_ALL_LINES = 2 * MAX_LINES  # with empty ones
MAX_ID_CHARS = 256
EMBEDDINGS = "/v1/embeddings"  # an endpoint
MAX_ANSWERS = 128  # of a line, as of any request (request/rules.py)


class InputLine(msgspec.Struct):
    """A line of the input: one request."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Wanted(msgspec.Struct):
    """The fields of a line's body that say how many answers it asks for."""

    n: Any = None
    prompt: Any = None
    input: Any = None  # of embeddings


class LineResponse(msgspec.Struct):
    """The answer to a line's request."""

    status_code: int
    request_id: str
    body: msgspec.Raw  # JSON


class LineError(msgspec.Struct):
    """Why a line has no answer."""

    code: str
    message: str


class OutputLine(msgspec.Struct):
    """A line of the output or error file."""

    id: str  # ends with its line's number
    custom_id: str | None
    response: LineResponse | None = None
    error: LineError | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that cannot be asked."""

    number: int
    custom_id: str | None
    code: str
    message: str


@dataclass(slots=True)
class Input:
    """The lines of an input file. Numbers count from 1, empty lines included."""

    offsets: "array[int]"  # by number - 1
    num_answers: "array[int]"  # that a line asks for, by number - 1; of one that cannot be asked: 0
    numbers: list[int]  # of those that can be asked
    faults: list[Fault]


def scan(path: Path, endpoint: str, max_line_bytes: int) -> Input:
    """Reads the whole input. Raises ValueError if it has no line, or too many."""
    _check_number(path)
    found = Input(array("Q"), array("H"), [], [])
    seen: dict[str, int] = {}
    for number, (offset, line) in enumerate(_lines(path, max_line_bytes), 1):
        found.offsets.append(offset)
        found.num_answers.append(0)
        if line is not None and not line.strip():
            continue
        custom_id, fault = _check(number, line, endpoint, max_line_bytes, seen)
        if fault:
            found.faults.append(Fault(number, custom_id, *fault))
        else:
            found.numbers.append(number)
            found.num_answers[-1] = _count_answers(line or b"", endpoint)
        if len(found.numbers) + len(found.faults) > MAX_LINES:
            raise ValueError(f"the file has more than {MAX_LINES} lines; send several batches")
    if not found.numbers and not found.faults:
        raise ValueError("the file has no lines; each is one request as JSON")
    return found


def _check_number(path: Path) -> None:
    """Raises ValueError if there are too many lines. Empty ones cost time and memory, too."""
    num_lines = 0
    with path.open("rb") as file:
        while num_lines <= MAX_ALL_LINES and (part := file.read(1 << 20)):
            num_lines += part.count(b"\n")
    if num_lines > MAX_ALL_LINES:
        raise ValueError(f"the file has more than {MAX_ALL_LINES} lines, empty ones included; remove those")


def _count_answers(line: bytes, endpoint: str) -> int:
    """How many answers a right line asks for; 1 if its body is not right, which its request finds."""
    number = 1
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        wanted = msgspec.json.decode(msgspec.json.decode(line, type=InputLine).body, type=_Wanted)
        if isinstance(wanted.n, int):
            number = wanted.n
        for given in (wanted.prompt, wanted.input if endpoint == EMBEDDINGS else None):
            if isinstance(given, list) and given and not isinstance(given[0], int):
                number *= len(given)
    return min(max(number, 1), MAX_ANSWERS)


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields (offset, line); None in place of one that is too long."""
    with path.open("rb") as file:
        file.seek(3 if file.read(3) == codecs.BOM_UTF8 else 0)
        offset = file.tell()
        while line := file.readline(max_bytes + 1):
            is_long = len(line) > max_bytes
            while is_long and line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            yield offset, None if is_long else line
            offset = file.tell()


def _check(
    number: int, line: bytes | None, endpoint: str, max_bytes: int, seen: dict[str, int]
) -> tuple[str | None, tuple[str, str] | None]:
    """(custom_id, if it has one; code and message of what is wrong, if something is)."""
    if line is None:
        return None, ("line_too_long", f"line {number} has more than --body-limit-bytes, {max_bytes}")
    try:
        given = msgspec.json.decode(line, type=InputLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        is_json = isinstance(error, msgspec.ValidationError)
        code, what = ("invalid_line", "is not as it must be") if is_json else ("invalid_json_line", "is not valid JSON")
        return None, (code, f"line {number} {what}: {error}")
    name = given.custom_id
    if not 1 <= len(name) <= MAX_ID_CHARS:
        return None, ("invalid_custom_id", f"line {number}: custom_id must have 1 to {MAX_ID_CHARS} characters")
    if (first := seen.setdefault(name, number)) != number:
        return name, ("duplicate_custom_id", f"line {number}: custom_id is also that of line {first}")
    if given.url != endpoint:
        return name, ("mismatched_url", f"line {number}: url is {given.url[:100]!r}, the batch's endpoint {endpoint}")
    return name, None


def read_line(path: Path, offset: int) -> InputLine:
    """A line that `scan` has found right."""
    with path.open("rb") as file:
        file.seek(offset)
        return msgspec.json.decode(file.readline(), type=InputLine)


class Journal:
    """A file of output lines that only grows, whole line by whole line."""

    def __init__(self, path: Path) -> None:
        """Reads what is there, and cuts a torn end off. Raises OSError: BlockingIOError while another has it."""
        self.numbers: set[int] = set()  # of the lines that are there
        self.is_dirty = False  # not yet safe from a power failure
        self.size = 0  # bytes
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path)
            os.ftruncate(self._fd, self.size)
        except OSError:
            os.close(self._fd)
            raise

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            for line in file:
                try:
                    number = int(msgspec.json.decode(line, type=OutputLine).id.rpartition("_")[2])
                except ValueError:  # msgspec's errors are, too
                    return
                if not line.endswith(b"\n"):
                    return
                self.numbers.add(number)
                self.size += len(line)

    def append(self, number: int, line: OutputLine) -> None:
        """Raises OSError, for example when the disk is full; then nothing is added."""
        data = msgspec.json.encode(line) + b"\n"
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError("the disk is full")
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)
        self.is_dirty = True
        self.numbers.add(number)

    def sync(self) -> None:
        """Writes through to the disk, so that what was appended survives a power failure. From any thread."""
        if self.is_dirty:
            self.is_dirty = False
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
