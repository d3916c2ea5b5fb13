"""Speculation without a model: what followed the last few tokens when they last stood in the sequence. Pure."""

from array import array

TOKEN_BYTES = array("i").itemsize
LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens; one alone repeats by chance all the time


def propose_repeat(tokens: "array[int]", count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier place where the sequence's last tokens stand.

    `tokens`: array("i"). The longest match wins, among equals the latest. A place near the end, as in "ababab", is read
    on into what it proposes itself. Empty when nothing repeats.
    """
    history = tokens.tobytes()
    for size in range(min(LONGEST_MATCH, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
        begin = _find_last(history, history[-size * TOKEN_BYTES :])
        if begin is not None:
            return _read_on(tokens, begin + size, count)
    return []


def _find_last(history: bytes, pattern: bytes) -> int | None:
    """Index of the last token at which `pattern` begins, its own place at the end excepted."""
    end = len(history) - 1
    while (at := history.rfind(pattern, 0, end)) >= 0:
        if at % TOKEN_BYTES == 0:
            return at // TOKEN_BYTES
        end = at + len(pattern) - 1  # a match across token borders is none
    return None


def _read_on(tokens: "array[int]", begin: int, count: int) -> list[int]:
    found = list(tokens[begin : begin + count])
    period = len(tokens) - begin
    while len(found) < count:
        found.append(found[-period])
    return found
