"""Which tree to draft: as many of the most promising nodes as are worth their rows (lengths.py). Pure.

A node is the path of branches to it: (0, 0, 1) is the second choice after twice the first. With acceptance a the first
choice after a right node is right in a of all cases, the b-th one in (1 - a) q; q is measured, for each depth and b.
Nodes without siblings are a chain, whose n-th draft is worth a**n.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

from wire.sampling import MAX_DRAFT_TOKENS

MOST_BRANCHES = 4  # children of a node
PRIOR_SHARES = (0.3, 0.15, 0.1)  # of the cases in which the first choice is wrong, those in which others are right
PRIOR_TRIALS = 10.0  # how many observations that belief is worth
DECAY = 0.998  # of what was observed, an observation: the last 500 count
KEPT_NOTES = 128  # observations for which trees are planned as before them: to plan one takes 50 us

Path = tuple[int, ...]
Choices = Callable[[Sequence[int]], Sequence[int]]
"""Tokens drafted after the known ones |-> the next one's candidates, the most promising first; none: not drafted"""


class Branches:
    """How often a drafter's second, third, ... choices were right where its first was not, by depth. Of all answers."""

    def __init__(self, go_on: bool = True) -> None:
        """go_on: something is drafted behind other choices than the first, too."""
        self.go_on = go_on
        self._tried = [PRIOR_TRIALS] * MAX_DRAFT_TOKENS
        self._right = [[share * PRIOR_TRIALS for share in PRIOR_SHARES] for _ in self._tried]
        self._num_notes = 0
        self._planned: dict[tuple[int, float, int], list[tuple[float, bool]]] = {}  # see `list_nodes`

    def note(self, depth: int, branch: int | None) -> None:
        """After `depth` right drafts the first choice was wrong; `branch` was right, or none of those that count."""
        self._tried[depth] = self._tried[depth] * DECAY + 1
        for at, right in enumerate(self._right[depth], 1):
            self._right[depth][at - 1] = right * DECAY + (at == branch)
        self._num_notes += 1
        if self._num_notes % KEPT_NOTES == 0:
            self._planned.clear()

    def list_nodes(self, count: int, acceptance: float, most_depth: int) -> list[tuple[float, bool]]:
        """The first `count` nodes: the chance of each to be right, and whether it is the first of its depth."""
        key = count, acceptance, most_depth
        if (found := self._planned.get(key)) is None:
            found, depth = [], 0
            for chance, path in islice(grow(acceptance, self, lambda path: len(path) <= most_depth), count):
                found.append((chance, len(path) > depth))
                depth = max(depth, len(path))
            self._planned[key] = found
        return found

    def rate(self, depth: int, branch: int, acceptance: float) -> float:
        """The chance that a branch after `depth` right drafts is right."""
        if not branch:
            return acceptance
        return (1 - acceptance) * self._right[depth][branch - 1] / self._tried[depth]


def grow(
    acceptance: float, branches: Branches, has: Callable[[Path], bool] = lambda path: True
) -> Iterator[tuple[float, Path]]:
    """Nodes and their chances to be right, the most promising first, each behind its parent. has: which ones exist."""
    waiting: list[tuple[float, Path, float]] = [(-acceptance, (0,), 1.0)]
    while waiting:
        chance, path, parents = heappop(waiting)
        if not has(path):
            continue
        yield -chance, path
        depth, branch = len(path), path[-1] + 1
        if depth < MAX_DRAFT_TOKENS and (branches.go_on or not path[-1]):
            heappush(waiting, (chance * branches.rate(depth, 0, acceptance), (*path, 0), -chance))
        if branch < MOST_BRANCHES:
            own = parents * branches.rate(depth - 1, branch, acceptance)
            heappush(waiting, (-own, (*path[:-1], branch), parents))


def find_depth(count: int, acceptance: float, branches: Branches, most_depth: int) -> int:
    """The depth of the tree of the first `count` nodes."""
    return sum(is_first for _, is_first in branches.list_nodes(count, acceptance, most_depth))


def plant(count: int, acceptance: float, branches: Branches, choices: Choices) -> tuple[list[int], list[int]]:
    """Up to `count` drafts and their parents (`ScheduledSequence`), a path of first choices first; a chain has none."""
    tokens: dict[Path, tuple[int, ...]] = {(): ()}  # of a path

    def has(path: Path) -> bool:
        before = tokens[path[:-1]]
        options = choices(before)
        if is_there := path[-1] < len(options):
            tokens[path] = (*before, options[path[-1]])
        return is_there

    paths = sorted(path for _, path in islice(grow(acceptance, branches, has), count))
    index: dict[Path, int] = {(): 0} | {path: number for number, path in enumerate(paths, 1)}
    drafts, parents = [tokens[path][-1] for path in paths], [index[path[:-1]] for path in paths]
    return drafts, parents if any(map(any, paths)) else []
