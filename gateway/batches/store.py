"""Files and batches: their content in a folder, their records in a database.

The database is the store of answers, where the gateway has one: then several gateways share the batches, and whichever
has a batch's lease runs it if it has the folder, too. Otherwise it is a file in the folder, which one gateway has.

ID    a file's content: what a client uploaded, or what became of a batch's lines, appended one by one
name  of the folder, wherever gateways see it
lock  held by the gateway, or by those that share the folder
"""

import asyncio
import fcntl
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar

import msgspec
import structlog

from gateway.access.keys import ANYBODY
from gateway.batches import records
from gateway.batches.objects import Batch, FileObject, Value
from gateway.batches.records import KEPT_S, Held, Record
from gateway.errors import ApiError, overloaded
from gateway.shares import Shared, is_fair
from gateway.store.database import Database, StoreError
from gateway.store.line import Line, for_clients
from wire.private_folders import open_private

_log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")
_OWN_FILE = re.compile(r"file-[0-9a-f]{32}|(file-|batch_)[0-9a-f]{32}\.part")
MAX_FILE_BYTES = 200 << 20
MAX_RECORDS = 10_000
MAX_OPEN_BATCHES = 100
LEASE_S = 5.0
UPLOAD_S = 3600.0  # longer than another gateway's upload takes, which has no record before its end


class _OldRecord(msgspec.Struct):
    """The content of an ID.json, which earlier gateways wrote."""

    owner: str
    value: FileObject | Batch
    output_id: str = ""
    error_id: str = ""
    made_s: float = 0.0


def sharer(owner: str) -> str:
    """The owner's name in Shared: "" where there are no keys, and so no shares."""
    return "" if owner == ANYBODY.owner else owner


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return prefix + secrets.token_hex(16)


class BatchStore:
    """Owns what this gateway has of the folder. Lives on the asyncio thread; files are written in another."""

    def __init__(
        self, folder: Path, max_bytes: int, shared: str | Path | None = None, lease_s: float = LEASE_S
    ) -> None:
        """`max_bytes`: of all files; above it no more are taken. `shared`: the store of answers, as in Database, if
        there is one. Raises OSError, ValueError if the folder cannot be used."""
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "lock").exists():
            raise ValueError(f"--batch-dir {folder} has files of others; name an empty folder")
        os.close(open_private(folder))
        self.folder, self.is_shared = folder, shared is not None
        self.on_change: Callable[[], None] = lambda: None  # called when there is a batch to run, or to end
        self.bytes = Shared(max_bytes)  # of files, of uploads so far, and of batches' output so far
        self.held: dict[str, Record] = {}  # batches that this gateway runs
        self._kept: dict[str, Held] = {}  # by owner, in the database
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)  # until this process ends
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if self.is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            why = "is another gateway's; give each one its own, or all of them --state-url"
            raise ValueError(f"--batch-dir {folder} {why}") from error
        self._name, self._began_s = _name(folder), time.time()
        self._line, self._lease_s = Line(shared or folder, "batches"), lease_s
        self._gateway = new_id("gateway_")
        self._opening = asyncio.Lock()
        self._is_open = False

    def close(self) -> None:
        """Releases the folder, so that another gateway may have it."""
        self._line.close()
        os.close(self._lock)

    def path(self, file_id: str) -> Path:
        """Where a file's content is. `file_id`: one of ours, never a client's."""
        return self.folder / file_id

    async def _call(self, method: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Calls a method of the database in its thread. Raises StoreError."""
        async with self._opening:
            if not self._is_open:
                if not self.is_shared:  # the one that had them is dead, as we have its folder
                    await self._line.call(records.release_all)
                await self._take_old_records()
                self._is_open = True
        return await self._line.call(method, *args, **named)

    async def _ask(self, method: Callable[Concatenate[Database, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Calls as `_call`, for a client. Raises ApiError."""
        with for_clients():
            return await self._call(method, *args, **named)

    async def _take_old_records(self) -> None:
        for path in self.folder.glob("*.json"):
            try:
                old = msgspec.json.decode(path.read_bytes(), type=_OldRecord)
            except (msgspec.MsgspecError, FileNotFoundError) as error:
                _log.warning("a record of files or batches cannot be read; it is left out", file=str(path), why=error)
                continue
            num_bytes = old.value.bytes if isinstance(old.value, FileObject) else 0
            record = Record(old.owner, old.value, old.made_s, self._name, old.output_id, old.error_id, num_bytes)
            await self._line.call(records.add, [record])
            path.unlink(missing_ok=True)

    # -- what clients see -------------------------------------------------------------------------------------------

    async def find(self, kind: type[Value], record_id: str, owner: str) -> Value:
        """Raises ApiError 404 unless there is one that this owner made."""
        return (await self._find(kind, record_id, owner))[1]

    async def _find(self, kind: type[Value], record_id: str, owner: str) -> tuple[Record, Value]:
        record = await self._ask(records.find, kind.__name__, record_id, owner)
        if record is None or not isinstance(record.value, kind):
            raise ApiError(404, f"no {kind.__name__.removesuffix('Object').lower()} has this id", "id", "not_found")
        record = self.held.get(record_id, record)
        assert isinstance(record.value, kind)
        return record, record.value

    async def find_content(self, file_id: str, owner: str) -> FileObject:
        """A file whose content is here. Raises ApiError."""
        record, file = await self._find(FileObject, file_id, owner)
        if record.folder != self._name:
            why = f"the content of {file.id} is in the --batch-dir of another gateway; have the gateways share one"
            raise ApiError(409, why, None, "other_batch_dir")
        return file

    async def list_own(self, kind: type[Value], owner: str) -> list[Value]:
        """The owner's files or batches, newest first. Raises ApiError."""
        found = await self._ask(records.list_own, kind.__name__, owner)
        values = [self.held.get(record.id, record).value for record in found]
        return [value for value in values if isinstance(value, kind)]

    # -- changes ----------------------------------------------------------------------------------------------------

    async def count(self) -> None:
        """Counts what all gateways keep. Raises ApiError."""
        before, self._kept = self._kept, {held.owner: held for held in await self._ask(records.count)}
        grown = Counter({owner: held.num_bytes for owner, held in self._kept.items()})
        grown.subtract({owner: held.num_bytes for owner, held in before.items()})
        for owner, num_bytes in grown.items():
            self.bytes.add(sharer(owner), num_bytes)

    @contextmanager
    def upload(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Counts an upload: yields what to call with the number of bytes before they are kept. Raises ApiError 413."""
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
        await self._check_room(owner)
        name, now = new_id("file-"), int(time.time())
        try:
            size = await asyncio.to_thread(_copy, content, self.path(name))
            added = FileObject(name, size, now, now + KEPT_S, filename, "batch")
            await self._ask(records.add, [self._record(owner, added, size)])
        except BaseException:
            self.path(name).unlink(missing_ok=True)
            raise
        await self.count()
        return added

    async def add_batch(self, owner: str, file_id: str, endpoint: str, metadata: dict[str, str] | None) -> Batch:
        """Begins a batch. Raises ApiError 429 if too many are not over."""
        await self._check_room(owner)
        if not self._has_room(owner, {name: held.num_open for name, held in self._kept.items()}, MAX_OPEN_BATCHES):
            raise overloaded(f"of {MAX_OPEN_BATCHES} open batches your key has its share; send this one later")
        now = int(time.time())
        batch = Batch(new_id("batch_"), endpoint, file_id, now, now + 86_400, metadata=metadata)
        record = self._record(owner, batch)
        record.output_id, record.error_id = new_id("file-"), new_id("file-")
        await self._ask(records.add, [record])
        self.on_change()
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Whichever gateway runs it ends it. No effect on one that is over. Raises ApiError."""
        now = int(time.time())
        await self._ask(records.ask_cancel, batch.id, now)
        batch.cancel(now)
        self.on_change()

    async def delete_file(self, file: FileObject) -> None:
        """Deletes a file. Raises ApiError 409 if a batch that is not over reads it."""
        if (reader := await self._ask(records.delete_file, file.id)) is not None:
            why = f"the file is the input of {reader}, which is not over; cancel that first"
            raise ApiError(409, why, None, "file_in_use")
        self.path(file.id).unlink(missing_ok=True)
        await self.count()

    def _record(self, owner: str, value: FileObject | Batch, num_bytes: int = 0) -> Record:
        return Record(owner, value, time.time(), self._name, num_bytes=num_bytes)

    async def _check_room(self, owner: str) -> None:
        await self.count()
        if not self._has_room(owner, {name: held.num_records for name, held in self._kept.items()}, MAX_RECORDS):
            why = f"of {MAX_RECORDS} files and batches that are kept here your key has its share"
            raise overloaded(f"{why}; delete some files, or wait")

    @staticmethod
    def _has_room(owner: str, numbers: Mapping[str, int], most: int) -> bool:
        """Whether there is room for one more of the owner's."""
        mine, total = numbers.get(owner, 0) + 1, sum(numbers.values()) + 1
        return total <= most and (not sharer(owner) or is_fair(mine, total, most))

    # -- what the runner does ---------------------------------------------------------------------------------------

    async def renew(self) -> list[Record]:
        """Keep the batches that this gateway runs, and take more. Returns those that are another's now.

        Raises StoreError.
        """
        held = {name: record if record.is_open else None for name, record in self.held.items()}
        own = await self._call(records.renew, self._gateway, self._lease_s, held)
        lost = [self.held.pop(name) for name in held.keys() - own.keys() if name in self.held]
        for name, asked_s in own.items():
            if asked_s and name in self.held and isinstance(value := self.held[name].value, Batch):
                value.cancel(asked_s)
        for record in await self._call(records.claim, self._gateway, self._lease_s, self._name):
            self.held.setdefault(record.id, record)
        return lost

    async def release(self) -> None:
        """Releases all batches that this gateway runs, so that others may run them."""
        names, self.held = list(self.held), {}
        with suppress(StoreError):
            await self._call(records.release, self._gateway, names)

    async def save(self, record: Record, files: Sequence[Record] = ()) -> bool:
        """Writes a batch that this gateway runs, and adds its files. False: it is another's now. Raises StoreError."""
        return await self._call(records.update, record, self._gateway, files)

    def take_output(self, owner: str, file_id: str, filename: str) -> Record | None:
        """The record with which a file of a batch becomes a client's. None: it is empty, and deleted."""
        path = self.path(file_id)
        if not path.exists() or not (size := path.stat().st_size):
            path.unlink(missing_ok=True)
            return None
        now = int(time.time())
        return self._record(owner, FileObject(file_id, size, now, now + KEPT_S, filename, "batch_output"), size)

    async def clean(self) -> list[str]:
        """Deletes what is old, and what uploads have left that a crash ended. Returns batches that no gateway runs, as
        their folder is elsewhere. Raises StoreError, OSError."""
        for name in await self._call(records.expire, self._name, int(time.time())):
            self.path(name).unlink(missing_ok=True)
        made_by = self._began_s - (UPLOAD_S if self.is_shared else 0.0)
        left = [path for path in self.folder.iterdir() if _OWN_FILE.fullmatch(path.name)]
        known = await self._call(records.find_names, self._name)
        for path in left:
            if path.name not in known and path.stat().st_mtime < made_by:
                path.unlink(missing_ok=True)
        return await self._call(records.find_stranded, self._name, 10 * self._lease_s)


def _name(folder: Path) -> str:
    """The folder's name, which is made once and the same for all that see it. Raises OSError."""
    path = folder / "name"
    if not path.exists():
        part = folder / new_id(".name-")
        with open_new(part) as file:
            file.write(secrets.token_hex(16).encode())
        with suppress(FileExistsError):
            os.link(part, path)
        part.unlink()
    return path.read_text()


def open_new(path: Path) -> BinaryIO:
    """An empty file of the owner alone, for writing."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _copy(content: BinaryIO, path: Path) -> int:
    with open_new(path) as file:
        shutil.copyfileobj(content, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()
