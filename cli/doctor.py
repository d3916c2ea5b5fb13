"""`baton doctor`: what this machine has, what `baton serve` would make of it, and why."""

import json
from dataclasses import asdict, replace
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.doctor_facts import Model
from cli.doctor_rules import Row, judge
from cli.screen import open_console
from runtime.config import ServeConfig
from runtime.hardware import wait_without_spinning
from worker.startup.models import name_models

COLORS = {"ok": "green", "warning": "yellow", "missing": "red"}


def doctor(
    config: Annotated[ServeConfig, Parameter(name="*")] = ServeConfig(),  # noqa: B008  frozen
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Look at this machine with the settings of `baton serve`; exit code 1 when what they ask for cannot be had.

    Args:
        as_json: Print one JSON object instead of a table.
    """
    wait_without_spinning()
    from cli.doctor_probe import examine_machine, examine_model  # here, so that other commands do not wait for torch

    machine = examine_machine()
    names = name_models(config.model, config.served_name)
    if len(names) > 1:
        config = replace(config, model=tuple(f"{name}={model}" for name, model in names.items()))
    models: list[Model | Exception] = []
    for model in names.values():
        try:
            models.append(examine_model(config, model))
        except (ValueError, OSError, RuntimeError) as error:
            models.append(error)
    rows = judge(config, machine, *models)
    is_ok = not any(row.status == "missing" for row in rows)
    if as_json:
        found = [None if isinstance(model, Exception) else asdict(model) for model in models]
        report = {"ok": is_ok, "rows": [asdict(row) for row in rows], "machine": asdict(machine), "model": found[0]}
        report |= {"models": dict(zip(names, found, strict=True))} if len(names) > 1 else {}
        print(json.dumps(report))
    else:
        show(rows)
    return 0 if is_ok else 1


def show(rows: list[Row], console: Console | None = None) -> None:
    """A table, with advice below what was found."""
    console = console or open_console()
    table = Table("part", "", "found", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        found = Text(row.found)
        if row.advice:
            found.append(f"\n{row.advice}", style="dim" if row.status == "ok" else "bold")
        table.add_row(row.part, Text(row.status, COLORS[row.status]), found)
    console.print(table)
