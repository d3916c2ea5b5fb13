"""`baton chat`: a chat in the terminal. Knows lines, commands and Ctrl-C; the rest is `cli/chat_client.py`."""

import io
import json
import sys
from contextlib import closing, suppress
from typing import Annotated, Any

from cyclopts import Parameter

from cli.chat_client import ChatError, Conversation

HELP = """/help                               this text
/stats                              time to first token and rate of the last answer
/metrics                            the service's metrics
/reset                              forget the conversation
/set temperature=0.5;max_tokens=100 fields of the next requests; /set alone shows them, NAME= drops one
/exit                               leave, as Ctrl-D does
Ctrl-C stops an answer."""


def chat(
    *,
    url: Annotated[str, Parameter(env_var="BATON_URL")] = "http://127.0.0.1:8000",
    model: str = "",
    api_key: Annotated[str, Parameter(env_var="BATON_API_KEY")] = "",
    system: str = "",
) -> int:
    """Chat with a served model in the terminal.

    Parameters
    ----------
    url
        Where the service answers.
    model
        Name of the model; empty asks the service.
    api_key
        Key that the service wants.
    system
        System message at the start of the conversation.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() a history and editing
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text cost their line, not the conversation
    try:
        with closing(Conversation(url, model, api_key, system)) as conversation:
            print(f"{conversation.model()} at {conversation.url}; /help lists commands")
            return talk(conversation)
    except ChatError as error:
        print(f"baton chat: {error}", file=sys.stderr)
        return 1


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
    """Answer one line, a command or something said; errors are printed."""
    try:
        if line.startswith("/"):
            print(run_command(conversation, line))
        else:
            print_answer(conversation, line)
    except ChatError as error:
        print(f"error: {error}")
    except KeyboardInterrupt:
        print("\n(stopped)")


def run_command(conversation: Conversation, line: str) -> str:
    """What a /command has to say."""
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
            return (
                " ".join(f"{key}={json.dumps(value)}" for key, value in conversation.options.items()) or "nothing set"
            )
    return f"unknown command {printable(name)}; /help lists them"


def set_options(options: dict[str, Any], text: str) -> None:
    """Apply `name=value;name=value`; values are JSON or plain words. Raises ChatError for anything else."""
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    for name, separator, _value in pairs:
        if not separator or not name.strip().isidentifier():
            raise ChatError(f"{name.strip()!r} is no setting: write /set temperature=0.5;max_tokens=100")
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
    """Print an answer as it comes. Ctrl-C closes the stream, which stops the model."""
    with closing(conversation.ask(text)) as pieces:
        for piece in pieces:
            print(printable(piece), end="", flush=True)
    print()


def printable(text: str) -> str:
    """Without control characters, which would steer the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
