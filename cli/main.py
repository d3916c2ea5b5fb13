"""The `baton` program: finds the command and its options, and says what was wrong with them."""

import atexit
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import MissingArgumentError, UnusedCliTokensError
from rich.panel import Panel
from rich.text import Text

from cli.service import CommandError
from cli.sources import CONFIG_TYPES, split_variable, use_sources
from runtime.hardware import OWN_VERSION
from runtime.settings import ConfigError

FIRST = f"""Baton {OWN_VERSION}, a service for large language models. To begin:

  baton serve              start a service with a small model that is part of Baton
  baton chat               talk to it, from another terminal, or at http://127.0.0.1:8000
  baton status --watch     see its workers at work
  baton doctor             what this machine can do, and what it lacks

A model of your own is a folder, a GGUF file or a name on the Hugging Face hub:

  baton serve --model Qwen/Qwen3-0.6B

baton --help lists all commands, baton serve --help the options of one."""
COMMANDS = {  # a command's file is imported when it is run, or its --help is asked for
    "serve": ("serve", "gateway", "prefill", "decode", "worker"),
    "doctor": ("doctor",),
    "chat": ("chat",),
    "launch": ("launch",),
    "status": ("status",),
    "certs": ("certs",),
    "keys": ("keys",),
    "drain": ("drain",),
    "role": ("role",),
    "rollout": ("rollout",),
    "bench": ("plan", "bench"),
}


def describe_error(error: CycloptsError) -> Panel:
    """The library's words, but all missing options at once, and what a word without an option may have been."""
    command = (error.command_chain or ("",))[0]
    text = str(error)
    if isinstance(error, MissingArgumentError) and not error.keyword and error.app and error.target:
        arguments = error.app.assemble_argument_collection()
        given = {word.partition("=")[0] for word in error.root_input_tokens or ()}
        missing = [one.name for one in arguments if one.required and one.name[0] == "-" and not given & set(one.names)]
        text = f"{command} needs {', '.join(missing)}." if len(missing) > 1 else text
    elif isinstance(error, UnusedCliTokensError) and command in CONFIG_TYPES:
        words = " ".join(error.unused_tokens or ())
        text = f"{command} takes options only, not {words!r}. Did you mean --model {words}?"
    return Panel(Text(text), title="Error", title_align="left", border_style="red", expand=True)


app = App(
    name="baton",
    help="LLM inference with prefill and decode in separate processes.",
    help_epilogue="The --config file is TOML: its keys are the options of the command. serve, gateway, prefill, decode "
    "and doctor also read each option from a variable, BATON_PORT for --port. The command line is strongest, then the "
    "environment, then the file.",
    version=OWN_VERSION,
    exit_on_error=False,
    default_parameter=Parameter(env_var_split=split_variable, negative_iterable=()),
    result_action="return_value",
    error_formatter=describe_error,
)
for module, names in COMMANDS.items():
    for name in names:
        app.command(f"cli.{module}:{name}", name=name)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Path | None = None,
) -> int:
    """Run a command with its options from command line, environment and file.

    Args:
        config: TOML file with options of the command; weaker than environment and command line. serve, gateway,
            prefill, decode, worker and doctor also take it from BATON_CONFIG.
    """
    use_sources(app, tokens[0] if tokens else "", config)
    try:
        return int(app(tokens) or 0)
    except ImportError as error:
        if (package := find_missing(error)) is None:
            raise
        advice = "an environment for gateways alone lacks it; use that of workers, or install Baton with all it needs"
        print(f"baton {tokens[0]} needs {package}, which is not installed here: {advice}", file=sys.stderr)
        return 1
    except CommandError as error:
        print(f"baton {tokens[0]}: {error}", file=sys.stderr)
        return 1


def find_missing(error: ImportError) -> str | None:
    """The package that is not installed; None if something else is wrong."""
    name = getattr(error.__cause__ or error, "name", None) or ""  # the command line's library puts its own error around
    package = name.partition(".")[0]
    return package if package and find_spec(package) is None else None


def keep_delimiter(words: Sequence[str]) -> list[str]:
    """The words, with a second "--" behind the first, which `app.meta` removes before the command reads the rest."""
    place = words.index("--") if "--" in words else len(words)
    return [*words[:place], *words[place : place + 1], *words[place:]]


def run() -> None:
    """`main` as a whole process. At its end nothing is freed: with torch and a model that takes seconds.

    Threads have ended by then, and the functions that `atexit` knows have run.
    """
    codes: list[int] = []
    atexit.register(_exit, codes)  # the first is the last to run
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, int):
            codes.append(ended.code)
        raise


def _exit(codes: Sequence[int]) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return  # Python reports it
    if codes:
        os._exit(codes[0])


def main() -> None:
    """Runs the command that `sys.argv` names, and ends by SystemExit."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # before its import: what we fork runs another program
    if not sys.argv[1:]:
        print(FIRST)
        sys.exit(0)
    if sys.argv[1] in ("--help", "-h"):
        for names in COMMANDS.values():
            for name in names:
                app[name]  # imports the command, whose help is shown
    try:
        code = app.meta(keep_delimiter(sys.argv[1:]), result_action="return_value")
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        code = 2
    except CycloptsError:  # printed already
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    run()
