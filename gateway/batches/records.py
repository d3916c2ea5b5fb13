"""Records of files and batches in a store's database, and which gateway runs a batch. Every function blocks.

A batch that is not over is run by one gateway until its lease ends; nobody but that one changes the record.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from gateway.batches.objects import OVER, Batch, FileObject
from gateway.store.database import Database

KEPT_S = 30 * 86_400  # files and batches, from when they were made
LONGER_S = 7 * 86_400  # a record whose folder no gateway has any more
MOST_TAKEN = 100  # batches at once


@dataclass(slots=True)
class Record:
    """A row of `batch_records`."""

    owner: str  # Key.owner of the API key that made it
    value: FileObject | Batch
    made_s: float  # orders those of one second
    folder: str  # name of the folder that has the content
    output_id: str = ""  # of a batch: its files, which clients learn when it is over
    error_id: str = ""
    num_bytes: int = 0  # of a file, or of what a batch that is not over has written

    @property
    def id(self) -> str:
        return self.value.id

    @property
    def is_open(self) -> bool:
        """Whether it is a batch that is not over."""
        return isinstance(self.value, Batch) and self.value.status not in OVER


class Held(NamedTuple):
    """The number and size of the records that one owner has."""

    owner: str
    num_records: int
    num_open: int  # batches
    num_bytes: int


_COLUMNS = "value, cancelled_s, owner, made_s, folder, output_id, error_id, num_bytes"


def _record(row: Sequence[Any]) -> Record:
    value = msgspec.json.decode(row[0], type=FileObject | Batch)
    if row[1] and isinstance(value, Batch):
        value.cancel(row[1])
    return Record(row[2], value, *row[3:])


def _fields(record: Record) -> dict[str, object]:
    value = record.value
    ends_s = value.expires_at if isinstance(value, FileObject) else value.created_at + KEPT_S
    return {
        "id": record.id,
        "kind": type(value).__name__,
        "value": msgspec.json.encode(value).decode(),
        "ends_s": ends_s,
        "input_id": value.input_file_id if isinstance(value, Batch) else "",
        "is_open": int(record.is_open),
        **{name: getattr(record, name) for name in Record.__slots__ if name != "value"},
    }


def find(database: Database, kind: str, record_id: str, owner: str) -> Record | None:
    sql = f"SELECT {_COLUMNS} FROM batch_records WHERE id = :id AND kind = :kind AND owner = :owner"
    with database.transaction():
        row = database.do(sql, id=record_id, kind=kind, owner=owner).fetchone()
    return _record(row) if row else None


def list_own(database: Database, kind: str, owner: str) -> list[Record]:
    """The owner's records of a kind, newest first."""
    sql = f"SELECT {_COLUMNS} FROM batch_records WHERE kind = :kind AND owner = :owner ORDER BY made_s DESC"
    with database.transaction():
        return [_record(row) for row in database.do(sql, kind=kind, owner=owner).fetchall()]


def count(database: Database) -> list[Held]:
    sql = "SELECT owner, count(*), sum(is_open), sum(num_bytes) FROM batch_records GROUP BY owner"
    with database.transaction():
        return [Held(row[0], *map(int, row[1:])) for row in database.do(sql).fetchall()]


def find_names(database: Database, folder: str) -> set[str]:
    """The names of the files in the folder that a record needs."""
    sql = "SELECT id, output_id, error_id FROM batch_records WHERE folder = :folder"
    with database.transaction():
        return {name for row in database.do(sql, folder=folder).fetchall() for name in row}


def add(database: Database, records: Sequence[Record]) -> None:
    """Adds records; those that are there already stay as they are."""
    with database.transaction(is_written=True):
        for record in records:
            _add(database, record)


def _add(database: Database, record: Record) -> None:
    fields = _fields(record)
    database.do(
        f"INSERT INTO batch_records ({', '.join(fields)}, cancelled_s, gateway, lease_until)"
        f" VALUES ({', '.join(f':{name}' for name in fields)}, 0, '', 0) ON CONFLICT DO NOTHING",
        **fields,
    )


def update(database: Database, record: Record, gateway: str, files: Sequence[Record] = ()) -> bool:
    """Write a batch, and add its `files`. False: another gateway has it by now, and nothing has changed."""
    with database.transaction(is_written=True):
        changed = database.do(
            "UPDATE batch_records SET value = :value, is_open = :is_open, num_bytes = :num_bytes,"
            " output_id = :output_id, error_id = :error_id WHERE id = :id AND gateway = :gateway",
            **_fields(record), gateway=gateway,
        )  # fmt: skip
        for file in files if changed.rowcount else ():
            _add(database, file)
    return bool(changed.rowcount)


def ask_cancel(database: Database, record_id: str, now_s: int) -> None:
    """Asks to cancel a batch; the gateway that runs it will see that."""
    sql = "UPDATE batch_records SET cancelled_s = :now_s WHERE id = :id AND is_open = 1 AND cancelled_s = 0"
    with database.transaction(is_written=True):
        database.do(sql, id=record_id, now_s=now_s)


def renew(database: Database, gateway: str, lease_s: float, held: Mapping[str, Record | None]) -> dict[str, int]:
    """Renew leases, write the records given. Returns those still held |-> when to cancel them was asked, or 0."""
    own: dict[str, int] = {}
    with database.transaction(is_written=bool(held)):
        for record_id, record in held.items():
            change = ", value = :value, num_bytes = :num_bytes" if record else ""
            row = database.do(
                f"UPDATE batch_records SET lease_until = {database.now} + :lease_s{change}"
                " WHERE id = :id AND gateway = :gateway RETURNING cancelled_s",
                **(_fields(record) if record else {}) | {"id": record_id}, gateway=gateway, lease_s=lease_s,
            ).fetchone()  # fmt: skip
            if row:
                own[record_id] = row[0]
    return own


def claim(database: Database, gateway: str, lease_s: float, folder: str) -> list[Record]:
    """Take batches of the folder whose lease has ended, oldest first: another gateway cannot get them, too."""
    is_free = f"is_open = 1 AND folder = :folder AND lease_until < {database.now}"
    with database.transaction():
        sql = f"SELECT id FROM batch_records WHERE {is_free} ORDER BY made_s LIMIT {MOST_TAKEN}"
        ids = [row[0] for row in database.do(sql, folder=folder).fetchall()]
    taken: list[Record] = []
    if ids:
        with database.transaction(is_written=True):
            for record_id in ids:
                row = database.do(
                    f"UPDATE batch_records SET gateway = :gateway, lease_until = {database.now} + :lease_s"
                    f" WHERE id = :id AND {is_free} RETURNING {_COLUMNS}",
                    id=record_id, gateway=gateway, lease_s=lease_s, folder=folder,
                ).fetchone()  # fmt: skip
                taken += [_record(row)] if row else []
    return taken


def release_all(database: Database) -> None:
    """Frees all batches: no gateway runs any of them."""
    with database.transaction(is_written=True):
        database.do("UPDATE batch_records SET gateway = '', lease_until = 0 WHERE is_open = 1")


def release(database: Database, gateway: str, ids: Collection[str]) -> None:
    """Frees these batches of this gateway: any other may take them at once."""
    with database.transaction(is_written=True):
        for record_id in ids:
            sql = "UPDATE batch_records SET gateway = '', lease_until = 0 WHERE id = :id AND gateway = :gateway"
            database.do(sql, id=record_id, gateway=gateway)


def find_stranded(database: Database, folder: str, waiting_s: float) -> list[str]:
    """Batches of other folders that no gateway runs."""
    sql = (
        "SELECT id FROM batch_records WHERE is_open = 1 AND folder <> :folder"
        f" AND lease_until < {database.now} - :waiting_s AND made_s < {database.now} - :waiting_s"
    )
    with database.transaction():
        return [row[0] for row in database.do(sql, folder=folder, waiting_s=waiting_s).fetchall()]


def delete_file(database: Database, file_id: str) -> str | None:
    """Returns the id of a batch that is not over and reads it: then it stays."""
    with database.transaction(is_written=True):
        sql = "SELECT id FROM batch_records WHERE input_id = :id AND is_open = 1"
        reader = database.do(sql, id=file_id).fetchone()
        if reader is None:
            database.do("DELETE FROM batch_records WHERE id = :id", id=file_id)
    return reader[0] if reader else None


def expire(database: Database, folder: str, now_s: float) -> list[str]:
    """Delete what is old, and not of a batch that is not over. Returns the ids of what the folder had."""
    with database.transaction(is_written=True):
        rows = database.do(
            "DELETE FROM batch_records WHERE ends_s < :now_s AND is_open = 0"
            " AND (folder = :folder OR ends_s < :now_s - :longer_s)"
            " AND id NOT IN (SELECT input_id FROM batch_records WHERE is_open = 1) RETURNING id",
            now_s=now_s, folder=folder, longer_s=LONGER_S,
        ).fetchall()  # fmt: skip
    return [row[0] for row in rows]
