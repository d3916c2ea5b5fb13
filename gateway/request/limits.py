"""Range checks and their messages, which all rules share. Pure."""

from typing import TypeVar

from gateway.errors import bad_request

Number = TypeVar("Number", int, float)


def pick(given: Number | None, default: Number) -> Number:
    return default if given is None else given


def check_range(name: str, value: Number, lowest: Number, highest: Number) -> Number:
    """Returns the value if it is from `lowest` to `highest`. Raises ApiError naming the field."""
    if not lowest <= value <= highest:  # also true for NaN
        raise bad_request(f"{name} is {shown(value)}; it must be a number from {lowest:g} to {highest:g}", name)
    return value


def shown(number: float) -> str:
    """A number for an error message: as the client wrote it, unless it is long."""
    text = f"{number:g}" if isinstance(number, float) else str(number)
    return text if len(text) <= 40 else f"a number of {len(text)} digits"
