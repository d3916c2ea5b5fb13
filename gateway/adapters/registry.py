"""The adapters (LoRA) that requests may name, and that workers are to have.

    pending ──found by all workers──► named ──unload, or other content under the name──► retired ──last use──► dropped
    (--lora)                            ▲└────────────────────── without a use ────────────────────────────────────┘
    tried ──────found by all workers────┘
    (API)

An adapter is known by the digest of its content; a name points to one digest. Requests hold the digest that their name
had when they began. Workers load all that is wanted, and unload what is dropped. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.errors import ApiError, not_ready


@dataclass(slots=True, eq=False)
class Adapter:
    """A folder that workers are to load."""

    name: str
    path: str  # on the workers' hosts
    digest: str = ""  # of its content; empty: workers have still to find it
    reason: str = "workers have not answered"  # why, while it is pending


@dataclass(slots=True)
class AdapterRegistry:
    """Owns names and uses."""

    on_change: Callable[[], None] = lambda: None  # called when workers lack something, or need it no more
    named: dict[str, Adapter] = field(default_factory=dict)  # what requests for a name get; pending without digest
    _tried: list[Adapter] = field(default_factory=list)
    _uses: Counter[str] = field(default_factory=Counter)  # digest |-> choices that have it; no zeros
    _retired: dict[str, Adapter] = field(default_factory=dict)  # digest |-> in use, without a name

    def wanted(self) -> list[Adapter]:
        """The adapters that each worker is to have; each digest at least once."""
        return [*self.named.values(), *self._retired.values(), *self._tried]

    @property
    def pending(self) -> dict[str, str]:
        """Name |-> why it is not loaded yet."""
        return {name: adapter.reason for name, adapter in self.named.items() if not adapter.digest}

    def expect(self, name: str, path: str) -> None:
        """Requests may name it from now on, and wait until it is added."""
        self.named[name] = Adapter(name, path)
        self.on_change()

    @contextmanager
    def trying(self, name: str, path: str) -> Iterator[Adapter]:
        """An adapter that workers load, and drop again where it is not added until the block ends."""
        adapter = Adapter(name, path)
        self._tried.append(adapter)
        self.on_change()
        try:
            yield adapter
        finally:
            self._tried.remove(adapter)
            self.on_change()

    def add(self, adapter: Adapter, digest: str) -> None:
        """Requests for its name get it from now on; those that run keep what they have."""
        adapter.digest = digest
        before, self.named[adapter.name] = self.named.get(adapter.name), adapter
        self._retired.pop(digest, None)
        self._retire(before)
        self.on_change()

    def remove(self, name: str) -> bool:
        """Stops serving the name. False if it was unknown."""
        adapter = self.named.pop(name, None)
        self._retire(adapter)
        self.on_change()
        return adapter is not None

    def _retire(self, adapter: Adapter | None) -> None:
        """Keeps an adapter that has lost its name for as long as requests use it."""
        named = {one.digest for one in self.named.values()}
        if adapter is not None and adapter.digest not in named and self._uses[adapter.digest]:
            self._retired[adapter.digest] = adapter

    @contextmanager
    def hold(self, name: str) -> Iterator[str]:
        """The digest of the name, kept loaded until the block ends; empty for no name. Raises ApiError."""
        if not name:
            yield ""
            return
        if name not in self.named:
            raise ApiError(404, f"adapter '{name}' was unloaded meanwhile", "model", "model_not_found")
        digest = self.named[name].digest
        if not digest:
            raise not_ready(f"adapter '{name}' is not loaded yet: {self.named[name].reason}")
        self._uses[digest] += 1
        try:
            yield digest
        finally:
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest]
                if self._retired.pop(digest, None) is not None:
                    self.on_change()

    def check(self) -> None:
        """Raises AssertionError where a digest has a name and is retired, or is retired without a use."""
        names = {one.digest for one in self.named.values()}
        assert not names & self._retired.keys(), "retired, and has a name"
        assert self._retired.keys() <= self._uses.keys(), "retired without a use"
        assert all(self._uses.values()), "a use is miscounted"
