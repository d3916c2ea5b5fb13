"""The base of classes of settings: frozen, complete and valid, or not built at all. Values come from `cli/`.

A field's annotation has its checks; the string below it is its line in `--help`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, get_type_hints

MAX_PORT = 65535
MAX_COUNT = 2**32 - 1  # counts travel as uint32
MAX_SECONDS = 10**9  # deadlines of gRPC and of locks overflow beyond 9 * 10**9


Check = Callable[["Settings", str], None]  # of a field by its name; raises ConfigError


class ConfigError(ValueError):
    """A setting that cannot be used. Names the field, its value and what it takes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checks itself when built: first each field by its annotation, such as `Seconds`, then what a class adds."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        hints = get_type_hints(type(self), include_extras=True)
        for name in field_names(type(self)):
            for check in getattr(hints[name], "__metadata__", ()):
                check(self, name)

    def require(self, name: str, is_valid: bool, wanted: str) -> None:
        """Refuse the value of field `name` unless it is valid; `wanted` says which values are."""
        if not is_valid:
            raise ConfigError(f"{name}={getattr(self, name)!r} cannot be used: {flag(name)} needs {wanted}")

    def require_count(self, name: str, least: int, most: int = MAX_COUNT) -> None:
        """Refuse an integer below `least` or above `most`; None passes."""
        number = getattr(self, name)
        if number is not None:
            self.require(name, number >= least, f"{least} or more")
            self.require(name, number <= most, f"{most} or less")


def count(least: int, most: int = MAX_COUNT) -> Check:
    """A check for annotations: Annotated[int, count(1)] is 1 to MAX_COUNT."""
    return partial(Settings.require_count, least=least, most=most)


def needs(is_valid: Callable[[Any], bool], wanted: str) -> Check:
    """A check for annotations: a value that `wanted` describes."""
    return lambda config, name: config.require(name, is_valid(getattr(config, name)), wanted)


_is_short = needs(lambda seconds: seconds <= MAX_SECONDS, f"{MAX_SECONDS} or less")
is_port = needs(lambda port: port is None or 0 <= port <= MAX_PORT, f"0 to {MAX_PORT}; 0 takes any free port")
Positive = Annotated[int, count(1)]
Port = Annotated[int, is_port]
Seconds = Annotated[float, needs(lambda seconds: seconds > 0, "a number above 0"), _is_short]
SecondsOrZero = Annotated[float, needs(lambda seconds: seconds >= 0, "0 or more"), _is_short]
Share = Annotated[float, needs(lambda share: 0 < share <= 1, "a number above 0 and at most 1")]


def flag(name: str) -> str:
    """The command-line spelling of a field's name."""
    return "--" + name.replace("_", "-")


def field_names(config_type: type[Settings]) -> tuple[str, ...]:
    """The fields of a config class, inherited ones included."""
    return tuple(item.name for item in fields(config_type))
