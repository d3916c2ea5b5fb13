"""The attack script: over one transport between real processes, and what it says when something is wrong."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tests.attack.__main__ import Found, Seen
from tests.corpus.cases import Case
from tests.prove import attacks, features
from tests.prove.__main__ import main
from tests.prove.report import Report, build_markdown


@pytest.mark.nightly
def test_references_over_shared_memory_are_refused_by_name(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("# Head\n<!-- prove -->\nold\n<!-- /prove -->\ntail\n")
    assert main("references", transports=("shm", "cuda_ipc"), out=tmp_path / "all.md", document=document) == 0
    text = document.read_text()
    assert text == f"# Head\n<!-- prove -->\n{(tmp_path / 'all.md').read_text().strip()}\n<!-- /prove -->\ntail\n"
    assert all(f"| {case} | " in text for case in attacks.CASES) and "0 wrong tokens" in text


class Says:
    """A service with one answer."""

    def __init__(self, text: str) -> None:
        self._text = text

    def answer(self, case: Case) -> dict[str, Any]:
        return {"status": 200, "body": {"text": self._text, "timing": {"prefill_reason": self._text}}}


@pytest.mark.parametrize(("texts", "cell"), [(("a", "a"), "1 equal"), (("a", "b"), "0 equal, 1 WRONG")])
def test_answers_of_two_services_are_compared(texts: Sequence[str], cell: str) -> None:
    report, case = Report(), Case("Chat sum", "rpc", "Chat")
    twins = cast(list[features.Twin], [Says(text) for text in texts])
    with ThreadPoolExecutor(1) as clients:
        assert features.compare(report, "sums", [case], twins, clients) == 1
    assert f"| sums | 0 equal | {cell} |" in build_markdown(report)
    assert report.num_wrong == len(report.problems) == (texts[0] != texts[1])


def test_what_attacks_cost_the_others_is_proved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def attack(names: Sequence[str], on_row: Callable[[Mapping[str, Any]], None]) -> Found:
        on_row({"case": "many ids", "answers": "4x 400", "gap_s": 0.5})
        return Found(Seen(), [{}], ["many ids: the stream waited 0.50 s"], "")

    monkeypatch.setattr("tests.prove.__main__.attack_service", attack)
    assert main("attack", out=tmp_path / "all.md") == 1
    text = (tmp_path / "all.md").read_text()
    assert "| many ids | 4x 400 | 0.5 |" in text and "| 1 WRONG |" in text


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
        "| row | WRONG: accepted, bounds |" in text
        and "1 answers with wrong tokens in 1 answers; 1 bad references to KV" in text
    )
    assert "3 WRONG" in text
