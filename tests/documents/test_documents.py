"""README and docs: lengths and words within rules.toml, links that lead somewhere, figures from the tables.

`make check` runs this file.
"""

import ast
import io
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from cli.main import COMMANDS, app
from tests.documents import figures
from tests.documents.figures import ROOT, fill, fill_today, read_cell, shorten

RULES = tomllib.loads((ROOT / "tests/documents/rules.toml").read_text())
FOLDERS = ("docs/**", "deploy/**", "demo", "examples", "tests/*")
PAGES = [ROOT / "README.md", *sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))]
DECISIONS = ROOT / "docs" / "decisions"  # of their day
PACKAGES = (
    "baton*", "cli", "decode_worker", "engine", "gateway", "kvtransfer", "prefill_worker", "runtime", "wire", "worker"
)  # fmt: skip
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^()\s]+)(?: \"[^\"]*\")?\)|(?:srcset|src)=\"([^\"]+)\"")


def count_words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split())


def drop_code(text: str) -> str:
    """Markdown without blocks and spans of code, comments and addresses of links; as many lines as before."""
    text = re.sub(r"(?ms)^```.*?^```", lambda found: "\n" * found[0].count("\n"), text)
    return re.sub(r"`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", "", text)


def name_anchors(text: str) -> set[str]:
    """Of headings, as GitHub and the site make them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def find_broken(page: Path) -> Iterator[str]:
    """Links of a page that lead nowhere within the checkout."""
    for found in LINK.finditer(re.sub(r"(?ms)^```.*?^```", "", page.read_text())):
        target, _, anchor = (found[1] or found[2]).partition("#")
        other = (page.parent / target).resolve() if target else page
        if re.match(r"[a-z]+:", target):
            continue
        if not other.exists():
            yield f"{target} is not there"
        elif anchor and other.suffix == ".md" and anchor not in name_anchors(other.read_text()):
            yield f"{target} has no heading #{anchor}"


def find_bad_words(text: str) -> list[str]:
    return [
        f"{found[0]!r}: write {instead}"
        for pattern, instead in RULES["prose"].items()
        for found in re.finditer(pattern, " ".join(text.split()), re.IGNORECASE)
    ]


def read_messages(source: str) -> Iterator[str]:
    """Texts of a module that people may see: all but docstrings and single words."""
    tree = ast.parse(source)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    notes = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in notes)
    return (node.value for node in texts if isinstance(node.value, str) and " " in node.value)


def show_help(command: str) -> str:
    text = io.StringIO()
    app.help_print([command], console=Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.parametrize(("pages", "count"), [("README.md", max), ("docs/*.md", sum), ("docs/decisions/0*.md", max)])
def test_lengths(pages: str, count: Callable[[Iterable[int]], int]) -> None:
    words = count(count_words(page.read_text()) for page in ROOT.glob(pages))
    assert 0 < words <= RULES["words"][pages], f"{pages}: {words} words"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert not list(find_broken(page))


def test_each_decision_is_listed() -> None:
    listed = re.findall(r"\((\d+-[^)]+)\)", (DECISIONS / "README.md").read_text())
    assert listed == sorted(page.name for page in DECISIONS.glob("0*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != DECISIONS], ids=lambda page: page.name)
def test_words(page: Path) -> None:
    assert not find_bad_words(drop_code(page.read_text()))


@pytest.mark.parametrize("package", PACKAGES)
def test_words_of_messages(package: str) -> None:
    files = [*ROOT.glob(f"{package}.py"), *ROOT.glob(f"{package}/**/*.py")]
    texts = [(file.name, text) for file in files for text in read_messages(file.read_text())]
    assert texts and not [(name, bad) for name, text in texts for bad in find_bad_words(text)]


@pytest.mark.parametrize("command", [name for names in COMMANDS.values() for name in names])
def test_words_of_help(command: str) -> None:
    text = show_help(command)
    assert "--" in text and not find_bad_words(text)


@pytest.mark.parametrize("text", ["runs on no card", "a layers keep states", "whoever asks", "servers as they come"])
def test_a_bad_word_is_found(text: str) -> None:
    assert find_bad_words(text)
    assert not find_bad_words(drop_code(f"`{text}`"))


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One, two\n[x](#one-two) [y](b.md) [z](#three)\n```\n[code](c.md)\n```\n")
    assert list(find_broken(page)) == ["b.md is not there", " has no heading #three"]


@pytest.mark.parametrize("page", figures.PAGES)
def test_figures_are_those_of_the_tables(page: str) -> None:
    assert (ROOT / page).read_text() == fill_today(page), "run python -m tests.documents.figures"


def test_a_figure_is_read_from_its_cell() -> None:
    other = "## Other\n\n| | a |\n|---|---|\n| row | 9 |\n\n"
    table = f"{other}## Head\n\n| | a | b |\n|---|---|---|\n| row | 1 ms | **2 ms** (3x) |\n"
    assert read_cell(table, "Head", "row", "b") == "2 ms"
    with pytest.raises(ValueError, match="no 'row' with 'c' below 'Head'"):
        read_cell(table, "Head", "row", "c")
    proved = "<!-- prove -->\n| x |\n\n**0 wrong**\n<!-- /prove -->"
    page = '[{}](docs/B.md "Head; row; a"), [{}](docs/R.md#x "prove"), [kept](docs/B.md)'
    assert fill(page.format("old", "old"), table, proved) == page.format("1 ms", "0 wrong")
    assert [shorten(cell) for cell in ("999 ms", "5998 ms", "14059 ms", "88.3/s")] == [
        "999 ms",
        "6.00 s",
        "14.1 s",
        "88.3/s",
    ]
