"""Joins call events to whole calls. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.tools.parse import Arguments, CallBegin, CallEvent


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Its arguments are complete unless the answer was cut off or they are malformed."""

    id: str
    name: str
    arguments: str  # JSON, an object


class CallCollector:
    """Collects the calls of one answer; each ends before the next begins."""

    def __init__(self) -> None:
        self._begun: CallBegin | None = None
        self._parts: list[str] = []

    def push(self, events: Iterable[CallEvent]) -> list[Call]:
        """Returns the calls that these events complete."""
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
