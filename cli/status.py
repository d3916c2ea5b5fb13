"""`baton status`: the workers of a running service, as its gateway sees them."""

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.screen import open_console
from cli.service import URL, ApiKey, CommandError, Service, Url
from wire.kv_layout import describe_token

COLUMNS = (
    "model", "role", "address", "pid", "incarnation", "ranks", "transport", "free_pages", "used_pages", "cached_pages",
    "prefix_hits", "running", "adapters", "revision", "trouble",
)  # fmt: skip
WATCH_S = 1.0
BAR_CELLS = 30
FULL = 0.9  # share of KV pages in use from which preemption is near
IN_WORDS = {("transport", "none"): "not used yet"}  # a cell of the table |-> what people read there


def status(
    *,
    url: Url = URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    watch: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Show the workers of a running service.

    Args:
        as_json: Print JSON instead of a table.
        watch: Show their load until Ctrl-C.
    """
    with closing(Service(url, api_key)) as service:
        if watch:
            return keep_watching(service, open_console())
        workers, trouble, note, models = read_status(service)
    if as_json:
        of_models = {"models": models} if models else {}
        print(json.dumps({"workers": workers, "trouble": trouble, "no_hand_off": note, **of_models}))
    else:
        remarks = [Text(f"{name}: {state}") for name, state in models.items()]
        remarks += [
            Text(f"{worker.get('address', '')}: {weakness}: {reason}", "yellow")
            for worker in workers
            for weakness, reason in worker.get("weaknesses", {}).items()
        ]
        remarks += [Text(said) for said in dict.fromkeys(filter(None, map(describe_latents, workers)))]
        remarks += [Text(trouble, "yellow")] * bool(trouble) + [Text(note)] * bool(note)
        open_console().print(build_table(workers), *remarks, sep="\n")
    return 0


def describe_latents(worker: dict[str, Any]) -> str:
    """The size of a token's KV, in words, where pages keep one latent for all heads; empty elsewhere."""
    kept, heads = worker.get("kv_token_bytes", 0), worker.get("head_token_bytes", 0)
    model = f"{worker['model']}: " if worker.get("model") else ""
    return f"{model}{describe_token(kept, heads)}" if kept and heads else ""


def keep_watching(service: Service, console: Console, pause: Callable[[float], None] = time.sleep) -> int:
    """Redraw the load of each worker until Ctrl-C; at a terminal in place. A service that is away may come back."""
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                workers, trouble, note, _models = read_status(service)
                shown = Group(build_load(workers), *filter(None, (Text(trouble, "yellow"), Text(note))))
            except CommandError as error:
                shown = Group(Text(str(error), "red"))
            live.update(shown, refresh=console.is_terminal)
            if not console.is_terminal:
                console.print(shown)
            pause(WATCH_S)
    return 0


def build_load(workers: list[dict[str, Any]]) -> Table:
    """A line for each worker, with its share of KV pages in use as a bar."""
    table = Table.grid(padding=(0, 2))
    places = Counter[str]()
    for worker in workers:
        role, used = str(worker.get("role", "")), worker.get("used_pages", 0)
        share = used / max(used + worker.get("free_pages", 0), 1)
        trouble = str(worker.get("trouble", "")) or ("" if worker.get("alive") else "down")
        name = f"{worker.get('model', '')} {role}-{places[role]}".strip()
        places[role] += 1
        bar = ProgressBar(total=1, completed=share, width=BAR_CELLS, complete_style="red" if share > FULL else "green")
        state = Text(f"{worker.get('running', 0)} running, {worker.get('prefix_hits', 0):.0%} from the prefix cache")
        table.add_row(Text(name, "bold"), bar, Text(f"KV {share:.0%}"), Text(trouble, "red") if trouble else state)
    return table


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
    if len({worker.get("revision") for worker in workers}) < 2:  # shown where there are several
        columns.remove("revision")
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
