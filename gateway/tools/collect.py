"""Whole calls from the events of an answer. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.tools.parse import Arguments, CallBegin, CallEvent


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Its arguments are whole, unless the answer was cut off or they broke off."""

    id: str
    name: str
    arguments: str  # JSON, an object


class CallCollector:
    """Collects the calls of one answer; each is over before the next begins."""

    def __init__(self) -> None:
        self._begun: CallBegin | None = None
        self._parts: list[str] = []

    def push(self, events: Iterable[CallEvent]) -> list[Call]:
        """The calls that these events end."""
        ended = []
        for event in events:
            if isinstance(event, CallBegin):
                self._begun, self._parts = event, []
            elif isinstance(event, Arguments):
                self._parts.append(event.text)
            elif self._begun is not None:
                ended.append(Call(self._begun.id, self._begun.name, "".join(self._parts)))
                self._begun = None
        return ended
