"""The attack script: over one transport between real processes, and what it says when something is wrong."""

from pathlib import Path

import pytest

from tests.prove import attacks
from tests.prove.__main__ import main
from tests.prove.report import Report


def test_references_over_shared_memory_are_refused_by_name(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("# Head\n<!-- prove -->\nold\n<!-- /prove -->\ntail\n")
    assert main("references", transports=("shm", "cuda_ipc"), out=tmp_path / "all.md", document=document) == 0
    text = document.read_text()
    assert text == f"# Head\n<!-- prove -->\n{(tmp_path / 'all.md').read_text().strip()}\n<!-- /prove -->\ntail\n"
    assert all(f"| {case} | " in text for case in attacks.CASES) and "0 wrong tokens" in text


def test_a_service_that_takes_too_much_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(report: Report, *_: object) -> None:
        report.refused("t", "row", "shm", "", "generation")
        report.refused("t", "row", "shm", "bounds", "bounds")
        report.answered(False, "another token")
        raise OSError("no port")

    monkeypatch.setattr(attacks, "prove_references", broken)
    assert main("references", transports=("shm",), out=tmp_path / "all.md") == 1
    text = (tmp_path / "all.md").read_text()
    assert (
        "| row | WRONG: accepted, bounds |" in text and "1 answers with wrong tokens in 1 answers; 1 refusals" in text
    )
    assert "3 WRONG" in text
