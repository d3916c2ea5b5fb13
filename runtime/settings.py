"""What a class of settings is: frozen, complete and valid, or not built at all.

Knows fields, their spelling and the error for a bad value. Names no setting, and does not know where values come from
(command line, environment, file): `cli/` does. The string below a field is its line in `--help`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, get_type_hints

MAX_PORT = 65535
MAX_COUNT = 2**32 - 1  # counts travel as uint32
MAX_SECONDS = 10**9  # deadlines of gRPC and of locks overflow beyond 9 * 10**9


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

    def require_seconds(self, name: str, may_be_zero: bool = False) -> None:
        """Refuse a number that is no time to wait."""
        seconds = getattr(self, name)
        is_wait = seconds >= 0 if may_be_zero else seconds > 0
        self.require(name, is_wait, "0 or more" if may_be_zero else "a number above 0")
        self.require(name, seconds <= MAX_SECONDS, f"{MAX_SECONDS} or less")

    def require_port(self, name: str) -> None:
        """Refuse what is no TCP port; None passes."""
        port = getattr(self, name)
        self.require(name, port is None or 0 <= port <= MAX_PORT, f"0 to {MAX_PORT}; 0 takes any free port")


def count(least: int, most: int = MAX_COUNT) -> Callable[[Settings, str], None]:
    """For annotations: Annotated[int, count(1)] is 1 to MAX_COUNT."""
    return partial(Settings.require_count, least=least, most=most)


Positive = Annotated[int, count(1)]
Port = Annotated[int, Settings.require_port]
Seconds = Annotated[float, Settings.require_seconds]
SecondsOrZero = Annotated[float, partial(Settings.require_seconds, may_be_zero=True)]


def flag(name: str) -> str:
    """The command-line spelling of a field's name."""
    return "--" + name.replace("_", "-")


def field_names(config_type: type[Settings]) -> tuple[str, ...]:
    """The fields of a config class, inherited ones included."""
    return tuple(item.name for item in fields(config_type))
