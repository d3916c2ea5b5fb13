"""What a class of settings is: frozen, complete and valid, or not built at all.

Knows fields, how they are spelt and what to say of a bad value; no setting by name, nor where values come from
(command line, environment, file): that is `cli/`. A string below a field is its line in `--help`.
"""

from dataclasses import dataclass, fields

MAX_PORT = 65535


class ConfigError(ValueError):
    """A setting that cannot be used. Names the field, its value and what would do."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checks itself when built: each class checks its own fields, then hands on to the next."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""

    def require(self, name: str, is_valid: bool, wanted: str) -> None:
        """Refuse the value of field `name`, unless it is valid; `wanted` says what would do."""
        if not is_valid:
            raise ConfigError(f"{name}={getattr(self, name)!r} cannot be used: {flag(name)} needs {wanted}")

    def require_at_least(self, name: str, least: int) -> None:
        """Refuse an integer below `least`."""
        self.require(name, getattr(self, name) >= least, f"{least} or more")

    def require_positive(self, name: str) -> None:
        """Refuse 0 and below."""
        self.require(name, getattr(self, name) > 0, "a number above 0")

    def require_port(self, name: str) -> None:
        """Refuse what is no TCP port."""
        port = getattr(self, name)
        self.require(name, port is None or 0 <= port <= MAX_PORT, f"0 to {MAX_PORT}; 0 takes any free port")


def flag(name: str) -> str:
    """The command-line spelling of a field's name."""
    return "--" + name.replace("_", "-")


def field_names(config_type: type[Settings]) -> tuple[str, ...]:
    """The fields of a config class, inherited ones included."""
    return tuple(item.name for item in fields(config_type))
