"""A compiled grammar, and the state of one sequence in it.

Knows neither how grammars are compiled nor sessions.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from threading import Event
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from decode_worker.grammar.bindings import CompiledGrammar, new_matcher, read_compiled
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.grammar.limits import MAX_TOKEN_CPU_S
from decode_worker.grammar.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, shared by sequences. Only `is_too_slow` changes, once."""

    compiled: CompiledGrammar
    vocabulary: Vocabulary
    text_mask: NDArray[np.int32]  # [ceil(V / 32)], see Vocabulary.text_mask
    is_too_slow: Event = field(default_factory=Event)  # set by the engine thread: no sequence may use it any more

    @property
    def num_bytes(self) -> int:
        """Its memory, approximately."""
        return self.compiled.memory_size_bytes() + self.text_mask.nbytes

    def new_matcher(self, stop_token_ids: Collection[int]) -> "Matcher":
        """A matcher at the beginning. Stop tokens may follow a complete match; `is_over` ends the sequence anyway."""
        return Matcher(self, stop_token_ids)


def load_grammar(vocabulary: Vocabulary, serialised: str, kind: str, text: str) -> Grammar:
    """The grammar of `text`, which xgrammar compiled for this vocabulary and serialised. Slow for large ones."""
    return Grammar(read_compiled(serialised, vocabulary.info), vocabulary, vocabulary.text_mask(kind, text))


class Matcher:
    """The state of one sequence. Used by one thread at a time; never gets stop tokens.

    Raises GrammarMismatchError if one token takes more than MAX_TOKEN_CPU_S, as each further one would take longer. Not
    usable after an error. `until`: when to begin no further token, in time.thread_time().
    """

    def __init__(self, grammar: Grammar, stop_token_ids: Collection[int]) -> None:
        self.num_tokens = 0  # accepted
        self._size = grammar.vocabulary.size
        self._stops = frozenset(stop_token_ids)
        # xgrammar wants a stop token. Without ours it gets one that is no text, and its bit is cleared again.
        stand_in = next(iter(grammar.vocabulary.control), self._size - 1)
        self._state = new_matcher(grammar.compiled, sorted(self._stops) or [stand_in])
        self._text_mask = _with_bits(grammar.text_mask, self._stops or {stand_in}, is_set=False)
        self._allowed_mask = _with_bits(self._text_mask, self._stops, is_set=True)
        self._rows = np.zeros((1, len(self._text_mask)), np.int32)
        self._is_first_row_filled = False

    def fill(self, drafts: Sequence[int], until: float = math.inf) -> NDArray[np.int32]:
        """[n + 1, ceil(V / 32)]: row i allows what may follow the first i drafts. n: drafts before the first bad one.

        A draft is bad if the grammar refuses it, if no text can follow it (`is_over` ends the sequence there, before
        another token is chosen), or if there is no time for it. Does not change the state. The rows are valid until
        the next call.
        """
        self._ensure_rows(len(drafts) + 1)
        self._fill_first()
        num_stepped = num_good = 0
        for draft in drafts:
            if thread_time() >= until or not self._is_text(self._rows[num_good], draft):
                break
            self._step(draft)
            num_stepped += 1
            self._fill_row(num_stepped)
            if not self._can_go_on(self._rows[num_stepped]):
                break
            num_good += 1
        self._state.rollback(num_stepped)
        return self._rows[: num_good + 1]

    def accept(self, tokens: Sequence[int], until: float = math.inf) -> bool:
        """Follow these tokens in order, none of them a stop token. Also replays an answer.

        Returns whether there was time for all; there always is for one. `num_tokens` says where to continue. Raises
        GrammarMismatchError at the first token that the grammar refuses.
        """
        for index, token in enumerate(tokens):
            if index and thread_time() >= until:
                return False
            self._is_first_row_filled = False
            self._step(token)
            self.num_tokens += 1
        return True

    def begin_with(self, text: str) -> None:
        """In a trial: the sequence begins with a text that the grammar takes."""
        self._is_first_row_filled = False
        self._state.accept_string(text, False)

    @property
    def is_over(self) -> bool:
        """The match is complete, and only a stop token may follow."""
        if not self._state.is_completed():
            return False
        self._fill_first()
        return not self._can_go_on(self._rows[0])

    def _is_text(self, row: NDArray[np.int32], token: int) -> bool:
        """Whether a row allows this token, and it is no stop token."""
        is_token = 0 <= token < self._size and token not in self._stops
        return is_token and bool(row[token // 32] >> token % 32 & 1)

    def _can_go_on(self, row: NDArray[np.int32]) -> bool:
        return bool((row & self._text_mask).any())

    def _step(self, token: int) -> None:
        started = thread_time()
        if token in self._stops or not self._state.accept_token(token, False):
            raise GrammarMismatchError(f"token {token} does not fit the grammar")
        _check_time(started)

    def _fill_first(self) -> None:
        if not self._is_first_row_filled:
            self._fill_row(0)
            self._is_first_row_filled = True

    def _fill_row(self, row: int) -> None:
        started = thread_time()
        self._state.fill_next_token_bitmask(self._rows, row, False)
        self._rows[row] &= self._allowed_mask
        _check_time(started)

    def _ensure_rows(self, num_rows: int) -> None:
        if num_rows > len(self._rows):
            self._rows = np.zeros((num_rows, len(self._text_mask)), np.int32)
            self._is_first_row_filled = False


def _check_time(started: float) -> None:
    taken = thread_time() - started
    if taken > MAX_TOKEN_CPU_S:
        raise GrammarMismatchError(f"the grammar took {taken:.1f} s for one token: it is too ambiguous")


def _with_bits(mask: NDArray[np.int32], tokens: Collection[int], *, is_set: bool) -> NDArray[np.int32]:
    """A copy in which these tokens' bits are set, or cleared."""
    words = mask.copy()
    bits = words.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        bits[token // 32] = bits[token // 32] | bit if is_set else bits[token // 32] & ~bit
    return words
