"""The output of `baton serve`: lines and a progress bar for people on a terminal, JSON lines for machines elsewhere.

Knows words and layout; decides nothing.
"""

import json
import sys
from typing import Any

import structlog
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cli.service import URL
from runtime.addresses import is_any
from runtime.config_parts import LogFormat
from runtime.events import NO_HAND_OFF, Loading, Ready
from runtime.logs import is_text, unfailing

log = structlog.get_logger()

TO_TRY = """Baton answers at {url}. Three things to try:

  in a browser           {url}
  in another terminal    baton chat{flags}
  by any program         curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{prompt}"}}], "stream": true}}'

Ctrl-C stops the service."""
PROMPT = "Hello! How are you?"
READY_EVENTS = ("ready", "listening")  # of workers and gateways
FACTS_SHOWN = ("device", "dtype", "quantization", "attention", "grpc")  # of a process; machines read all
LOG_FIELDS_LEFT_OUT = ("event", "level", "timestamp", "role")
PIPE_WIDTH = 160  # characters of a table where no terminal has a width


class Screen:
    """Where stdout is a terminal, or else stderr, people read there. JSON lines go to stderr unless it is a terminal.

    --log-format text or json leaves one of the two, terminal or not.

    What cannot be written is lost, because the reader has left or the disk is full: the service goes on.
    """

    def __init__(self, model: str, needs_key: bool, has_tls: bool = False, log_format: LogFormat = "auto") -> None:
        """`model` is the served name. Logging is set up already, so that writing to stderr never fails."""
        self._model = model
        self._needs_key = needs_key
        self._scheme = "https" if has_tls else "http"
        self._is_for_machines = not is_text(log_format, sys.stderr)
        readable = [stream for stream in (unfailing(sys.stdout), sys.stderr) if stream.isatty()]
        readable = {"auto": readable, "text": readable or [sys.stderr], "json": []}[log_format]
        self._console = Console(file=readable[0], highlight=False) if readable else None
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=self._console, disable=self._console is None or not self._console.is_terminal,
            transient=True, redirect_stderr=False,
        )  # fmt: skip
        self._bars: dict[str, TaskID] = {}  # process and what it loads |-> its bar

    def say(self, text: str, event: str = "", level: str = "info", **fields: object) -> None:
        """`text` for people, and for machines `event` with its fields, or the text where that is empty."""
        if self._console is not None:
            self._console.print(text, markup=False, soft_wrap=True)
        if self._is_for_machines:
            getattr(log, level)(event or text, **fields)

    def fail(self, text: str) -> None:
        """Why the service ends."""
        self._progress.stop()
        self.say(f"baton serve: {text}", text, "error")

    def loading(self, name: str, event: Loading) -> None:
        """A process loads weights or captures graphs."""
        what = f"{event.total / 1e6:.1f} MB of weights" if event.what == "weights" else f"{event.total} CUDA graphs"
        is_done = event.done >= event.total
        if is_done and self._is_for_machines:
            log.info("loaded", process=name, what=what)
        bar = f"{name}: {what}"
        if bar not in self._bars:
            self._bars[bar] = self._progress.add_task(bar, total=event.total)
        self._progress.update(self._bars[bar], completed=event.done, visible=not is_done)
        (self._progress.start if any(task.visible for task in self._progress.tasks) else self._progress.stop)()

    def ready(self, name: str, event: Ready) -> None:
        """A process takes requests. Its own log line of that is left out."""
        facts: dict[str, Any] = {"pid": event.pid, **event.detail}
        facts.pop(NO_HAND_OFF, None)  # shown when all are ready
        if event.ops_address:
            facts["metrics"] = f"http://{event.ops_address}/metrics"
        shown = ", ".join(f"{key} {facts[key]}" for key in FACTS_SHOWN if facts.get(key, "none") != "none")
        text = f"{name} is ready at {event.address} ({shown})"
        self.say(text, "ready", process=name, address=event.address, incarnation=event.incarnation, **facts)

    def serving(self, gateway: Ready) -> None:
        """The whole service is up: how to call it."""
        self._progress.stop()
        url = f"{self._scheme}://{reachable(gateway.address)}"
        note = gateway.detail.get(NO_HAND_OFF, "")
        lines = (*([f"\n{note}"] if note else []), "", list_things_to_try(url, self._model, self._needs_key))
        self.say("\n".join(lines), "serving", url=url, **({NO_HAND_OFF: note} if note else {}))

    def log(self, name: str, line: str) -> None:
        """A log line of a process."""
        shown = render_log_line(line)
        if shown is not None and self._is_for_machines:
            sys.stderr.write(f"{line}\n")
        elif shown is not None and self._console is not None:
            self._console.print(f"[dim]{name:>10}[/dim] {escape(shown)}", soft_wrap=True)


def open_console() -> Console:
    """Stdout for tables, wide where it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def reachable(address: str) -> str:
    """An address to call from this machine, where a service listens on all interfaces."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if is_any(host) else address


def list_things_to_try(url: str, model: str, needs_key: bool) -> str:
    """The page, the chat, and a command to copy. `chat` and the command take the key from a variable."""
    header = ' -H "Authorization: Bearer $BATON_API_KEY"' if needs_key else ""
    flags = "" if url == URL else f" --url {url}"
    return TO_TRY.format(url=url, model=model, header=header, flags=flags, prompt=PROMPT)


def render_log_line(line: str) -> str | None:
    """A JSON log line as `level event key=value`; any other as it is. None for what `Screen.ready` shows."""
    try:
        fields = json.loads(line)
        event, level = fields["event"], fields.get("level", "info")
    except (ValueError, KeyError, TypeError):
        return line
    if event in READY_EVENTS:
        return None
    rest = (f"{key}={value}" for key, value in fields.items() if key not in LOG_FIELDS_LEFT_OUT)
    return " ".join((level, str(event), *rest))
