"""Where options come from: command line > environment (BATON_*) > the file named by --config.

The library merges. An unknown name is an error, wherever it stands; an empty variable is none.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, get_origin

from cyclopts import App
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict, Env

from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig, RolesConfig, ServeConfig
from runtime.settings import ConfigError, Settings, field_names

PREFIX = "BATON_"
CONFIG_TYPES: Mapping[str, type[Settings]] = {  # command |-> its settings, each of which is also a variable
    "serve": ServeConfig,
    "gateway": GatewayConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "worker": RolesConfig,
    "doctor": ServeConfig,
}
# Of the program itself, of commands that call a service, of kernels and what they are given, of folders.
OTHER_VARIABLES = ("config", "url", "cpu_isa", "check_steps", "cache_is_private")
NAMES = {name for config_type in CONFIG_TYPES.values() for name in field_names(config_type)}
VARIABLES = sorted(PREFIX + name.upper() for name in (*NAMES, *OTHER_VARIABLES))
KEYS = PREFIX + "API_KEY"  # of a service; its clients, in the same environment, send one

Source = Callable[[App, tuple[str, ...], ArgumentCollection], Any]


def use_sources(app: App, command: str, path: Path | None) -> None:
    """Give a command the sources below its command line, strongest first: variables, then the file at `path`.

    Only the commands of CONFIG_TYPES read variables, and a file named by BATON_CONFIG: it suits no other command.
    """
    for name in VARIABLES:
        if os.environ.get(name) == "":
            del os.environ[name]
    if command not in CONFIG_TYPES and (keys := os.environ.get(KEYS)):
        os.environ[KEYS] = next(iter(split_variable(tuple[str, ...], keys)), "")
    variable = os.environ.get(PREFIX + "CONFIG")
    file = path or (Path(variable) if variable else None)
    of_process = (check_environment, Env(PREFIX, command=False), *([file_source(file)] if file else ()))
    if command in set(app) - set(app.help_flags) - set(app.version_flags):
        app[command].config = of_process if command in CONFIG_TYPES else (file_source(path),) if path else ()


def check_environment(_app: App, _commands: tuple[str, ...], _arguments: ArgumentCollection) -> None:
    """Refuse BATON_* variables that no command knows: a misspelt one would be silently ignored."""
    for name in os.environ:
        if name.startswith(PREFIX):
            refuse_unknown(name, VARIABLES, "environment variable")


def file_source(path: Path) -> Source:
    """A TOML file whose keys are the options of the command that is run."""

    def read(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        options = {key_of(name): one for one in arguments for name in one.names if name.startswith("--")}
        table = {key_of(name): value for name, value in read_toml(path).items()}
        for name, value in table.items():
            refuse_unknown(name, options, f"key in {path}")
            is_list = isinstance(value, list) and get_origin(options[name].hint) is tuple
            if isinstance(value, list | dict) and not is_list:
                raise ConfigError(f"{name}={value!r} in {path} cannot be used: give one value")
        by_command = reduce(lambda inner, command: {command: inner}, reversed(commands), table)
        Dict(by_command, source=str(path))(app, commands, arguments)

    return read


def key_of(name: str) -> str:
    """An option's name as a key: `--max-queue` and `max-queue` are `max_queue`."""
    return name.removeprefix("--").replace("-", "_")


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table. Raises ConfigError that names the file and what is wrong with it."""
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error


def refuse_unknown(name: str, known: Iterable[str], kind: str) -> None:
    """Raise ConfigError when `name` is not known, with the nearest that is."""
    names = sorted(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0)
        raise ConfigError(f"unknown {kind}: {name}" + "".join(f"; did you mean {one}?" for one in near))


def split_variable(hint: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """The values in an environment variable: of a list, separated by commas or spaces, unless it is one path."""
    if get_origin(hint) is tuple and "/" in value and Path(value).exists():
        return [value]
    return value.replace(",", " ").split(delimiter) if get_origin(hint) is tuple else [value]
