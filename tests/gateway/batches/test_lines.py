"""What is read of a batch's input, and what survives of its output."""

import codecs
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.keys import ANYBODY
from gateway.batches.lines import MAX_LINES, InputLine, Journal, LineError, OutputLine, read_line, scan
from gateway.batches.objects import Batch
from gateway.batches.records import Record
from gateway.batches.runner import _Job
from gateway.batches.store import BatchStore

CHATS = "/v1/chat/completions"


def line(custom_id: str = "one", **fields: object) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "method": "POST", "url": CHATS, "body": {}, **fields}) + b"\n"


def output(number: int, text: str = "") -> OutputLine:
    return OutputLine(f"batch_req_aa_{number}", f"line {number}", error=LineError("code", text))


def test_wrong_lines_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "input"
    good = [line("a", body={"text": "é"}), line("b", extra=1), line("c")[:-1]]
    wrong = [
        (b"{not json\n", "invalid_json_line", None),
        (b"[]\n", "invalid_line", None),
        (b'{"custom_id": "\xff"}\n', "invalid_json_line", None),
        (line("a"), "duplicate_custom_id", "a"),
        (line("d", url="/v1/embeddings"), "mismatched_url", "d"),
        (line("e", method="GET"), "invalid_line", None),
        (line("", body={}), "invalid_custom_id", None),
        (line("f", body={"text": "x" * 300}), "line_too_long", None),
    ]
    path.write_bytes(b"".join([good[0], b"\n", *(text for text, _, _ in wrong), *good[1:]]))
    found = scan(path, CHATS, 256)
    assert found.numbers == [1, 11, 12]
    assert [(fault.code, fault.custom_id) for fault in found.faults] == [(code, name) for _, code, name in wrong]
    assert all(f"line {fault.number}" in fault.message for fault in found.faults)
    assert [fault.number for fault in found.faults] == list(range(3, 11))
    read = [read_line(path, found.offsets[number - 1]) for number in found.numbers]
    assert [one.custom_id for one in read] == ["a", "b", "c"]
    assert bytes(read[0].body) == '{"text":"é"}'.encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\n \n", "no lines"),
        (b"x\n" * (MAX_LINES + 1), "more than 50000"),
        (b"\n" * (200 << 20), "more than 100000 lines, empty ones included"),
    ],
)
def test_files_without_lines_or_with_too_many_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "input").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        scan(tmp_path / "input", CHATS, 100)


@given(
    given=st.lists(st.one_of(st.binary(max_size=40), st.just(line()), st.just(b"\n")), max_size=8),
    most=st.integers(1, 99),
)
def test_every_line_is_a_number_or_a_fault_whatever_the_bytes(
    given: list[bytes], most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = b"".join(given)
    path = tmp_path_factory.mktemp("any") / "input"
    path.write_bytes(content)
    rows = [row for row in content.split(b"\n") if row.strip()]
    if not rows:
        return
    found = scan(path, CHATS, most)
    assert len(found.numbers) + len(found.faults) == len(rows)
    for number in found.numbers:
        assert isinstance(read_line(path, found.offsets[number - 1]), InputLine)


def test_a_byte_order_mark_belongs_to_no_line(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(codecs.BOM_UTF8 + line("one") + line("two"))
    found = scan(path, CHATS, 1000)
    assert (found.numbers, found.faults) == ([1, 2], [])
    assert read_line(path, found.offsets[0]).custom_id == "one"
    path.write_bytes(codecs.BOM_UTF8)
    with pytest.raises(ValueError, match="no lines"):
        scan(path, CHATS, 1000)


@pytest.mark.parametrize(
    ("body", "number"),
    [({}, 1), ({"n": 5}, 5), ({"n": 10**9}, 128), ({"n": -1}, 1), ({"n": "5"}, 1), ({"n": 2, "prompt": ["a", "b"]}, 4),
     ({"n": 2, "prompt": [1, 2, 3]}, 2), ({"n": 2, "prompt": [[1], [2], [3]]}, 6), ({"prompt": "text"}, 1), ([], 1)],
)  # fmt: skip
def test_answers_of_a_line_are_counted(tmp_path: Path, body: Any, number: int) -> None:
    (tmp_path / "input").write_bytes(line("a", body=body))
    assert list(scan(tmp_path / "input", CHATS, 1000).num_answers) == [number]


def test_a_journal_cut_at_any_byte_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "output"
    whole = Journal(path)
    for number in (3, 1, 2):
        whole.append(number, output(number, "ü" * number))
    whole.close()
    content = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        torn = Journal(path)
        num_whole = sum(end <= cut for end in ends)
        assert torn.numbers == set((3, 1, 2)[:num_whole]), cut
        for number in {1, 2, 3} - torn.numbers:
            torn.append(number, output(number))
        torn.close()
        written = [msgspec.json.decode(row, type=OutputLine) for row in path.read_bytes().splitlines()]
        assert sorted(one.custom_id or "" for one in written) == ["line 1", "line 2", "line 3"], cut


@pytest.mark.parametrize("bad", ["file-out", "file-err", ""])
def test_a_batch_that_cannot_be_opened_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """It is tried again every ten seconds. `bad`: a file that cannot be read; or the disk is full."""
    store = BatchStore(tmp_path / "batches", 1 << 20)
    store.path("file-in").write_bytes(b"no json")
    if bad:
        store.path(bad).mkdir()
    else:
        monkeypatch.setattr(Journal, "append", lambda *_: store.path("file-out").mkdir())
    batch = Batch("batch_1", CHATS, "file-in", 0, 0)
    job = _Job(Record("", batch, 0.0, "", "file-out", "file-err"), batch, ANYBODY, store.path("file-in"))
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match=r"exists|directory"):
        job.open(store, 1000)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    store.close()


def test_garbage_after_a_power_failure_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.write_bytes(msgspec.json.encode(output(7)) + b"\n" + b"\0" * 4096 + b"\n")
    journal = Journal(path)
    assert journal.numbers == {7}
    assert path.read_bytes().count(b"\0") == 0
    journal.close()


def test_a_line_for_which_the_disk_has_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "output")
    journal.append(1, output(1))
    before = (tmp_path / "output").read_bytes()
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:9]))  # as at the last bytes of a disk
        with pytest.raises(OSError, match="full"):
            journal.append(2, output(2))

        def refuse(fd: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="No space"):
            journal.append(2, output(2))
    assert (tmp_path / "output").read_bytes() == before
    assert journal.numbers == {1}
    journal.append(2, output(2))
    journal.close()
    assert (tmp_path / "output").read_bytes().count(b"\n") == 2
