"""The adapters (LoRA) that requests may name, and what each worker has of them.

    pending ──loaded by the workers──► named ──unload, or other content under the name──► retired ──last use──► dropped
    (--lora)                             └────────────────────── without a use ────────────────────────────────────┘

An adapter is known by the digest of its content; a name points to one digest. Requests hold the digest that their name
had when they began. Workers keep named and retired ones loaded, and unload those dropped. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.errors import ApiError, not_ready


class Adapter(NamedTuple):
    """A name and what it points to."""

    name: str
    path: str  # folder on the workers' hosts
    digest: str


@dataclass(slots=True)
class AdapterRegistry:
    """Owns names and uses."""

    on_change: Callable[[], None] = lambda: None  # called when workers lack something
    on_drop: Callable[[str], None] = lambda _digest: None  # called with a digest that no worker needs any more
    named: dict[str, Adapter] = field(default_factory=dict)  # name |-> what requests for it get; pending without digest
    pending: dict[str, str] = field(default_factory=dict)  # name of --lora |-> why it is not loaded yet
    _uses: Counter[str] = field(default_factory=Counter)  # digest |-> choices that have it; no zeros
    _retired: dict[str, Adapter] = field(default_factory=dict)  # digest |-> in use, without a name

    def wanted(self) -> list[Adapter]:
        """What each worker is to have; each digest at least once."""
        return [*(one for one in self.named.values() if one.digest), *self._retired.values()]

    def wants(self, digest: str) -> bool:
        return any(one.digest == digest for one in self.wanted())

    def expect(self, name: str, path: str) -> None:
        """Requests may name it from now on, and wait until it is added."""
        self.named[name] = Adapter(name, path, "")
        self.pending[name] = "workers have not answered"

    def add(self, adapter: Adapter) -> None:
        """Requests for its name get it from now on; those that run keep what they have."""
        before = self.named.get(adapter.name)
        self.named[adapter.name] = adapter
        self._retired.pop(adapter.digest, None)
        self.pending.pop(adapter.name, None)
        if before is not None and before.digest:
            self._retire(before)
        self.on_change()

    def remove(self, name: str) -> bool:
        """The name is not served any more. False if it was unknown."""
        self.pending.pop(name, None)
        adapter = self.named.pop(name, None)
        if adapter is not None and adapter.digest:
            self._retire(adapter)
        return adapter is not None

    def _retire(self, adapter: Adapter) -> None:
        if self.wants(adapter.digest):
            return
        if self._uses[adapter.digest]:
            self._retired[adapter.digest] = adapter
        else:
            self.on_drop(adapter.digest)

    @contextmanager
    def hold(self, name: str) -> Iterator[str]:
        """The digest of the name, kept loaded until the block ends; empty for no name. Raises ApiError."""
        if not name:
            yield ""
            return
        if name not in self.named:
            raise ApiError(404, f"adapter '{name}' was unloaded meanwhile", "model", "model_not_found")
        if name in self.pending:
            raise not_ready(f"adapter '{name}' is not loaded yet: {self.pending[name]}")
        digest = self.named[name].digest
        self._uses[digest] += 1
        try:
            yield digest
        finally:
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest]
                if self._retired.pop(digest, None) is not None:
                    self.on_drop(digest)

    def check(self) -> None:
        """Raises AssertionError where a digest has a name and is retired, or is retired without a use."""
        names = {one.digest for one in self.named.values()}
        assert not names & self._retired.keys(), "retired, and has a name"
        assert self._retired.keys() <= self._uses.keys(), "retired without a use"
        assert all(self._uses.values()), "a use is miscounted"
