"""Where the last tokens of a text stand before, and what followed them there. Pure."""

from array import array
from collections.abc import Iterator

TOKEN_BYTES = array("i").itemsize
WINDOW = 8192  # tokens searched: 40 microseconds
LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens; one alone repeats by chance all the time


def propose_repeat(tokens: "array[int]", count: int) -> list[int]:
    """The first of `find_repeats`; empty when nothing repeats."""
    return next(find_repeats(tokens, count), [])


def find_repeats(tokens: "array[int]", count: int) -> Iterator[list[int]]:
    """`count` tokens that followed each earlier place, of the last WINDOW tokens, where the last few tokens stand.

    `tokens`: array("i"). Longer matches first, among equals the latest. A place near the end, as in "ababab", is read
    on into what it proposes itself.
    """
    tokens = tokens[-WINDOW:]
    history, met = tokens.tobytes(), set[int]()
    for size in range(min(LONGEST_MATCH, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
        for begin in _find_places(history, history[-size * TOKEN_BYTES :]):
            if begin + size not in met:
                met.add(begin + size)
                found = list(tokens[begin + size : begin + size + count])
                while len(found) < count:
                    found.append(found[begin + size - len(tokens)])
                yield found


def _find_places(history: bytes, pattern: bytes) -> Iterator[int]:
    """Indices of the tokens at which `pattern` begins, the last first, its own place at the end excepted."""
    end = len(history) - 1
    while (at := history.rfind(pattern, 0, end)) >= 0:
        if at % TOKEN_BYTES == 0:
            yield at // TOKEN_BYTES
        end = at + len(pattern) - 1  # a match across token borders is none
