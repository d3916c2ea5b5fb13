"""From rounds to tables: ratios within each round, their medians, and the text between a document's markers. Pure.

Systems take turns within a round, so only figures of one round compare; medians of absolute figures are shown for
orientation only.
"""

from collections.abc import Mapping, Sequence
from statistics import median

Figures = Mapping[str, float]  # name |-> value, of one system in one round; empty if it failed
Rounds = Mapping[str, Sequence[Figures]]  # system |-> its rounds
BEGIN, END = "<!-- bench-peers: {} -->", "<!-- /bench-peers: {} -->"
UNITS = {"ms": " ms", "per_s": "/s", "ratio": " x"}


def find_ratios(rounds: Rounds, system: str, base: str, figure: str) -> list[float]:
    """system / base of each round in which both have the figure."""
    return [
        one[figure] / other[figure]
        for one, other in zip(rounds.get(system, ()), rounds.get(base, ()), strict=False)
        if figure in one and other.get(figure)
    ]


def list_figures(rounds: Rounds) -> list[str]:
    """Every figure of the row, in order of appearance."""
    return list(dict.fromkeys(name for found in rounds.values() for one in found for name in one))


def format_figure(figure: str, value: float) -> str:
    """A value with its unit: `mean_ttft_ms`, 12.34 |-> `12.3 ms`."""
    unit = next((unit for end, unit in UNITS.items() if figure.endswith(f"_{end}")), "")
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def build_cell(rounds: Rounds, system: str, base: str, figure: str) -> str:
    """A system's median. If it is not the base, also its ratio to that: median, least, most, and better or worse."""
    values = [one[figure] for one in rounds.get(system, ()) if figure in one]
    if not values:
        return "-"
    own = format_figure(figure, median(values))
    ratios = find_ratios(rounds, system, base, figure)
    if system == base or not ratios:
        return own
    spread = f", {min(ratios):.2f}-{max(ratios):.2f}" if len(ratios) > 1 else ""
    return f"{own} ({median(ratios):.2f}x{spread}{judge(figure, median(ratios))})"


def judge(figure: str, ratio: float) -> str:
    """Whether a system with this ratio to the base is better or worse than it: rates should be high, all else low."""
    if f"{ratio:.2f}" == "1.00":
        return ""
    return ": better" if (ratio > 1) == figure.endswith("_per_s") else ": worse"


def build_table(rows: Mapping[str, Rounds], systems: Sequence[str]) -> str:
    """Markdown: one line per figure of a row, one column per system; the first system is the base."""
    base = systems[0]
    lines = [f"| | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for row, rounds in rows.items():
        for figure in list_figures(rounds):
            if figure.endswith("_ratio"):  # of two figures that are shown
                continue
            cells = [build_cell(rounds, system, base, figure) for system in systems]
            label = figure.removesuffix("_ms").removesuffix("_per_s").replace("_", " ")
            lines.append(f"| {row}: {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def share_prefix(text: str, other: str) -> float:
    """The share of `text` that `other` begins with, 0 to 1."""
    count = next((place for place, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
    return (min(len(text), len(other)) if count is None else count) / max(len(text), 1)


def read_row(document: str, name: str, label: str) -> dict[str, float]:
    """System |-> median of a figure in milliseconds, from the table between `name`'s markers; ValueError without it."""
    table = document.partition(BEGIN.format(name))[2].partition(END.format(name))[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    row = next((cells for head, *cells in lines if head == label), None)
    if row is None:
        raise ValueError(f"there is no {label!r} between the markers of {name}")
    systems = lines[0]  # without the empty first cell
    return {system: float(cell.partition(" ms")[0]) for system, cell in zip(systems, row, strict=True)}


def put_between(document: str, name: str, text: str) -> str:
    """`document` with `text` between the markers of `name`; appends the markers if missing."""
    begin, end = BEGIN.format(name), END.format(name)
    before, found, rest = document.partition(begin)
    after = rest.partition(end)[2] if found else "\n"
    return f"{before if found else document + chr(10)}{begin}\n{text}\n{end}{after}"
