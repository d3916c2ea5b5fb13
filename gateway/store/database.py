"""Stored answers in SQLite or PostgreSQL: one schema, one set of SQL. Every call blocks.

answers   a row for each: what was asked, how far it is, and the gateway that works on it until its lease ends
tokens    what was generated, part by part; nobody but that gateway adds to them
gateways  those that have been seen lately
adapters  what the API has loaded and unloaded (adapters.py); changes: how many such changes there were
batch_records  files and batches (gateway/batches/records.py)
"""

import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from wire.private_folders import open_private

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING: tuple[Status, ...] = ("queued", "in_progress")
FILE = "answers.sqlite"
CALL_S = 5.0  # the longest that one statement may take
_VALUE = re.compile(r":(\w+)")
_NOW = "((julianday('now') - 2440587.5) * 86400.0)", "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"
_OPEN = "status IN ('queued', 'in_progress')"

# Each entry leads from its version to the next one; what is here never changes.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE answers (id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, model TEXT NOT NULL,"
        " previous TEXT NOT NULL, created_s BIGINT NOT NULL, asked BLOB NOT NULL, body BLOB NOT NULL,"
        " status TEXT NOT NULL, result BLOB NOT NULL, computes TEXT NOT NULL, gateway TEXT NOT NULL,"
        " lease_until DOUBLE PRECISION NOT NULL, wants_cancel INTEGER NOT NULL, num_bytes BIGINT NOT NULL)",
        "CREATE INDEX answers_by_lease ON answers (status, lease_until)",
        "CREATE INDEX answers_by_age ON answers (created_s)",
        "CREATE TABLE tokens (answer TEXT NOT NULL, choice INTEGER NOT NULL, first INTEGER NOT NULL, ids BLOB NOT NULL,"
        " logprobs BLOB NOT NULL, finish TEXT NOT NULL, PRIMARY KEY (answer, choice, first))",
        "CREATE TABLE gateways (id TEXT PRIMARY KEY, seen_s DOUBLE PRECISION NOT NULL)",
    ),
    (
        "ALTER TABLE answers ADD COLUMN labels TEXT NOT NULL DEFAULT '{}'",
        "CREATE INDEX answers_by_owner ON answers (owner, kind, created_s, id)",
    ),
    (
        "ALTER TABLE answers ADD COLUMN num_deaths INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE answers ADD COLUMN taken_bytes BIGINT NOT NULL DEFAULT -1",
    ),
    (
        "CREATE TABLE adapters (model TEXT NOT NULL, name TEXT NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,"
        " number BIGINT NOT NULL, PRIMARY KEY (model, name))",
        "CREATE TABLE changes (number BIGINT NOT NULL)",
        "INSERT INTO changes (number) VALUES (0)",
        "CREATE TABLE shares (revision TEXT PRIMARY KEY, share DOUBLE PRECISION NOT NULL)",
    ),
    (
        "CREATE TABLE batch_records (id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, value TEXT NOT NULL,"
        " made_s DOUBLE PRECISION NOT NULL, ends_s BIGINT NOT NULL, folder TEXT NOT NULL, input_id TEXT NOT NULL,"
        " output_id TEXT NOT NULL, error_id TEXT NOT NULL, num_bytes BIGINT NOT NULL, is_open INTEGER NOT NULL,"
        " cancelled_s BIGINT NOT NULL, gateway TEXT NOT NULL, lease_until DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX batch_records_by_owner ON batch_records (owner, kind, made_s)",
        "CREATE INDEX batch_records_by_lease ON batch_records (is_open, lease_until)",
    ),
)


class StoreError(Exception):
    """The database did not do what was asked: says why."""


class NewerStoreError(StoreError):
    """A newer gateway has made the store."""


@dataclass(slots=True)
class Answer:
    """A row of `answers`, named as there."""

    id: str
    kind: str  # of the API (`Kind`)
    owner: str  # Key.owner of who asked
    model: str  # name in the request; empty: none
    previous: str  # id of the answer before it in its conversation; or empty
    created_s: int  # Unix time
    asked: bytes  # how to compute it again (`Asked`)
    body: bytes  # the request, JSON
    status: Status
    result: bytes  # the answer as its client sees it, JSON; before its end without output
    computes: str = ""  # what has computed its tokens (`Tokens.computes`)
    labels: str = "{}"  # its metadata, JSON: an object of texts
    num_deaths: int = 0  # of gateways that worked on it, one after the other, since it last got tokens


_COLUMNS = ", ".join(Answer.__slots__)


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens of one choice that follow each other: a row of `tokens`."""

    choice: int
    first: int  # place of the first one in the choice
    ids: bytes  # as wire.messages packs them
    logprobs: bytes
    finish: str  # the choice's finish reason, with its last part; else empty


@dataclass(slots=True)
class Change:
    """A change of an answer, to be written."""

    answer: Answer
    is_new: bool  # it has no row yet
    has_changed: bool = True  # the row itself, not only its tokens
    num_bytes: int = 0  # by which the answer has grown since its row changed
    parts: list[TokenPart] = field(default_factory=list)


class Database:
    """One connection, used by one thread at a time. After an error the next call connects anew."""

    def __init__(self, place: str | Path) -> None:
        """`place`: the URL of a PostgreSQL database, or a folder for a SQLite file, which gets the owner's rights only.

        Raises StoreError.
        """
        self._url = place if isinstance(place, str) else ""
        self._folder = None if isinstance(place, str) else place
        self._connection: Any = None
        self.now = _NOW[bool(self._url)]
        with self.transaction(is_written=True):
            self._migrate()

    # -- one answer -------------------------------------------------------------------------------------------------

    def find(self, answer_id: str) -> Answer | None:
        with self.transaction():
            row = self.do(f"SELECT {_COLUMNS} FROM answers WHERE id = :id", id=answer_id).fetchone()
        return _answer(row) if row else None

    def find_history(self, answer_id: str, owner: str, most: int) -> list[Answer]:
        """The answer and those before it in its conversation, oldest first. One that is not the owner's ends it."""
        found: list[Answer] = []
        with self.transaction():
            while answer_id and len(found) < most:
                sql = f"SELECT {_COLUMNS} FROM answers WHERE id = :id AND owner = :owner"
                row = self.do(sql, id=answer_id, owner=owner).fetchone()
                if row is None:
                    break
                found.append(_answer(row))
                answer_id = found[-1].previous
        return found[::-1]

    def find_tokens(self, answer_id: str, choice: int = -1, begin: int = 0) -> list[TokenPart]:
        """Parts in order: all, or those of a choice from the one on that has its token `begin`, or is the last.

        A part that was there may have grown since, where its gateway has written it once more.
        """
        with self.transaction():
            rows = self.do(
                "SELECT choice, first, ids, logprobs, finish FROM tokens WHERE answer = :id AND (:choice < 0 OR"
                " (choice = :choice AND first >= (SELECT max(first) FROM tokens WHERE answer = :id"
                " AND choice = :choice AND first <= :begin))) ORDER BY choice, first",
                id=answer_id, choice=choice, begin=begin,
            ).fetchall()  # fmt: skip
        return [TokenPart(*map(_plain, row)) for row in rows]

    def find_new(self, wanted: Iterable[tuple[str, int, int]]) -> list[tuple[list[TokenPart], Status | None, bytes]]:
        """For each answer, choice and token: the choice's parts as `find_tokens` gives them, the answer's status (None:
        it is gone), and if it is over the whole answer: then the parts are all there are."""
        sql = f"SELECT status, CASE WHEN {_OPEN} THEN :none ELSE result END FROM answers WHERE id = :id"
        found: list[tuple[list[TokenPart], Status | None, bytes]] = []
        for answer_id, choice, begin in wanted:
            with self.transaction():
                row = self.do(sql, id=answer_id, none=b"").fetchone()
            parts = self.find_tokens(answer_id, choice, begin)  # after the status: none are added once it is over
            found.append((parts, row[0], _plain(row[1])) if row else (parts, None, b""))
        return found

    def list_own(
        self,
        owner: str,
        kind: str,
        after: str,
        most: int,
        *,
        model: str = "",
        labels: Mapping[str, str] = MappingProxyType({}),
        is_newest_first: bool = False,
        max_bytes: int,
    ) -> tuple[list[Answer], bool] | None:
        """Completed answers behind the one with the id `after`, and whether there are more.

        `labels`: that they have. `max_bytes`: of all results, but for the first. None: there is no answer `after`.
        """
        where, behind = "owner = :owner AND kind = :kind AND status = 'completed'", "<" if is_newest_first else ">"
        place: dict[str, object] = {}
        with self.transaction():
            if after:
                sql = "SELECT created_s FROM answers WHERE id = :id AND owner = :owner AND kind = :kind"
                if (row := self.do(sql, id=after, owner=owner, kind=kind).fetchone()) is None:
                    return None
                where += f" AND (created_s {behind} :at_s OR (created_s = :at_s AND id {behind} :after))"
                place = {"at_s": row[0], "after": after}
            if model:
                where, place = f"{where} AND model = :model", place | {"model": model}
            order = "created_s DESC, id DESC" if is_newest_first else "created_s, id"
            order += "" if labels else f" LIMIT {most + 1}"
            sql = f"SELECT id, labels, length(result) FROM answers WHERE {where} ORDER BY {order}"
            found, num_bytes, has_more = list[str](), 0, False
            for answer_id, given, size in self.do(sql, owner=owner, kind=kind, **place):
                if labels and not labels.items() <= json.loads(given).items():
                    continue
                num_bytes += size
                if has_more := len(found) == most or (bool(found) and num_bytes > max_bytes):
                    break
                found.append(answer_id)
            rows = [self.do(f"SELECT {_COLUMNS} FROM answers WHERE id = :id", id=one).fetchone() for one in found]
        return [_answer(row) for row in rows if row], has_more

    def set_labels(self, answer_id: str, labels: str) -> None:
        with self.transaction(is_written=True):
            self.do("UPDATE answers SET labels = :labels WHERE id = :id", id=answer_id, labels=labels)

    def ask_cancel(self, answer_id: str) -> None:
        """Asks to cancel an answer; the gateway that works on it will see that."""
        with self.transaction(is_written=True):
            self.do(f"UPDATE answers SET wants_cancel = 1 WHERE id = :id AND {_OPEN}", id=answer_id)

    def delete(self, answer_id: str) -> None:
        """Deletes an answer; a gateway that works on it finds that it is gone."""
        with self.transaction(is_written=True):
            self._delete([answer_id])

    # -- what a gateway works on ------------------------------------------------------------------------------------

    def write(self, changes: Sequence[Change], gateway: str, lease_s: float) -> set[str]:
        """Writes all changes or none; a repeat changes nothing. Returns ids of answers that are not this gateway's now:
        nothing is written there."""
        with self.transaction(is_written=True), self._pipeline():
            for change in changes:
                if change.is_new:
                    answer = change.answer
                    new = {name: getattr(answer, name) for name in Answer.__slots__} | {"status": RUNNING[0]}
                    size = len(answer.body) + len(answer.asked)
                    self.do(
                        f"INSERT INTO answers ({_COLUMNS}, gateway, lease_until, wants_cancel, num_bytes) VALUES"
                        f" ({', '.join(f':{name}' for name in new)}, :gateway, {self.now} + :lease_s, 0, :size)"
                        " ON CONFLICT DO NOTHING",
                        **new, gateway=gateway, lease_s=lease_s, size=size,
                    )  # fmt: skip
            sql = f"SELECT id FROM answers WHERE gateway = :gateway AND {_OPEN}{' FOR UPDATE' if self._url else ''}"
            own = {row[0] for row in self.do(sql, gateway=gateway).fetchall()}  # until the end of the transaction
            for change in changes:
                answer = change.answer
                if answer.id not in own:
                    continue
                if change.has_changed:
                    self.do(
                        "UPDATE answers SET status = :status, result = :result, computes = :computes,"
                        " num_bytes = num_bytes + :size WHERE id = :id",
                        id=answer.id, status=answer.status, result=answer.result, computes=answer.computes,
                        size=change.num_bytes,
                    )  # fmt: skip
                for part in change.parts:
                    self.do(
                        "INSERT INTO tokens (answer, choice, first, ids, logprobs, finish)"
                        " VALUES (:answer, :choice, :first, :ids, :logprobs, :finish)"
                        " ON CONFLICT (answer, choice, first) DO UPDATE"
                        " SET ids = excluded.ids, logprobs = excluded.logprobs, finish = excluded.finish",
                        answer=answer.id, **{name: getattr(part, name) for name in TokenPart.__slots__},
                    )  # fmt: skip
        return {change.answer.id for change in changes} - own

    def renew(self, gateway: str, lease_s: float, ids: Sequence[str]) -> tuple[set[str], set[str], list[str]]:
        """Keep those answers that the gateway works on: leases of its others end.

        Returns ids of what it has of them, ids of what is to be cancelled, and the other gateways that were seen within
        `lease_s`.
        """
        with self.transaction(is_written=True), self._pipeline():
            renewed = [
                self.do(
                    f"UPDATE answers SET lease_until = {self.now} + :lease_s WHERE id = :id AND gateway = :gateway"
                    f" AND {_OPEN} RETURNING id, wants_cancel",
                    id=answer_id, gateway=gateway, lease_s=lease_s,
                )
                for answer_id in ids
            ]  # fmt: skip
            rows = [row for cursor in renewed for row in cursor.fetchall()]
            self.do(
                f"INSERT INTO gateways (id, seen_s) VALUES (:gateway, {self.now})"
                " ON CONFLICT (id) DO UPDATE SET seen_s = excluded.seen_s",
                gateway=gateway,
            )
            self.do(f"DELETE FROM gateways WHERE seen_s < {self.now} - :old_s", old_s=lease_s)
            others = self.do("SELECT id FROM gateways WHERE id <> :gateway", gateway=gateway).fetchall()
        return {row[0] for row in rows}, {row[0] for row in rows if row[1]}, [row[0] for row in others]

    def claim(self, gateway: str, lease_s: float, most: int) -> list[Answer]:
        """Take answers whose lease has ended, oldest first: another gateway cannot get them, too."""
        taken: list[Answer] = []
        num_bytes = "(SELECT CAST(coalesce(sum(length(ids)), 0) AS BIGINT) FROM tokens WHERE answer = answers.id)"
        is_dead = "gateway <> '' AND gateway NOT IN (SELECT id FROM gateways WHERE seen_s >= {now} - :lease_s)"
        with self.transaction(is_written=True):
            rows = self.do(
                f"SELECT {_COLUMNS}, gateway, {is_dead.format(now=self.now)}, taken_bytes, {num_bytes} FROM answers"
                f" WHERE {_OPEN} AND lease_until < {self.now} ORDER BY created_s LIMIT :most",
                most=most, lease_s=lease_s,
            ).fetchall()  # fmt: skip
            for *row, before, has_died, bytes_then, bytes_now in rows:
                answer = _answer(row)
                answer.num_deaths = (answer.num_deaths if bytes_then == bytes_now else 0) + bool(has_died)
                changed = self.do(
                    f"UPDATE answers SET gateway = :gateway, lease_until = {self.now} + :lease_s,"
                    " num_deaths = :num_deaths, taken_bytes = :num_bytes WHERE id = :id"
                    f" AND gateway = :before AND lease_until < {self.now} AND {_OPEN}",
                    id=answer.id, gateway=gateway, before=before, lease_s=lease_s, num_deaths=answer.num_deaths,
                    num_bytes=bytes_now,
                )  # fmt: skip
                if changed.rowcount:
                    taken.append(answer)
        return taken

    def release(self, gateway: str, ids: Sequence[str]) -> None:
        """Any other gateway may take these answers of this one at once."""
        with self.transaction(is_written=True):
            for answer_id in ids:
                where = f"WHERE id = :id AND gateway = :gateway AND {_OPEN}"
                self.do(f"UPDATE answers SET lease_until = 0, gateway = '' {where}", id=answer_id, gateway=gateway)

    def clean(self, ttl_s: float, max_bytes: int, most: int = 500) -> tuple[int, int]:
        """Delete up to `most` answers that are over: those older than `ttl_s`; then, if all have more than `max_bytes`,
        the oldest of the owner that has most. Returns how many, and the bytes that are left."""
        with self.transaction(is_written=True):
            sql = f"SELECT id FROM answers WHERE NOT ({_OPEN}) AND created_s < {self.now} - :ttl_s LIMIT :most"
            gone = [row[0] for row in self.do(sql, ttl_s=ttl_s, most=most).fetchall()]
            self._delete(gone)
            sums = "SELECT sum(num_bytes), owner FROM answers GROUP BY owner ORDER BY 1 DESC"
            totals = [(int(row[0]), row[1]) for row in self.do(sums).fetchall()]
            left = sum(num_bytes for num_bytes, _ in totals)
            if left > max_bytes and not gone:
                where = f"WHERE owner = :owner AND NOT ({_OPEN})"
                sql = f"SELECT id, num_bytes FROM answers {where} ORDER BY created_s LIMIT :most"
                for answer_id, num_bytes in self.do(sql, owner=totals[0][1], most=most).fetchall():
                    if left > max_bytes:
                        gone.append(answer_id)
                        left -= int(num_bytes)
                self._delete(gone)
        return len(gone), left

    def close(self) -> None:
        with suppress(Exception):
            self._connection.close()
        self._connection = None

    def _delete(self, ids: Sequence[str]) -> None:
        for answer_id in ids:
            self.do("DELETE FROM answers WHERE id = :id", id=answer_id)  # first: its owner then adds no tokens
            self.do("DELETE FROM tokens WHERE answer = :id", id=answer_id)

    # -- either database --------------------------------------------------------------------------------------------

    def do(self, sql: str, **values: object) -> Any:
        """Returns the cursor."""
        if self._url:
            return self._connection.execute(_VALUE.sub(r"%(\1)s", sql), values)
        return self._connection.execute(sql, values)

    @contextmanager
    def transaction(self, *, is_written: bool = False) -> Iterator[None]:
        """Runs the statements of the block, all of which count or none. Raises StoreError."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.execute("BEGIN" if self._url or not is_written else "BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(*_errors()):  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                raise
        except _errors() as error:
            self.close()
            raise StoreError(str(error).strip()) from error

    def _pipeline(self) -> AbstractContextManager[Any]:
        """Sends the statements of the block without waiting for each one's result."""
        return self._connection.pipeline() if self._url else nullcontext()

    def _connect(self) -> Any:
        if self._folder is not None:
            _keep_private(self._folder)
            connection = sqlite3.connect(
                self._folder / FILE, timeout=CALL_S, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
            return connection
        import psycopg  # an extra, which a folder does not need

        milliseconds = int(CALL_S * 1000)
        options: Mapping[str, Any] = {
            "connect_timeout": int(CALL_S),
            "tcp_user_timeout": milliseconds,
            "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
            "application_name": "baton",
            "keepalives": 1,
            "keepalives_idle": 5,
            "keepalives_interval": 1,
            "keepalives_count": 3,
        }
        return psycopg.connect(self._url, autocommit=True, **options)

    def _migrate(self) -> None:
        if self._url:  # gateways may start together
            self.do("SELECT pg_advisory_xact_lock(7302531)")
        self.do("CREATE TABLE IF NOT EXISTS state_version (version INTEGER NOT NULL)")
        row = self.do("SELECT version FROM state_version").fetchone()
        version = row[0] if row else 0
        if version > len(_MIGRATIONS):
            raise NewerStoreError(
                f"the store of answers has version {version}, made by a newer gateway: use another place"
            )
        for statements in _MIGRATIONS[version:]:
            for sql in statements:
                self.do(sql.replace("BLOB", "BYTEA") if self._url else sql)
        self.do("DELETE FROM state_version")
        self.do("INSERT INTO state_version (version) VALUES (:version)", version=len(_MIGRATIONS))


def _errors() -> tuple[type[Exception], ...]:
    """The exceptions of both databases."""
    with suppress(ImportError):
        import psycopg

        return sqlite3.Error, psycopg.Error, OSError
    return sqlite3.Error, OSError


def _keep_private(folder: Path) -> None:
    """Nobody else reads conversations. Raises OSError."""
    os.close(open_private(folder))
    file = folder / FILE
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


def _answer(row: Sequence[Any]) -> Answer:
    answer = Answer(*map(_plain, row))
    assert answer.status in get_args(Status)
    return answer
