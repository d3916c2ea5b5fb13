"""Where settings come from: command line > environment (BATON_*) > the file named by --config.

Knows names and precedence; the library does the merging. A name that no command knows is an error, wherever it stands.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin

from cyclopts import App
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict, Env

from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig, ServeConfig
from runtime.settings import ConfigError, Settings, field_names

PREFIX = "BATON_"
CONFIG_TYPES: Mapping[str, type[Settings]] = {  # command |-> its settings
    "serve": ServeConfig,
    "gateway": GatewayConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "doctor": ServeConfig,
}
OTHER_VARIABLES = ("config", "url")  # options of the program itself, and of `chat` and `status`

Source = Callable[[App, tuple[str, ...], ArgumentCollection], Any]


def build_sources(path: Path | None) -> tuple[Source, ...]:
    """The sources below the command line, strongest first."""
    environment: Source = Env(PREFIX, command=False)
    return (check_environment, environment, FileSource(path)) if path else (check_environment, environment)


def check_environment(_app: App, _commands: tuple[str, ...], _arguments: ArgumentCollection) -> None:
    """Refuse BATON_* variables that no command knows: a misspelt one would be silently ignored."""
    known = {name for config_type in CONFIG_TYPES.values() for name in field_names(config_type)}
    variables = [PREFIX + name.upper() for name in (*known, *OTHER_VARIABLES)]
    for name in os.environ:
        if name.startswith(PREFIX):
            refuse_unknown(name, variables, "environment variable")


class FileSource:
    """A TOML file whose keys are the settings of the command that is run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        config_type = CONFIG_TYPES[commands[0]]
        table = {name.replace("-", "_"): value for name, value in read_toml(self._path).items()}
        for name in table:
            refuse_unknown(name, field_names(config_type), f"key in {self._path}")
        lists = {item.name for item in fields(config_type) if get_origin(item.type) is tuple}
        for name, value in table.items():
            if isinstance(value, list | dict) and not (name in lists and isinstance(value, list)):
                raise ConfigError(f"{name}={value!r} in {self._path} cannot be used: give one value")
        Dict({commands[0]: table}, source=str(self._path))(app, commands, arguments)


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table. Raises ConfigError that names the file and what is wrong with it."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"--config {path} is nested too deeply") from error


def refuse_unknown(name: str, known: Iterable[str], kind: str) -> None:
    """Raise ConfigError when `name` is not known, with the nearest that is."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0)
    raise ConfigError(f"unknown {kind}: {name}; did you mean {near[0]}?")


def split_variable(hint: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """The values in an environment variable: of a list, separated by commas or spaces."""
    return value.replace(",", " ").split(delimiter) if get_origin(hint) is tuple else [value]
