"""Files of pages: what was saved is what is read, and what is torn, changed, foreign or not there is a miss."""

import errno
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from engine.kv.pool import Pool
from kvtransfer import page_files
from kvtransfer.page_files import HEADER, LOCK, PageFiles, PageTiers, identify, needing_files, remove_unowned
from tests.support.combinations import combination
from tests.support.pool_process import build_pool
from wire.page_keys import SENT_KEY_BYTES, NamedPage
from wire.private_folders import IS_PRIVATE, UnsafeFolderError
from worker.tiers.key_log import KeyLog

KIND = identify("a model")
PAGES = 8


@pytest.fixture
def pool() -> Pool:
    pool = build_pool(PAGES)
    pool.store(range(PAGES), list(np.random.default_rng(0).integers(0, 256, (PAGES, pool.page_bytes), np.uint8)))
    return pool


def keys_of(pages: Sequence[int]) -> list[bytes]:
    return [bytes([page]) * 16 for page in pages]


def named(pool: Pool, pages: Sequence[int]) -> list[NamedPage]:
    keys = keys_of(pages)
    return [
        NamedPage(page, int(pool.generations[page]), key, page % 2 == 1) for page, key in zip(pages, keys, strict=True)
    ]


def open_tiers(pool: Pool, root: Path, max_bytes: int = 1 << 20, kind: bytes = KIND) -> PageTiers:
    return PageTiers(pool, [PageFiles(root, kind, max_bytes)])


def file_of(tiers: PageTiers, page: int) -> Path:
    return tiers.tiers[0].folder / keys_of([page])[0].hex()


def test_what_is_saved_is_read_also_after_a_restart_and_by_others(pool: Pool, tmp_path: Path) -> None:
    tiers = open_tiers(pool, tmp_path)
    assert tiers.save(named(pool, [0, 1, 2])) == 3
    assert tiers.save(named(pool, [0, 1, 2])) == 0  # they are there
    assert tiers.find(keys_of([0, 1, 2, 3])) == 3
    tiers.close()
    again, beside = open_tiers(pool, tmp_path), open_tiers(pool, tmp_path)
    assert beside.tiers[0].num_files == 0  # they are another's
    for reader in (again, beside):
        assert reader.find(keys_of([0, 1, 2, 3])) == 3
        assert reader.load(keys_of([0, 1, 2]), [5, 6, 7]) == [False, True, False]
        assert (pool.load([5, 6, 7]) == pool.load([0, 1, 2])).all()
        assert reader.load(keys_of([1, 3, 2]), [5, 6, 7]) == [True]  # until the first that is not there
    assert again.find(keys_of([4])) == 0
    beside.save(named(pool, [4]))
    assert again.find(keys_of([4])) == 1


def test_a_page_that_got_another_holder_is_not_saved(pool: Pool, tmp_path: Path) -> None:
    tiers, entries = open_tiers(pool, tmp_path), named(pool, [0, 1])
    pool.generations[0] += 1
    assert tiers.save(entries) == 1
    assert [tiers.has(key) for key in keys_of([0, 1])] == [False, True]


def damage(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """A torn, changed or foreign file, never the same."""
    at = rng.randrange(len(content))
    return rng.choice(
        [
            content[:at],
            content[:at] + bytes([content[at] ^ rng.randint(1, 255)]) + content[at + 1 :],
            content + bytes([at % 256]),
            content[:at] + bytes(len(content) - at) if any(content[at:]) else content[:at],
            other,
            content[: HEADER.size] + other[HEADER.size :],
        ]
    )


@pytest.mark.parametrize("count", [1000, combination(10_000)])
def test_torn_changed_and_foreign_files_are_misses(pool: Pool, tmp_path: Path, count: int) -> None:
    rng = random.Random(0)
    tiers = open_tiers(pool, tmp_path)
    tiers.save(named(pool, [0, 1]))
    good, other = file_of(tiers, 0).read_bytes(), file_of(tiers, 1).read_bytes()
    expected = pool.load([5])
    with capture_logs() as logs:
        for _ in range(count):
            file_of(tiers, 0).write_bytes(damage(good, rng, other))
            assert tiers.load(keys_of([0]), [5]) == []
    assert (pool.load([5]) == expected).all()
    assert len(logs) == 1 and logs[0]["log_level"] == "warning"
    assert not file_of(tiers, 0).exists() and tiers.tiers[0].num_bad == count
    file_of(tiers, 0).write_bytes(good)
    assert tiers.load(keys_of([0]), [5]) == [False]
    foreign = open_tiers(pool, tmp_path, kind=identify("another model"))
    assert foreign.find(keys_of([0])) == 0
    shutil.copy(file_of(tiers, 0), foreign.tiers[0].folder)
    assert foreign.load(keys_of([0]), [5]) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_where_nothing_can_be_written_there_is_one_warning(
    error: int, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, writev = open_tiers(pool, tmp_path), os.writev

    def fail_later(fd: int, buffers: Sequence[Any]) -> int:
        writev(fd, [bytes(buffers[0])])
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "writev", fail_later)
    with capture_logs() as logs:
        for page in range(PAGES):
            tiers.save(named(pool, [page]))
    assert len(logs) == 1 and os.strerror(error) in logs[0]["reason"]
    assert [path.name for path in tiers.tiers[0].folder.iterdir()] == [LOCK]
    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(page_files, "PAUSE_S", 0)
    tiers.tiers[0]._paused_until = 0
    assert tiers.save(named(pool, [0])) == 1 and tiers.has(keys_of([0])[0])


def test_the_least_recently_used_files_go_first_and_those_of_other_models_before(pool: Pool, tmp_path: Path) -> None:
    size = HEADER.size + pool.page_bytes
    old = open_tiers(pool, tmp_path, kind=identify("another model"))
    old.save(named(pool, [0, 1]))
    serving = open_tiers(pool, tmp_path, kind=identify("a third model"))
    serving.save(named(pool, [0]))
    old.close()
    tiers = open_tiers(pool, tmp_path, max_bytes=4 * size)
    for page in range(3):
        tiers.save(named(pool, [page]))
    assert not old.tiers[0].folder.exists() and file_of(serving, 0).exists()
    tiers.touch(keys_of([0, 1]))  # page 0 is the youngest now
    for page in (3, 4, 5):
        tiers.save(named(pool, [page]))
    assert [tiers.has(key) for key in keys_of(range(6))] == [True, False, False, True, True, True]
    assert tiers.tiers[0].num_bytes == 4 * size == 4 * file_of(tiers, 0).stat().st_size
    tiers.close()
    smaller = open_tiers(pool, tmp_path, max_bytes=2 * size)  # counts what it finds
    assert smaller.tiers[0].num_files == 2
    remove_unowned(tmp_path)
    assert file_of(smaller, 5).exists() and file_of(serving, 0).exists()
    smaller.close()
    with needing_files(tmp_path):  # a service whose model sleeps
        remove_unowned(tmp_path)
        with needing_files(tmp_path):
            pass  # another service, which ends
        assert file_of(smaller, 5).exists()
    assert not smaller.tiers[0].folder.exists() and file_of(serving, 0).exists()


def test_which_keys_have_files_is_reported_also_after_a_restart(pool: Pool, tmp_path: Path) -> None:
    size = HEADER.size + pool.page_bytes
    tiers, log = open_tiers(pool, tmp_path, max_bytes=2 * size), KeyLog()
    tiers.save(named(pool, [0]))
    tiers.report_to(log)
    tiers.save(named(pool, [1]))
    before = log.report(0)
    tiers.save(named(pool, [2]))  # in place of the oldest
    assert before.gained == [key[:SENT_KEY_BYTES] for key in keys_of([0, 1])]
    changed = log.report(before.number)
    assert (changed.gained, changed.lost) == tuple([key[:SENT_KEY_BYTES]] for key in keys_of([2, 0]))
    tiers.close()
    again, log = open_tiers(pool, tmp_path, max_bytes=2 * size), KeyLog()
    again.report_to(log)
    assert log.report(0).gained == [key[:SENT_KEY_BYTES] for key in keys_of([1, 2])]


def test_files_are_their_owners_only_and_remains_of_a_kill_go(pool: Pool, tmp_path: Path) -> None:
    tiers = open_tiers(pool, tmp_path / "kv")
    tiers.save(named(pool, [0]))
    folder = tiers.tiers[0].folder
    assert (file_of(tiers, 0).stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    (folder / "0123.new").write_bytes(b"half")
    tiers.close()
    again = open_tiers(pool, tmp_path / "kv")
    assert {path.name for path in again.tiers[0].folder.iterdir()} == {LOCK, file_of(again, 0).name}


def test_a_folder_of_another_user_is_refused(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_tiers(pool, tmp_path).close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnsafeFolderError, match=f"belongs to user {os.getuid()}"):
        open_tiers(pool, tmp_path)


def test_a_folder_on_disk_that_others_can_write_is_refused(pool: Pool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match=f"{disk} has mode 0777"):
        open_tiers(pool, disk)
    disk.chmod(0o1777)
    home = disk / KIND.hex()
    home.symlink_to(tmp_path)
    with pytest.raises(UnsafeFolderError, match=f"{home} is a link"):
        open_tiers(pool, disk)
    assert not (tmp_path / "0").exists()


def test_the_folder_in_memory_is_ours_or_nothing_is_read_written_or_removed(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user leaves it in /dev/shm: writable by all, or a link to a folder of ours."""
    elsewhere, shared = tmp_path / "elsewhere", tmp_path / "shm"
    tiers = open_tiers(pool, elsewhere)
    tiers.save(named(pool, [0]))
    tiers.close()
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(page_files, "host_folder", lambda: shared / "baton-kv")
    monkeypatch.setenv(IS_PRIVATE, "1")  # it says nothing of our own folder
    (shared / "baton-kv").symlink_to(elsewhere)
    with pytest.raises(UnsafeFolderError, match="baton-kv is a link"):
        open_tiers(pool, shared / "baton-kv")
    remove_unowned(shared / "baton-kv")
    assert file_of(tiers, 0).exists()
    (shared / "baton-kv").unlink()
    (shared / "baton-kv").mkdir()
    (shared / "baton-kv").chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="baton-kv has mode 0777"):
        open_tiers(pool, shared / "baton-kv")
    assert not list((shared / "baton-kv").iterdir())


def test_what_is_put_in_the_place_of_a_folder_or_file_is_not_used(pool: Pool, tmp_path: Path) -> None:
    tiers = open_tiers(pool, tmp_path / "kv")
    tiers.save(named(pool, [0, 1, 2]))
    path, private = file_of(tiers, 0), tmp_path / "private"
    private.write_bytes(b"a letter")
    file_of(tiers, 3).with_name(f"{file_of(tiers, 3).name}.new").symlink_to(private)
    tiers.save(named(pool, [3]))
    assert private.read_bytes() == b"a letter" and not file_of(tiers, 3).exists()
    file_of(tiers, 2).rename(tmp_path / "moved")
    file_of(tiers, 2).symlink_to(tmp_path / "moved")
    assert tiers.load(keys_of([2]), [5]) == []
    (tmp_path / "kv").rename(tmp_path / "away")
    path.parent.mkdir(parents=True)
    planted = (tmp_path / "away" / path.relative_to(tmp_path / "kv")).with_name(file_of(tiers, 1).name)
    shutil.copy(planted, path)
    assert tiers.load(keys_of([0]), [5]) == [False]
    assert (pool.load([5]) == pool.load([0])).all()
    tiers.save(named(pool, [4]))
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    tiers.close()
    again = open_tiers(pool, tmp_path / "away")
    assert not (again.tiers[0].folder / file_of(tiers, 2).name).is_symlink()
    assert again.find(keys_of([0, 1, 2])) == 2


def test_the_first_tier_that_has_a_page_is_read(pool: Pool, tmp_path: Path) -> None:
    fast, slow = (PageFiles(tmp_path / name, KIND, 1 << 20) for name in ("fast", "slow"))
    tiers = PageTiers(pool, [fast, slow])
    tiers.save(named(pool, [0, 1]))
    assert fast.num_files == slow.num_files == 2
    shutil.rmtree(fast.folder)
    assert tiers.load(keys_of([0, 1]), [5, 6]) == [False, True]
