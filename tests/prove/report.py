"""What a proof finds: tables of cells, the answers compared, and what is wrong. As Markdown, and for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table


@dataclass
class Report:
    """Filled on one thread."""

    tables: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)  # title |-> row |-> column |-> cell
    problems: list[str] = field(default_factory=list)
    num_answers: int = 0  # compared with another source of the same answer
    num_wrong: int = 0  # of these, with another token than that source
    num_refusals: int = 0  # each with the reason that was expected

    def put(self, title: str, row: str, column: str, text: str) -> None:
        """Set a cell; a second text in the same cell joins the first."""
        cells = self.tables.setdefault(title, {}).setdefault(row, {})
        texts = [*filter(None, cells.get(column, "").split(", "))]
        cells[column] = ", ".join(dict.fromkeys([*texts, *filter(None, [text])]))

    def refused(self, title: str, row: str, column: str, reason: str, wanted: str) -> None:
        """Something was refused for `reason`, or accepted with "", and then answered right."""
        self.num_refusals += reason == wanted != ""
        is_wanted = self.require(reason == wanted, f"{row} ({column}): refused for {reason!r}, not {wanted!r}")
        said = reason or "right answer"
        self.put(title, row, column, said if is_wanted else f"WRONG: {said}")

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
        answers = f"0 wrong tokens in {self.num_answers:,} answers"
        if self.num_wrong:
            answers = f"wrong tokens in {self.num_wrong} of {self.num_answers:,} answers"
        wrong = f"{len(self.problems)} things are WRONG" if self.problems else "nothing is wrong"
        return f"{answers}; {self.num_refusals} refusals, each with the reason that it must have; {wrong}"


def columns_of(rows: dict[str, dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(column for cells in rows.values() for column in cells))


def build_markdown(report: Report, titles: Sequence[str] = ()) -> str:
    """The tables with these titles, or all, and the summary."""
    parts = []
    for title in titles or report.tables:
        rows = report.tables.get(title, {})
        columns = columns_of(rows)
        lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {row} | {' | '.join(cells.get(one, '') for one in columns)} |" for row, cells in rows.items()]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, f"**{report.summary()}**"])


def build_tables(report: Report) -> list[Table]:
    """For a terminal."""
    tables = []
    for title, rows in report.tables.items():
        columns = columns_of(rows)
        table = Table(title, *columns)
        for row, cells in rows.items():
            table.add_row(row, *(cells.get(column, "") for column in columns))
        tables.append(table)
    return tables
