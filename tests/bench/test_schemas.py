"""The bench of schemas counts what grammars follow, and notices what they do not."""

import pytest

from bench import schemas
from bench.schemas import Case

SHORT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FOLLOWED = Case("integers: whole", {"type": "integer"}, [(3, True), ("x", False), (1.5, False)])
NARROWER = Case("properties: others", SHORT, [({"a": 1}, True), ({"a": 1, "b": 2}, True), ({}, False)])
NAMED = Case("contains: no", {"type": "array", "contains": False}, [([], False)])


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *cases: Case) -> tuple[int, str]:
    """The exit status, and what was printed."""
    monkeypatch.setattr(schemas, "read_suite", lambda: iter(cases))
    monkeypatch.setattr("sys.argv", ["bench.schemas", "--answers", "2"])
    with pytest.raises(SystemExit) as ended:
        schemas.main()
    return int(ended.value.code or 0), " ".join(capsys.readouterr().out.split())


def test_each_kind_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(monkeypatch, capsys, FOLLOWED, NARROWER, NAMED)
    assert status == 0
    assert printed.endswith("5 followed 1 named 1 narrower 0 lost 0 unsound")


@pytest.mark.parametrize(("value", "is_valid", "kind"), [("x", True, "lost"), (3, False, "unsound")])
def test_a_grammar_that_does_otherwise_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: object, is_valid: bool, kind: str
) -> None:
    """As if the suite knew better: for `lost` the validator agrees with it."""
    monkeypatch.setattr(schemas, "narrowed", lambda schema: {})
    status, printed = run(monkeypatch, capsys, Case("integers: other", {"type": "integer"}, [(value, is_valid)]))
    assert status == 1 and f"{kind}: integers: other" in printed
