"""`baton chat`: a chat in the terminal. Knows lines, commands and Ctrl-C; the rest is in `cli/chat_client.py`."""

import io
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import chain
from typing import Any

from rich.cells import cell_len

from cli.chat_client import Conversation
from cli.service import URL, ApiKey, CommandError, Service, Url

HELP = """/help                               this text
/stats                              time to first token and rate of the last answer
/metrics                            the service's metrics
/reset                              forget the conversation
/set temperature=0.5;max_tokens=100 fields of the next requests; /set alone shows them, NAME= drops one
/exit                               leave, as Ctrl-D does
Ctrl-C stops an answer."""
WORD = re.compile(r"\s|[^\s\u2e80-\U0003ffff]+|[\u2e80-\U0003ffff]")  # or a character of a script without spaces


def chat(*, url: Url = URL, model: str = "", api_key: ApiKey = "", system: str = "") -> int:
    """Chat with a served model in the terminal.

    Args:
        model: Name of the model; empty asks the service.
        system: System message at the start of the conversation.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() a history and editing
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is refused alone; the chat goes on
    with closing(Service(url, api_key)) as service:
        conversation = Conversation(service, model, system)
        print(f"{conversation.model()} at {service.url}; /help lists commands")
        return talk(conversation)


def talk(conversation: Conversation) -> int:
    """Read lines and answer them until the end of input or /exit."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D leaves")
            continue
        if line == "/exit":
            return 0
        if line:
            run_line(conversation, line)


def run_line(conversation: Conversation, line: str) -> None:
    """Answer one line, a command or a message; errors are printed."""
    try:
        if line.startswith("/"):
            print(run_command(conversation, line))
        else:
            print_answer(conversation, line)
    except CommandError as error:
        print(f"error: {error}")
    except KeyboardInterrupt:
        print("\n(stopped)")


def run_command(conversation: Conversation, line: str) -> str:
    """What a /command shows."""
    name, _, rest = line.partition(" ")
    match name:
        case "/help":
            return HELP
        case "/stats":
            return conversation.stats.describe()
        case "/metrics":
            return "\n".join(conversation.metrics())
        case "/reset":
            conversation.reset()
            return "the conversation is forgotten"
        case "/set":
            set_options(conversation.options, rest)
            options = conversation.options.items()
            return " ".join(f"{key}={json.dumps(value)}" for key, value in options) or "nothing set"
    return f"unknown command {printable(name)}; /help lists them"


def set_options(options: dict[str, Any], text: str) -> None:
    """Apply `name=value;name=value`; values are JSON or plain words. Raises CommandError for anything else."""
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    for name, separator, _value in pairs:
        if not separator or not name.strip().isidentifier():
            raise CommandError(f"{name.strip()!r} is no setting: write /set temperature=0.5;max_tokens=100")
    for name, _separator, value in pairs:
        if value.strip():
            options[name.strip()] = parse_value(value.strip())
        else:
            options.pop(name.strip(), None)


def parse_value(text: str) -> Any:
    """A number, list or word as JSON reads it; what JSON cannot read is the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def print_answer(conversation: Conversation, text: str) -> None:
    """Print an answer as it comes, at a terminal between words. Ctrl-C closes the stream, which stops the model."""
    with closing(conversation.ask(text)) as parts:
        shown = map(printable, parts)
        for part in wrap(shown, shutil.get_terminal_size().columns) if sys.stdout.isatty() else shown:
            print(part, end="", flush=True)
    print()


def wrap(parts: Iterable[str], width: int) -> Iterator[str]:
    """A text word by word, with line ends where a word would cross the last column. A word waits for its end."""
    column, rest = 0, ""
    for part in chain(filter(None, parts), [""]):  # the last one ends the last word
        words = WORD.findall(rest + part)
        rest = words.pop() if part and not words[-1].isspace() else ""
        for word in words:
            size = cell_len(word)
            if word == "\n":
                column = 0
            elif column > 0 and column + size > width:
                if word.isspace():
                    continue  # the line ends here
                yield "\n"
                column = 0
            yield word
            column += size if size <= width else size % width


def printable(text: str) -> str:
    """Without control characters, which would change the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
