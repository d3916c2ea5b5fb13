"""What the attacks came to: tables of cells, how many answers were compared, and all that is wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.table import Table

Cells = dict[str, dict[str, list[str]]]  # row |-> column |-> texts


@dataclass
class Report:
    """Filled on one thread."""

    tables: dict[str, Cells] = field(default_factory=dict)  # by title
    problems: list[str] = field(default_factory=list)
    num_answers: int = 0  # compared with another source of the same answer
    num_wrong: int = 0  # of these, with another token than that source
    num_refusals: int = 0  # each with the reason that was expected

    def put(self, title: str, row: str, column: str, text: str) -> None:
        """Add a text to a cell, once."""
        texts = self.tables.setdefault(title, {}).setdefault(row, {}).setdefault(column, [])
        if text and text not in texts:
            texts.append(text)

    def refused(self, title: str, row: str, column: str, reason: str, wanted: str) -> None:
        """Something was refused for `reason`, or accepted with "", and then answered right."""
        self.num_refusals += reason == wanted != ""
        is_wanted = self.require(reason == wanted, f"{row} ({column}): refused for {reason!r}, not {wanted!r}")
        self.put(title, row, column, reason or "right answer" if is_wanted else f"WRONG: {reason or 'accepted'}")

    def answered(self, is_equal: bool, problem: str) -> bool:
        """An answer was compared."""
        self.num_answers += 1
        self.num_wrong += not is_equal
        return self.require(is_equal, problem)

    def require(self, holds: bool, problem: str) -> bool:
        if not holds:
            self.problems.append(problem)
        return holds

    def summary(self) -> str:
        """The last line."""
        wrong = f"{self.num_wrong} answers with wrong tokens" if self.num_wrong else "0 wrong tokens"
        problems = f"; {len(self.problems)} WRONG" if self.problems else ""
        refused = f"{self.num_refusals} bad references to KV refused for the right reason"
        return f"{wrong} in {self.num_answers:,} answers; {refused}{problems}"


def build_grids(report: Report, titles: Sequence[str]) -> Iterator[list[list[str]]]:
    """Of each table its head and its rows; without titles, of all tables."""
    for title, rows in report.tables.items():
        if not titles or title in titles:
            columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
            lines = [[row, *(", ".join(cells.get(column, ())) for column in columns)] for row, cells in rows.items()]
            yield [[title, *columns], *lines]


def build_markdown(report: Report, titles: Sequence[str] = ()) -> str:
    """The tables and the summary."""
    parts = []
    for head, *rows in build_grids(report, titles):
        lines = [head, ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join([*parts, f"**{report.summary()}**"])


def build_tables(report: Report) -> Iterator[Table]:
    """For a terminal."""
    for head, *rows in build_grids(report, ()):
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        yield table
