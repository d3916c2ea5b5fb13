"""`baton status`: the workers of a running service, as its gateway sees them."""

import json
from contextlib import closing
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from cli.screen import open_console
from cli.service import URL, ApiKey, CommandError, Service, Url

COLUMNS = (
    "model", "role", "address", "pid", "incarnation", "ranks", "transport", "free_pages", "used_pages", "cached_pages",
    "prefix_hits", "running", "adapters", "trouble",
)  # fmt: skip
IN_WORDS = {("transport", "none"): "not used yet"}  # a cell of the table |-> what people read there


def status(
    *, url: Url = URL, api_key: ApiKey = "", as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
) -> int:
    """Show the workers of a running service.

    Args:
        as_json: Print JSON instead of a table.
    """
    with closing(Service(url, api_key)) as service:
        workers, trouble, note, models = read_status(service)
    if as_json:
        of_models = {"models": models} if models else {}
        print(json.dumps({"workers": workers, "trouble": trouble, "no_hand_off": note, **of_models}))
    else:
        remarks = [Text(f"{name}: {state}") for name, state in models.items()]
        remarks += [Text(trouble, "yellow")] * bool(trouble) + [Text(note)] * bool(note)
        open_console().print(build_table(workers), *remarks, sep="\n")
    return 0


def read_status(service: Service) -> tuple[list[dict[str, Any]], str, str, dict[str, str]]:
    """The gateway's /status: the workers, why the service is degraded, and why prompts are not handed off.

    And the state of each model, where there are several or one can sleep. Raises CommandError.
    """
    found = service.read_json("/status")
    try:
        workers = [dict(worker) for worker in found["workers"]]
        return workers, str(found.get("trouble", "")), str(found.get("no_hand_off", "")), dict(found.get("models", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{service.url} is no Baton gateway: its /status has no workers; set --url") from error


def build_table(workers: list[dict[str, Any]]) -> Table:
    table = Table()
    some = ("adapters", "model")  # shown where a worker has them
    columns = [column for column in COLUMNS if column not in some or any(worker.get(column) for worker in workers)]
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for worker in workers:
        cells = (_in_words(column, worker.get(column, "")) for column in columns)
        table.add_row(*(Text(cell) for cell in cells))  # a str would be read as markup
    return table


def _in_words(column: str, value: object) -> str:
    if isinstance(value, dict):  # adapters: name |-> "loaded", or why not
        return "\n".join(f"{name}: {state}" for name, state in value.items())
    return IN_WORDS.get((column, str(value)), str(value))
