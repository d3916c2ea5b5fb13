"""Files and batches on disk, in one folder that one gateway has at a time.

ID        a file's content: what a client uploaded, or what became of a batch's lines, appended one by one
ID.json   a file's or a batch's record, replaced as a whole; files of a batch have none until it is over
"""

import asyncio
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec
import structlog

from gateway.access.keys import ANYBODY
from gateway.errors import ApiError, overloaded
from gateway.shares import Shared, is_fair
from wire.private_folders import open_private

_log = structlog.get_logger()

_OWN_FILE = re.compile(r"file-[0-9a-f]{32}|(file-|batch_)[0-9a-f]{32}\.part")
MAX_FILE_BYTES = 200 << 20
MAX_RECORDS = 10_000
MAX_OPEN_BATCHES = 100
KEPT_S = 30 * 86_400  # files and batches, from when they were made

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired"]
OVER: frozenset[Status] = frozenset({"failed", "completed", "cancelled", "expired"})


class FileObject(msgspec.Struct, tag_field="object", tag="file"):
    """A file, as OpenAI's clients see it. Times are in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class BatchFault(msgspec.Struct):
    """Why a whole batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(msgspec.Struct):
    """The same, as a list."""

    data: list[BatchFault]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Lines of a batch: all, answered, and named in its error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, tag_field="object", tag="batch"):
    """A batch, as OpenAI's clients see it. Times are in Unix seconds; null: not yet."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expired_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: Status) -> None:
        """The batch is now in this state, which is not `validating`."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


Value = TypeVar("Value", FileObject, Batch)


class Record(msgspec.Struct):
    """What ID.json has."""

    owner: str  # Key.owner of the API key that made it
    value: FileObject | Batch
    output_id: str = ""  # of a batch: its files, which clients learn when it is over
    error_id: str = ""
    made_s: float = msgspec.field(default_factory=time.time)  # orders those of one second


def sharer(owner: str) -> str:
    """As in Shared: "" where there are no keys, and so no shares."""
    return "" if owner == ANYBODY.owner else owner


def _has_room(owner: str, records: Collection[Record], most: int) -> bool:
    """For one more of the owner's."""
    mine, total = sum([record.owner == owner for record in records]) + 1, len(records) + 1
    return total <= most and (not sharer(owner) or is_fair(mine, total, most))


def _size(record: Record) -> int:
    return record.value.bytes if isinstance(record.value, FileObject) else 0


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return prefix + secrets.token_hex(16)


class BatchStore:
    """Owns the folder. Lives on the asyncio thread; `save` and `add_file` write in another."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: of all files; above it no more are taken. Raises OSError, ValueError if it cannot be used."""
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "lock").exists():
            raise ValueError(f"--batch-dir {folder} has files of others; name an empty folder")
        os.close(open_private(folder))
        self.folder = folder
        self.on_change: Callable[[], None] = lambda: None  # called when there is a batch to run, or to end
        self.bytes = Shared(max_bytes)  # of files, of uploads so far, and of batches' output so far
        self._writing = asyncio.Lock()
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)  # until this process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ValueError(f"--batch-dir {folder} is another gateway's; give each one its own") from error
        self._records: dict[str, Record] = {}
        for path in folder.glob("*.json"):
            try:
                self._records[path.stem] = msgspec.json.decode(path.read_bytes(), type=Record)
            except msgspec.MsgspecError as error:
                _log.warning("a record of files or batches cannot be read; it is left out", file=str(path), why=error)
        for record in self._records.values():
            self.bytes.add(sharer(record.owner), _size(record))
        known = {name for record in self._records.values() for name in (record.output_id, record.error_id)}
        for path in folder.iterdir():  # of uploads that a crash ended
            if _OWN_FILE.fullmatch(path.name) and path.name not in known and path.name not in self._records:
                path.unlink()

    def close(self) -> None:
        """Another gateway may have the folder."""
        os.close(self._lock)

    def path(self, file_id: str) -> Path:
        """Where a file's content is. `file_id`: one of ours, never a client's."""
        return self.folder / file_id

    # -- what clients see -------------------------------------------------------------------------------------------

    def find(self, kind: type[Value], record_id: str, owner: str) -> Value:
        """Raises ApiError 404 unless there is one that this owner made."""
        record = self._records.get(record_id)
        if record is None or record.owner != owner or not isinstance(record.value, kind):
            raise ApiError(404, f"no {kind.__name__.removesuffix('Object').lower()} has this id", "id", "not_found")
        return record.value

    def list_own(self, kind: type[Value], owner: str) -> list[Value]:
        """The owner's, newest first."""
        own = [record for record in self._records.values() if record.owner == owner]
        ordered = [record.value for record in sorted(own, key=lambda record: -record.made_s)]
        return [value for value in ordered if isinstance(value, kind)]

    def open_batches(self) -> list[Record]:
        """Those that are not over, oldest first."""
        return sorted(filter(_is_open, self._records.values()), key=lambda record: record.made_s)

    # -- changes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def upload(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Around an upload: yields what to call with the number of bytes before they are kept. Raises ApiError 413."""
        num_bytes, name = 0, sharer(owner)

        def take(num: int) -> None:
            nonlocal num_bytes
            if not self.bytes.has_room(name, num):
                why = "the upload is larger than the room that is left for your files; delete some, or wait"
                raise ApiError(413, why, "file", "body_too_large")
            num_bytes += num
            self.bytes.add(name, num)

        try:
            yield take
        finally:
            self.bytes.add(name, -num_bytes)

    async def add_file(self, owner: str, content: BinaryIO, filename: str) -> FileObject:
        """Keeps an upload, which is at its start. Raises ApiError."""
        self._check_room(owner)
        name, now = new_id("file-"), int(time.time())
        try:
            size = await asyncio.to_thread(self._copy, content, self.path(name))
            added = FileObject(name, size, now, now + KEPT_S, filename, "batch")
            await self.save(Record(owner, added))
            self.bytes.add(sharer(owner), size)
        except BaseException:
            self.path(name).unlink(missing_ok=True)
            raise
        return added

    async def add_batch(self, owner: str, file_id: str, endpoint: str, metadata: dict[str, str] | None) -> Batch:
        """Begins a batch. Raises ApiError 429 if too many are not over."""
        self._check_room(owner)
        if not _has_room(owner, self.open_batches(), MAX_OPEN_BATCHES):
            raise overloaded(f"of {MAX_OPEN_BATCHES} open batches your key has its share; send this one later")
        now = int(time.time())
        batch = Batch(new_id("batch_"), endpoint, file_id, now, now + 86_400, metadata=metadata)
        await self.save(Record(owner, batch, new_id("file-"), new_id("file-")))
        self.on_change()
        return batch

    async def cancel(self, batch: Batch) -> None:
        """The runner ends it. No effect on one that is over."""
        if batch.status not in OVER and batch.status != "cancelling":
            batch.enter("cancelling")
            await self.save(self._records[batch.id])
            self.on_change()

    async def save(self, record: Record) -> None:
        """Writes a record, whole or not at all: it is there after a crash."""
        async with self._writing:  # the last change is written last
            name = record.value.id
            await asyncio.to_thread(self._replace, self.folder / f"{name}.json", msgspec.json.encode(record))
            self._records[name] = record

    async def keep_output(self, owner: str, file_id: str, filename: str) -> str | None:
        """The file of a batch that is over becomes a client's. None: it is empty, and deleted. Idempotent."""
        path = self.path(file_id)
        if file_id in self._records:
            return file_id
        if not path.exists() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return None
        now = int(time.time())
        kept = FileObject(file_id, path.stat().st_size, now, now + KEPT_S, filename, "batch_output")
        await self.save(Record(owner, kept))
        self.bytes.add(sharer(owner), kept.bytes)
        return file_id

    def delete_file(self, file: FileObject) -> None:
        """Raises ApiError 409 if a batch that is not over reads it."""
        for record in self.open_batches():
            if isinstance(record.value, Batch) and record.value.input_file_id == file.id:
                why = f"the file is the input of {record.value.id}, which is not over; cancel that first"
                raise ApiError(409, why, None, "file_in_use")
        self._forget(file.id)

    def expire(self) -> None:
        """Deletes what is old, and not of a batch that is not over."""
        now = time.time()
        inputs = {record.value.input_file_id for record in self.open_batches() if isinstance(record.value, Batch)}
        for name, record in list(self._records.items()):
            value = record.value
            ends = value.expires_at if isinstance(value, FileObject) else value.created_at + KEPT_S
            if ends < now and name not in inputs and not _is_open(record):
                self._forget(name)

    def _forget(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)  # first: a file without a record is deleted at a start
        self.path(name).unlink(missing_ok=True)
        record = self._records.pop(name)
        self.bytes.add(sharer(record.owner), -_size(record))

    def _check_room(self, owner: str) -> None:
        if not _has_room(owner, self._records.values(), MAX_RECORDS):
            why = f"of {MAX_RECORDS} files and batches that are kept here your key has its share"
            raise overloaded(f"{why}; delete some files, or wait")

    def _copy(self, content: BinaryIO, path: Path) -> int:
        with open_new(path) as file:
            shutil.copyfileobj(content, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _replace(self, path: Path, data: bytes) -> None:
        part = path.with_suffix(".part")
        with open_new(part) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def open_new(path: Path) -> BinaryIO:
    """An empty file of the owner alone, for writing."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _is_open(record: Record) -> bool:
    return isinstance(record.value, Batch) and record.value.status not in OVER
