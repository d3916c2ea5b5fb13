"""Stored answers in the database: who may write them, and what is left of them."""

from pathlib import Path
from typing import Any

import pytest

from gateway.store.database import Answer, Change, Database, StoreError, TokenPart

LEASE_S = 60.0


def answer(name: str = "a", previous: str = "", created_s: int = 1_000) -> Answer:
    return Answer(name, "responses", "owner", "m", previous, created_s, b"asked", b"{}", "in_progress", b"{}")


def part(first: int, ids: bytes, finish: str = "") -> TokenPart:
    return TokenPart(0, first, ids, b"", finish)


def test_round_trip_and_only_the_owner_writes(database: Database, place: str | Path) -> None:
    other = Database(place)
    assert database.write([Change(answer(), True, parts=[part(0, b"aaaa")])], "g1", LEASE_S) == set()
    assert other.write([Change(answer(), False, parts=[part(1, b"bbbb")])], "g2", LEASE_S) == {"a"}
    found = other.find("a")
    assert found == answer()
    assert other.find_tokens("a") == [part(0, b"aaaa")]
    other.close()


def test_written_once_more(database: Database) -> None:
    """A call whose reply was lost is repeated, with what has come since."""
    database.write([Change(answer(), True, parts=[part(0, b"aaaa")])], "g1", LEASE_S)
    database.write([Change(answer(), True, parts=[part(0, b"aaaabbbb", "stop")])], "g1", LEASE_S)
    assert database.find_tokens("a") == [part(0, b"aaaabbbb", "stop")]
    assert database.find_tokens("a", 0, 1) == database.find_tokens("a")  # a reader may have had one token of it
    database.write([Change(answer(), False, parts=[part(2, b"cccc")])], "g1", LEASE_S)
    assert database.find_tokens("a", 0, 2) == database.find_tokens("a", 0, 9) == [part(2, b"cccc")]
    assert database.find_tokens("a", 1) == []


def test_taken_over_when_the_lease_ends(database: Database, place: str | Path) -> None:
    database.write([Change(answer(), True)], "g1", LEASE_S)
    other = Database(place)
    assert other.claim("g2", LEASE_S, 9) == []
    database.release("g1", ["a"])
    assert [one.id for one in other.claim("g2", LEASE_S, 9)] == ["a"]
    assert database.claim("g3", LEASE_S, 9) == []
    assert database.write([Change(answer(), False)], "g1", LEASE_S) == {"a"}
    assert database.renew("g1", LEASE_S, ["a"])[:2] == (set(), set())
    other.ask_cancel("a")
    assert other.renew("g2", LEASE_S, ["a"]) == ({"a"}, {"a"}, ["g1"])
    assert other.renew("g2", LEASE_S, []) == (set(), set(), ["g1"])
    other.close()


def test_deaths_without_progress_are_counted(database: Database) -> None:
    """Neither new tokens between them, nor leases that ended otherwise, count."""

    def claim(gateway: str) -> int:
        with database.transaction(is_written=True):
            database.do("UPDATE answers SET lease_until = 0")
        (one,) = database.claim(gateway, LEASE_S, 9)
        return one.num_deaths

    database.write([Change(answer(), True, parts=[part(0, b"aaaa")])], "g1", LEASE_S)
    assert [claim("g2"), claim("g3"), claim("g4")] == [1, 2, 3]
    database.write([Change(answer(), False, parts=[part(0, b"aaaabbbb")])], "g4", LEASE_S)
    assert [claim("g5"), claim("g6")] == [1, 2]
    database.renew("g6", LEASE_S, [])
    assert claim("g7") == 2  # g6 is alive
    database.release("g7", ["a"])
    assert claim("g8") == 2


def test_over_is_over(database: Database) -> None:
    """An answer that has ended is not written to, renewed or taken."""
    ended = answer()
    ended.status, ended.result = "completed", b"whole"
    database.write([Change(ended, True, parts=[part(0, b"aaaa", "stop")])], "g1", LEASE_S)
    database.release("g1", ["a"])
    assert database.claim("g2", LEASE_S, 9) == []
    assert database.write([Change(answer(), False, parts=[part(1, b"bbbb")])], "g1", LEASE_S) == {"a"}
    assert database.find("a") == ended


def test_conversation(database: Database) -> None:
    for name, previous in (("a", ""), ("b", "a"), ("c", "b")):
        database.write([Change(answer(name, previous), True)], "g1", LEASE_S)
    assert [one.id for one in database.find_history("c", "owner", 9)] == ["a", "b", "c"]
    assert [one.id for one in database.find_history("c", "owner", 2)] == ["b", "c"]
    assert database.find_history("c", "another", 9) == []
    database.delete("a")
    assert [one.id for one in database.find_history("c", "owner", 9)] == ["b", "c"]
    assert database.find("a") is None


def test_listed(database: Database) -> None:
    """Completed ones of an owner and an API, in either order, page by page, by model and metadata, within bytes."""
    for at, name in enumerate("abcdef"):
        one = answer(name, created_s=1_000 + at // 2)
        one.kind, one.status, one.result, one.labels = (
            "chat",
            "completed",
            bytes(10),
            f'{{"at": "{at}", "odd": "{at % 2}"}}',
        )
        one.owner, one.model = "another" if name == "f" else "owner", "n" if name == "b" else "m"
        database.write([Change(one, True)], "g1", LEASE_S)
    database.write([Change(answer("g"), True)], "g1", LEASE_S)

    def names(after: str = "", most: int = 9, max_bytes: int = 1_000, **wanted: Any) -> tuple[str, bool] | None:
        found = database.list_own("owner", "chat", after, most, max_bytes=max_bytes, **wanted)
        return None if found is None else ("".join(one.id for one in found[0]), found[1])

    assert names() == ("abcde", False)
    assert names(is_newest_first=True) == ("edcba", False)
    assert (names(most=2), names("b", 2), names("d", 2)) == (("ab", True), ("cd", True), ("e", False))
    assert names("d", 2, is_newest_first=True) == ("cb", True)
    assert names(model="m") == ("acde", False)
    assert names(labels={"odd": "1"}) == ("bd", False)
    assert names(labels={"odd": "1"}, most=1) == ("b", True)
    assert (names(max_bytes=25), names(max_bytes=5)) == (("ab", True), ("a", True))
    assert names("f") is None and names("g") is None
    database.set_labels("a", '{"odd": "1"}')
    assert names(labels={"odd": "1"}) == ("abd", False)


def test_cleaned(database: Database) -> None:
    """What is over and old goes, then the oldest, until the rest fits; what is not over stays."""
    for at, name in enumerate("abcd"):
        one = answer(name, created_s=2_000_000_000 + at)
        one.status = "in_progress" if name == "b" else "completed"
        database.write([Change(one, True, num_bytes=100, parts=[part(0, bytes(100), "")])], "g1", LEASE_S)
    size = 107
    assert database.clean(1e9, 4 * size) == (0, 4 * size)
    assert database.clean(1e9, 2 * size) == (2, 2 * size)
    assert [name for name in "abcd" if database.find(name)] == ["b", "d"]
    assert database.find_tokens("a") == []
    assert database.clean(-2e9, 4 * size) == (1, size)
    assert database.clean(-2e9, 4 * size) == (0, size)


def test_whoever_stores_most_loses_first(database: Database) -> None:
    for at, (name, owner) in enumerate((("a", "small"), ("b", "large"), ("c", "large"), ("d", "large"))):
        one = answer(name, created_s=2_000_000_000 + at)
        one.owner, one.status = owner, "completed"
        database.write([Change(one, True, num_bytes=100)], "g1", LEASE_S)
    assert database.clean(1e9, 3 * 107, 1) == (1, 3 * 107)
    assert [name for name in "abcd" if database.find(name)] == ["a", "c", "d"]


def test_files_of_others_and_of_newer_gateways(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    database = Database(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "answers.sqlite").stat().st_mode & 0o777 == 0o600
    with database.transaction(is_written=True):
        database.do("UPDATE state_version SET version = 999")
    database.close()
    with pytest.raises(StoreError, match="newer gateway"):
        Database(folder)


def test_full_disk(tmp_path: Path) -> None:
    """What does not fit is refused as a whole; what was there stays, and there may be room again."""
    database = Database(tmp_path / "state")
    database.write([Change(answer(), True, parts=[part(0, b"aaaa")])], "g1", LEASE_S)
    database._connection.execute("PRAGMA max_page_count = 20")
    large = answer("b")
    large.body = bytes(1 << 20)
    changes = [Change(answer(), False, parts=[part(1, b"bbbb")]), Change(large, True)]
    with pytest.raises(StoreError, match="full"):
        database.write(changes, "g1", LEASE_S)
    assert database.find_tokens("a") == [part(0, b"aaaa")]
    assert database.write(changes, "g1", LEASE_S) == set()
    assert database.find_tokens("a") == [part(0, b"aaaa"), part(1, b"bbbb")]
    database.close()
