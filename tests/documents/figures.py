"""Puts figures into the README and other pages: `python -m tests.documents.figures`. Pure but for the end.

A figure is a link whose title names its cell: `[156 ms](docs/BENCHMARKS.md "heading; row; column")`, or
`"name; column"` with a name for heading and row from rules.toml. "prove" stands for what `make prove` found.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/COMPARISON.md")
FIGURE = re.compile(r'\[(?P<text>[^\]]*)\](?P<link>\((?:docs/)?[A-Z]+\.md[^ )]* "(?P<cell>[^"]+)"\))')
NAMED: dict[str, str] = tomllib.loads((Path(__file__).parent / "rules.toml").read_text())["figures"]
PROVED = re.compile(r"<!-- prove -->.*\n\*\*(.*)\*\*\n<!-- /prove -->", re.DOTALL)


def read_cell(document: str, heading: str, row: str, column: str) -> str:
    """The cell's text up to a bracket, from the first table below a heading that has the row. ValueError without it."""
    section = re.split(r"(?m)^#+ ", document.partition(f"# {heading}\n")[2])[0]
    columns: list[str] = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        columns = columns if columns and cells else cells
        if cells and cells[0] == row and column in columns:
            return cells[columns.index(column)].partition(" (")[0].strip("*")
    raise ValueError(f"there is no {row!r} with {column!r} below {heading!r}")


def shorten(cell: str) -> str:
    """`14059 ms` |-> `14.1 s`: three digits; others as they are."""
    found = re.fullmatch(r"(\d{4,}) ms", cell)
    return f"{int(found[1]) / 1000:#.3g} s" if found else cell


def fill(page: str, benchmarks: str, reliability: str) -> str:
    """A page with today's figures."""

    def replace(found: re.Match[str]) -> str:
        if found["cell"] == "prove":
            [text] = PROVED.findall(reliability)
        else:
            name, _, rest = found["cell"].partition("; ")
            text = shorten(read_cell(benchmarks, *f"{NAMED.get(name, name)}; {rest}".split("; ")))
        return f"[{text}]{found['link']}"

    return FIGURE.sub(replace, page)


def fill_today(name: str) -> str:
    return fill(*((ROOT / one).read_text() for one in (name, "docs/BENCHMARKS.md", "docs/RELIABILITY.md")))


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(fill_today(page))
