"""Memory limits from a container's files."""

from pathlib import Path

import pytest

from runtime import hardware
from runtime.hardware import available_memory_bytes

MACHINE = 10_000  # bytes available on the machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "_meminfo_available_bytes", lambda: MACHINE)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "current", "stat", "available"),
    [
        ("5000\n", "4000\n", "anon 700\ninactive_file 3000\nactive_file 300\n", 4000),  # just after loading a model
        ("5000", "4000", "anon 4000\ninactive_file 0\nworkingset_restore_inactive_file 9\n", 1000),
        ("5000", "6000", "inactive_file 500", 0),
        ("5000", "100", "inactive_file 300", 5000),  # the two are not read at the same time
        ("50000", "100", "inactive_file 0", MACHINE),
        ("max", "4000", "inactive_file 300", MACHINE),
        (None, None, None, MACHINE),
        ("5000", None, None, 5000),
        ("5000", "4000", None, 1000),
        *(("5000", "4000", odd, 1000) for odd in ("", "\n\n", "inactive_file", "inactive_file x", "inactive_file 1 2")),
    ],
)
def test_page_cache_is_no_use_of_memory(
    cgroup: Path, limit: str | None, current: str | None, stat: str | None, available: int
) -> None:
    for name, text in (("memory.max", limit), ("memory.current", current), ("memory.stat", stat)):
        if text is not None:
            (cgroup / name).write_text(text)
    assert available_memory_bytes() == available
