"""docs/LIMITS.md has the bounds that the code has."""

from pathlib import Path

from tests.documents.bounds import build_bounds, build_table

DOCUMENT = Path(__file__).parents[2] / "docs/LIMITS.md"


def test_the_document_has_the_table() -> None:
    assert build_table() in DOCUMENT.read_text(), "run python -m tests.documents.bounds docs/LIMITS.md"


def test_each_bound_says_what_is_answered_beyond_it() -> None:
    for bound in build_bounds():
        assert bound.beyond and (bound.one_request or bound.one_key or bound.together), bound.what
