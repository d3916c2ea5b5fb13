"""Records of files and batches: who may write a batch, who may take it, and what is deleted."""

import time
from pathlib import Path

from gateway.batches import records
from gateway.batches.objects import Batch, FileObject
from gateway.batches.records import KEPT_S, LONGER_S, Held, Record
from gateway.store.database import Database

LEASE_S, FOLDER = 60.0, "here"


def file(name: str, folder: str = FOLDER, ends_s: float = 2e9, num_bytes: int = 7) -> Record:
    value = FileObject(name, num_bytes, 1, int(ends_s), "x", "batch")
    return Record("owner", value, 1.0, folder, num_bytes=num_bytes)


def batch(name: str, made_s: float = 1.0, folder: str = FOLDER) -> Record:
    return Record("owner", Batch(name, "/v1", "input", int(time.time()), 2), made_s, folder, "out", "err")


def end_leases(database: Database) -> None:
    with database.transaction(is_written=True):
        database.do("UPDATE batch_records SET lease_until = 0")


def test_one_gateway_has_a_batch_and_only_that_one_writes_it(database: Database, place: str | Path) -> None:
    other = Database(place)
    records.add(database, [batch("b", 2.0), batch("a"), batch("there", folder="elsewhere")])
    (first, second) = records.claim(database, "g1", LEASE_S, FOLDER)
    assert (first.id, second.id) == ("a", "b") and records.claim(other, "g2", LEASE_S, FOLDER) == []
    end_leases(database)
    assert [one.id for one in records.claim(other, "g2", LEASE_S, FOLDER)] == ["a", "b"]
    first.value.status = "completed"
    assert not records.update(database, first, "g1", [file("out")])
    assert records.find(database, "FileObject", "out", "owner") is None
    assert records.renew(database, "g1", LEASE_S, {"a": first}) == {}
    assert records.renew(other, "g2", LEASE_S, {"a": None, "b": second}) == {"a": 0, "b": 0}
    assert records.update(other, first, "g2", [file("out")])
    found = records.find(database, "Batch", "a", "owner")
    assert found == first and records.find(database, "FileObject", "out", "owner") == file("out")
    records.release(other, "g2", ["a", "b"])
    assert [one.id for one in records.claim(database, "g1", LEASE_S, FOLDER)] == ["b"]
    other.close()


def test_a_cancel_reaches_the_gateway_that_has_it(database: Database) -> None:
    records.add(database, [batch("a")])
    records.claim(database, "g1", LEASE_S, FOLDER)
    records.ask_cancel(database, "a", 123)
    records.ask_cancel(database, "a", 456)
    found = records.find(database, "Batch", "a", "owner")
    assert found is not None and isinstance(found.value, Batch)
    assert (found.value.status, found.value.cancelling_at) == ("cancelling", 123)
    assert records.renew(database, "g1", LEASE_S, {"a": batch("a")}) == {"a": 123}
    assert [one.id for one in records.list_own(database, "Batch", "owner")] == ["a"]
    assert records.find(database, "Batch", "a", "other") is None and records.list_own(database, "Batch", "other") == []


def test_counts(database: Database) -> None:
    running = batch("a")
    running.num_bytes = 5
    records.add(database, [file("f"), running])
    assert records.count(database) == [Held("owner", 2, 1, 12)]
    assert records.find_names(database, FOLDER) >= {"f", "a", "out", "err"}


def test_what_is_old_goes_but_not_what_an_open_batch_reads(database: Database) -> None:
    now = time.time()
    old = [file("input", ends_s=1), file("old", ends_s=now - 1), file("new", ends_s=now + 1)]
    lost = [file("lost", "elsewhere", now - LONGER_S - 9), file("theirs", "elsewhere", now - 1)]
    records.add(database, [batch("a"), *old, *lost])
    assert records.delete_file(database, "input") == "a"
    assert sorted(records.expire(database, FOLDER, now)) == ["lost", "old"]
    with database.transaction(is_written=True):
        database.do("UPDATE batch_records SET is_open = 0 WHERE id = 'a'")
    assert records.expire(database, FOLDER, now) == ["input"]
    assert sorted(records.expire(database, FOLDER, now + KEPT_S + 9)) == ["a", "new", "theirs"]
    records.add(database, [file("f")])
    assert records.delete_file(database, "f") is None and records.count(database) == []


def test_batches_of_another_folder_that_no_gateway_runs_are_named(database: Database) -> None:
    records.add(database, [batch("mine"), batch("theirs", folder="elsewhere"), batch("new", time.time(), "elsewhere")])
    assert records.find_stranded(database, FOLDER, 10.0) == ["theirs"]
    records.claim(database, "g2", LEASE_S, "elsewhere")
    assert records.find_stranded(database, FOLDER, 10.0) == []
