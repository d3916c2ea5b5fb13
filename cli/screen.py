"""What `baton serve` shows: a progress bar on a terminal, plain lines elsewhere, and how to call the service.

Knows words and layout; decides nothing.
"""

import json
import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from runtime.addresses import is_any
from runtime.events import Loading, Ready
from runtime.output import unfailing

CURL = """curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{prompt}"}}], "stream": true}}'"""
PYTHON = """from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "{prompt}"}}])
print(answer.choices[0].message.content)"""
PROMPT = "Hello! How are you?"
LOADED: dict[str, Callable[[int], str]] = {
    "weights": lambda total: f"loaded {total / 1e6:.1f} MB of weights",
    "graphs": lambda total: f"captured {total} CUDA graphs",
}
COLUMNS: dict[str, Callable[[], tuple[ProgressColumn, ...]]] = {
    "weights": lambda: (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn()),
    "graphs": lambda: (TextColumn("capturing CUDA graphs"), BarColumn(), MofNCompleteColumn()),
}
LOG_FIELDS_LEFT_OUT = ("event", "level", "timestamp", "role")


class Screen:
    """Everything that is shown goes through one console, so that lines and the bar do not mix.

    What cannot be shown is lost: whoever read our output has left, or the disk is full, and the service goes on.
    """

    def __init__(self, model: str, needs_key: bool, console: Console | None = None) -> None:
        """`model` is the served name."""
        self._model = model
        self._needs_key = needs_key
        self._console = console or Console(file=unfailing(sys.stdout), highlight=False)
        self._errors = unfailing(sys.stderr)
        self._loads: dict[str, Loading] = {}  # process |-> its progress
        self._progress: Progress | None = None

    def starting(self, names: list[str]) -> None:
        """These processes were started."""
        self.tell(f"starting {', '.join(names)}")

    def loading(self, name: str, event: Loading) -> None:
        """A process loads weights or captures graphs: move the bar, which shows all processes that do the same."""
        self._loads[name] = event
        same = [load for load in self._loads.values() if load.what == event.what]
        if self._console.is_terminal:
            self._move_bar(event.what, sum(load.done for load in same), sum(load.total for load in same))
        elif event.done >= event.total:
            self.tell(f"{name} {LOADED[event.what](event.total)}")

    def ready(self, name: str, event: Ready) -> None:
        """A process takes requests."""
        facts = [f"pid {event.pid}", *(f"{key} {value}" for key, value in event.detail.items())]
        if event.metrics_address:
            facts.append(f"metrics http://{event.metrics_address}/metrics")
        self.tell(f"{name} is ready at {event.address} ({', '.join(facts)})")

    def serving(self, gateway: Ready) -> None:
        """The whole service is up: how to call it."""
        self._end_bar()
        url = f"http://{reachable(gateway.address)}"
        for text in ("", *build_snippets(url, self._model, self._needs_key), "", "Ctrl-C stops the service."):
            self._console.print(text, markup=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        """One line for people."""
        self._console.print(text, markup=False, soft_wrap=True)

    def fail(self, text: str) -> None:
        """Why the service ends, on stderr."""
        self._end_bar()
        self._errors.write(f"baton serve: {text}\n")

    def log(self, name: str, line: str) -> None:
        """A log line of a process: readable on a terminal, else as it is on stderr, for machines."""
        if not self._console.is_terminal:
            self._errors.write(f"{line}\n")
        elif (text := render_log_line(line)) is not None:
            self._console.print(f"[dim]{name:>10}[/dim] {escape(text)}", soft_wrap=True)

    def _move_bar(self, what: str, done: int, total: int) -> None:
        if self._progress is None:
            columns = COLUMNS[what]()
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._progress.add_task(what, total=total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)
        if done >= total:
            self._end_bar()

    def _end_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def reachable(address: str) -> str:
    """An address to call from this machine, where a service listens on all interfaces."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if is_any(host) else address


def build_snippets(url: str, model: str, needs_key: bool) -> tuple[str, str, str]:
    """A curl command and a Python program to copy, with an empty line between."""
    header = ' -H "Authorization: Bearer $BATON_API_KEY"' if needs_key else ""
    key = "YOUR KEY" if needs_key else "none"
    curl = CURL.format(url=url, model=model, header=header, prompt=PROMPT)
    return curl, "", PYTHON.format(url=url, model=model, key=key, prompt=PROMPT)


def render_log_line(line: str) -> str | None:
    """A JSON log line as `level event key=value`; any other as it is. None for "ready", which is told anyway."""
    try:
        fields = json.loads(line)
        event, level = fields["event"], fields.get("level", "info")
    except (ValueError, KeyError, TypeError):
        return line
    if event == "ready":
        return None
    rest = (f"{key}={value}" for key, value in fields.items() if key not in LOG_FIELDS_LEFT_OUT)
    return " ".join((level, str(event), *rest))
