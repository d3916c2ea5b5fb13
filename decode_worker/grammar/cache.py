"""A cache bounded by bytes: the least recently used values go first. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """key |-> value, of at most `max_bytes` together. The caller says how many bytes a value takes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which counts as used now; None if it is not here."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep the value, in place of an older one. One larger than `max_bytes` is not kept."""
        if key in self._values:
            self.num_bytes -= self._values.pop(key)[1]
        if num_bytes > self.max_bytes:
            return
        self._values[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _oldest, (_value, freed) = self._values.popitem(last=False)
            self.num_bytes -= freed

    def check(self) -> None:
        """Raises AssertionError unless the count is right and within its bound."""
        if self.num_bytes != sum(num_bytes for _value, num_bytes in self._values.values()):
            raise AssertionError(f"{self.num_bytes} bytes are counted, the values have others")
        if self.num_bytes > self.max_bytes:
            raise AssertionError(f"{self.num_bytes} bytes are kept, at most {self.max_bytes} may be")
