"""A virtual device: rows, and runners that compute a launched step only when it is collected, in order.

A launched step thus reads and writes as late as possible: whatever it needs must stay until then.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardRow
from engine.runner import ModelOutput
from tests.simulator.model import PAGE_TOKENS, Cells, Memory, choose_token, extend, read, with_weights
from tests.simulator.world import World
from wire.sampling import SamplingParams

WIDTH = 160  # positions in a row; no sequence is longer
RIGHT_DRAFTS = 0.7  # share of right drafts


class VirtualRows:
    """Like InputBatch. A sequence's seed stands for its cache salt, which determines its first position's KV."""

    vocab_size = 1 << 24

    def __init__(self, num_rows: int, weights: str) -> None:
        self._weights = weights
        self.tokens = [[-1] * WIDTH for _ in range(num_rows)]  # on the device
        self.seeds = [0] * num_rows
        self._pages = [[0] * (WIDTH // PAGE_TOKENS) for _ in range(num_rows)]  # on the host
        self._work: deque[Callable[[], None]] = deque()  # queued on the device

    def open(
        self, row: int, token_ids: NDArray[np.int32], sampling: SamplingParams, answer_begin: int, slot: int = -1,
        images: Sequence[object] = (),
    ) -> None:  # fmt: skip
        self.seeds[row] = with_weights(sampling.seed, self._weights)
        self.write_tokens([(row, 0, token_ids)])

    def close(self, row: int) -> None:
        self._pages[row] = [0] * (WIDTH // PAGE_TOKENS)

    def write_tokens(self, parts: Sequence[tuple[int, int, NDArray[np.int32]]]) -> None:
        def write() -> None:
            for row, begin, token_ids in parts:
                self.tokens[row][begin : begin + len(token_ids)] = token_ids.tolist()

        self.enqueue(write)

    def write_pages(self, row: int, first: int, pages: Sequence[int]) -> None:
        self._pages[row][first : first + len(pages)] = pages

    def pages_of(self, row: int, num_tokens: int) -> list[int]:
        """As copied to the device by a launch."""
        return self._pages[row][: -(-num_tokens // PAGE_TOKENS)]

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run the queued work until then."""
        while not is_done():
            self._work.popleft()()


class VirtualLaunched:
    """Like engine.runner.Launched."""

    def __init__(self, rows: VirtualRows, error: str) -> None:
        self.tokens: list[int] | None = None
        self.error = error
        self._rows = rows

    def collect(self) -> ModelOutput:
        self._rows.run_until(lambda: self.tokens is not None)
        if self.error:
            raise RuntimeError(self.error)
        assert self.tokens is not None
        return ModelOutput(self.tokens, [])


class VirtualRunner:
    """Like engine.runner.Runner: computes the KV of requests and the tokens they need."""

    def __init__(
        self, world: World, rows: VirtualRows, ranks: Sequence[Cells], states: Sequence[list[int]] = ()
    ) -> None:
        self._world = world
        self._rows = rows
        self._ranks = ranks
        self._states = states  # of each rank
        self.vocab_size = rows.vocab_size
        self._poisoned = -1  # a row on which every launch fails
        self._last: VirtualLaunched | None = None

    def launch(self, requests: Sequence[ForwardRow]) -> VirtualLaunched:
        error = self._fail(requests)
        if self._states and self._last is not None and self._last.tokens is None:
            error = error or self._last.error  # a device that fails does not compute what follows either
        launched = self._last = VirtualLaunched(self._rows, error)
        pages = [self._rows.pages_of(part.row, part.begin + part.count) for part in requests]
        parts = list(zip(requests, pages, strict=True))
        self._rows.enqueue(lambda: self._run(parts, launched))
        return launched

    def _fail(self, requests: Sequence[ForwardRow]) -> str:
        """Sometimes a request cannot be computed (raises), sometimes the device fails later (returns its error)."""
        share, rng = self._world.faults.failing, self._world.rng
        error = ""
        if share and self._poisoned < 0 and rng.random() < share:
            if rng.random() < 0.5:
                error = "the device failed"
            else:
                self._poisoned = rng.choice(requests).row
        if any(part.row == self._poisoned for part in requests):
            if len(requests) == 1:
                self._poisoned = -1
            elif any(part.row != self._poisoned for part in requests):  # others are launched again, so this runs first
                self._rows.enqueue(lambda: self._spoil(requests))
            raise RuntimeError("a request cannot be computed")
        return error

    def _spoil(self, requests: Sequence[ForwardRow]) -> None:
        """A forward that fails leaves states unfinished."""
        slots = [part.state_to for part in requests if part.state_to >= 0]
        for states in self._states:
            for slot in slots:
                states[slot] = 0

    def begin(self, requests: Sequence[ForwardRow]) -> Any:
        """No grammars here: no step waits for masks."""
        raise NotImplementedError

    choose = begin

    def _run(self, parts: Iterable[tuple[ForwardRow, list[int]]], launched: VirtualLaunched) -> None:
        """The device's part."""
        chosen: list[int] = []
        for part, pages in parts:
            if part.parents:
                chosen += self._run_tree(part, part.parents, pages)
                continue
            begin, end, tokens = part.begin, part.begin + part.count, self._rows.tokens[part.row]
            contents = read(self._ranks[0], pages, begin)
            extend(contents, self._find_seed(part.row), tokens[begin:end])
            added = [contents[begin:]] * len(self._ranks)
            if self._states:
                added = [self._step_state(part, states, tokens[begin:end]) for states in self._states]
                contents[begin:] = added[0]
            for position in range(begin, end):
                for cells, new in zip(self._ranks, added, strict=True):
                    cells[pages[position // PAGE_TOKENS]][position % PAGE_TOKENS] = new[position - begin]
            for last in range(end - part.num_logits, end):
                token = self._choose(part, pages, contents[: last + 1])
                tokens[last + 1] = token
                chosen.append(token)
        if launched.error:
            self._spoil([part for part, _ in parts])
        launched.tokens = chosen

    def _run_tree(self, part: ForwardRow, parents: Sequence[int], pages: Sequence[int]) -> list[int]:
        """As in engine/trees.py: its nodes lie one after the other until the right path is moved."""
        begin, tokens, contents, path = part.begin, self._rows.tokens[part.row], list[list[int]](), [0]
        for index, token in enumerate(tokens[begin : begin + part.count]):
            own = list(contents[parents[index - 1]]) if index else read(self._ranks[0], pages, begin)
            extend(own, self._find_seed(part.row), [token])
            contents.append(own)
            self._write(pages, begin + index, own[-1])
        chosen = [self._choose(part, pages, own) for own in contents]
        for index, parent in enumerate(parents, 1):
            if parent == path[-1] and tokens[begin + index] == chosen[parent]:
                path.append(index)
        self._move(pages, begin, path, part.count)
        tokens[begin + 1 : begin + 1 + len(path)] = [chosen[index] for index in path]
        return chosen

    def _write(self, pages: Sequence[int], position: int, content: int) -> None:
        for cells in self._ranks:
            cells[pages[position // PAGE_TOKENS]][position % PAGE_TOKENS] = content

    def _move(self, pages: Sequence[int], begin: int, path: Sequence[int], count: int) -> None:
        kept = read(self._ranks[0], pages, begin + count)[begin:]
        for depth, index in enumerate(path):
            self._write(pages, begin + depth, kept[index])

    def _step_state(self, part: ForwardRow, states: list[int], token_ids: Sequence[int]) -> list[int]:
        """The contents of a part's positions, which follow from one rank's state."""
        contents: list[int] = []
        last = states[part.state_from] if part.state_from >= 0 else self._find_seed(part.row)
        extend(contents, last, token_ids)
        states[part.state_to] = contents[-1]
        return contents

    def _find_seed(self, row: int) -> int:
        return self._rows.seeds[row]

    def _choose(self, part: ForwardRow, pages: Sequence[int], contents: Sequence[int]) -> int:
        return choose_token(contents)


class VirtualDraftRunner(VirtualRunner):
    """The draft model: its drafts are often right. It reads the model's KV to draft, and writes its own."""

    def __init__(self, world: World, rows: VirtualRows, memory: Memory) -> None:
        super().__init__(world, rows, memory.draft)
        self._main = memory.main[0]

    def _fail(self, requests: Sequence[ForwardRow]) -> str:
        return ""

    def _find_seed(self, row: int) -> int:
        return ~self._rows.seeds[row]

    def _choose(self, part: ForwardRow, pages: Sequence[int], contents: Sequence[int]) -> int:
        computed = len(contents) - part.num_drafted - 1  # by the model: all known tokens but the last
        found = read(self._main, pages, computed)
        extend(found, self._rows.seeds[part.row], self._rows.tokens[part.row][computed : len(contents)])
        return choose_token(found) ^ (self._world.rng.random() > RIGHT_DRAFTS)
