"""Folders that other users cannot write: what is refused, what is followed, and what is made."""

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from wire.private_folders import IS_PRIVATE, UnsafeFolderError, open_guarded, open_private

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to other users")


@pytest.fixture(autouse=True)
def nothing_is_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(IS_PRIVATE, raising=False)


def make(path: Path, mode: int = 0o700, owner: int | None = None) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, -1)
    return path


def opened(path: Path) -> os.stat_result:
    fd = open_private(path)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "one" / "two" / "own"
    assert os.path.samestat(opened(path), path.stat())
    assert [mode_of(one) for one in (path, path.parent, path.parent.parent)] == [0o700] * 3
    path.chmod(0o755)  # nobody else could write there
    opened(path)
    assert mode_of(path) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
def test_a_folder_above_that_others_can_write_is_refused_unless_sticky(tmp_path: Path, mode: int) -> None:
    above = make(tmp_path / "above", mode)
    os.chown(above, -1, 12345 if os.geteuid() == 0 else -1)
    path = above / "between" / "own"
    if mode == 0o775 and os.geteuid():
        pytest.skip("this user's own group may write")
    with pytest.raises(UnsafeFolderError, match=f"{above} has mode 0{mode:o}, so another user could replace"):
        open_private(path)
    assert not path.parent.exists()
    above.chmod(mode | stat.S_ISVTX)
    assert stat.S_ISDIR(opened(path).st_mode)


@as_root
def test_folders_and_links_of_strangers_are_refused(tmp_path: Path) -> None:
    shared = make(tmp_path / "shared", 0o1777)
    make(shared / "theirs", 0o755, STRANGER)
    with pytest.raises(UnsafeFolderError, match=f"{shared}/theirs belongs to user {STRANGER}, so another user"):
        open_private(shared / "theirs" / "own")
    with pytest.raises(UnsafeFolderError, match=f"{shared}/theirs belongs to user {STRANGER}, who could write"):
        open_private(shared / "theirs")
    target = make(tmp_path / "private")
    (shared / "link").symlink_to(target)
    os.lchown(shared / "link", STRANGER, -1)
    with pytest.raises(UnsafeFolderError, match=f"{shared}/link is a link of user {STRANGER}"):
        open_private(shared / "link" / "own")
    assert not list(target.iterdir())


def test_links_above_lead_to_folders_that_are_checked_likewise(tmp_path: Path) -> None:
    target = make(tmp_path / "far" / "target")
    (tmp_path / "absolute").symlink_to(target)
    (tmp_path / "relative").symlink_to("far/../far/target")
    (tmp_path / "chained").symlink_to("absolute")
    for name in ("absolute", "relative", "chained"):
        assert os.path.samestat(opened(tmp_path / name / "own"), (target / "own").stat())
    target.parent.chmod(0o777)
    for name in ("absolute", "relative", "chained"):
        with pytest.raises(UnsafeFolderError, match=r"far(/\.\./far)? has mode 0777"):
            open_private(tmp_path / name / "own")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="more than 40 links"):
        open_private(tmp_path / "loop" / "own")


def test_our_own_folder_is_no_link_no_file_and_was_never_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make(tmp_path / "target"))
    with pytest.raises(UnsafeFolderError, match="link is a link: name the folder that it leads to"):
        open_private(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_private(tmp_path / "file")
    make(tmp_path / "open", 0o770)
    with pytest.raises(UnsafeFolderError, match="open has mode 0770, so others could have written there"):
        open_private(tmp_path / "open")


def test_a_user_may_vouch_for_the_folders_above_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = make(tmp_path / "above", 0o777)
    monkeypatch.setenv(IS_PRIVATE, "1")
    with capture_logs() as logs:
        opened(above / "own")
        opened(above / "own")
    [line] = logs
    assert line["folder"] == str(above) and IS_PRIVATE in line["reason"] and "mode 0777" in line["reason"]
    with pytest.raises(UnsafeFolderError):
        open_private(above)
    monkeypatch.setenv(IS_PRIVATE, "0")
    with pytest.raises(UnsafeFolderError):
        open_private(above / "own")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make(tmp_path / "target"))
    make(tmp_path / "open", 0o777)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("link/own", "link", "open", "open/own", "new/own"):
        try:
            os.close(open_private(tmp_path / name))
        except UnsafeFolderError:
            assert name in ("link", "open", "open/own")
    os.close(open_guarded(tmp_path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
