"""A compiled grammar, and the state of one sequence in it."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from decode_worker.grammar.bindings import CompiledGrammar, GrammarMatcher, core
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.grammar.limits import MAX_TOKEN_CPU_S
from decode_worker.grammar.vocabulary import Vocabulary


@dataclass(slots=True, eq=False)
class LoadedGrammar:
    """A compiled grammar, shared by sequences. Only `is_too_slow` changes, once."""

    compiled: CompiledGrammar
    vocabulary: Vocabulary
    text_mask: NDArray[np.int32]  # [ceil(V / 32)], see Vocabulary.text_mask
    is_too_slow: bool = False  # set by the engine thread: no sequence may use it any more

    @property
    def num_bytes(self) -> int:
        """Its memory, approximately."""
        return self.compiled.memory_size_bytes() + self.text_mask.nbytes

    def new_matcher(self, stop_token_ids: Collection[int]) -> "Matcher":
        """A matcher at the beginning. Stop tokens may follow a complete match; `is_over` ends the sequence anyway."""
        return Matcher(self, stop_token_ids)


def load_grammar(vocabulary: Vocabulary, serialised: str, kind: str, text: str) -> LoadedGrammar:
    """The grammar of `text`, which xgrammar compiled for this vocabulary and serialised. Slow for large ones."""
    compiled = core.CompiledGrammar.deserialize_json(serialised, vocabulary.info)
    return LoadedGrammar(compiled, vocabulary, vocabulary.text_mask(kind, text))


class Matcher:
    """The state of one sequence. Used by one thread at a time; never gets stop tokens.

    Raises GrammarMismatchError if one token takes more than MAX_TOKEN_CPU_S, as each further one would take longer. Not
    usable after an error. `until`: when to begin no further token, in time.thread_time().
    """

    def __init__(self, grammar: LoadedGrammar, stop_token_ids: Collection[int]) -> None:
        self.num_tokens = 0  # accepted
        self._stops = frozenset(stop_token_ids)
        # xgrammar wants a stop token. Without ours it gets one that is not text, and its bit is cleared again.
        stops = sorted(self._stops) or [next(iter(grammar.vocabulary.control), grammar.vocabulary.size - 1)]
        self._state: GrammarMatcher = core.GrammarMatcher(grammar.compiled, stops, False, -1, None)
        self._text = grammar.text_mask & ~_bits(stops, len(grammar.text_mask))
        self._allowed = self._text | _bits(self._stops, len(self._text))
        self._not_behind = grammar.vocabulary.not_behind
        self._last = -1  # accepted token
        self._next: NDArray[np.int32] | None = None  # fill(()), if it is known

    def fill(self, drafts: Sequence[int], until: float = math.inf) -> NDArray[np.int32]:
        """[n + 1, ceil(V / 32)]: row i allows what may follow the first i drafts. n: drafts before the first bad one.
        See `fill_tree`.
        """
        return self.fill_tree(drafts, (), until)[0]

    def fill_tree(
        self, drafts: Sequence[int], parents: Sequence[int], until: float = math.inf
    ) -> tuple[NDArray[np.int32], list[int]]:
        """The good drafts, by index, and [1 + good, ceil(V / 32)]: what may come next, and what may follow each.

        parents: see `ScheduledSequence`. A draft is bad if its parent is, if the grammar refuses it, if no text can
        follow it (`is_over` ends the sequence there, before another token is chosen), or if there is no time for it.
        Does not change the state.
        """
        if not drafts and self._next is not None:
            return self._next, []
        rows = np.zeros((len(drafts) + 1, len(self._text)), np.int32)
        tokens = np.array([0, *drafts])  # the first stands for what was accepted
        started = thread_time()
        left_s = max(until - started, 1e-9)  # xgrammar's clock is the wall's; 0 would mean any time
        links = _link(tuple(parents)) if parents else _chain(len(tokens))
        self._state.traverse_draft_tree(*links, tokens, rows, left_s, None)
        _check_time(started, left_s if drafts else 0.0)
        rows &= self._allowed
        for row, token in zip(rows, (self._last, *drafts), strict=True):
            if token in self._not_behind:
                row &= ~_bits(self._not_behind[token], len(row))
        good = [0]
        for index, (draft, parent) in enumerate(zip(drafts, parents or range(len(drafts)), strict=True), 1):
            word, bit = divmod(draft, 32)
            # else a control token, or bytes that are no UTF-8
            is_allowed = parent in good and (rows[parent] & self._text)[word] >> bit & 1
            if is_allowed and self._has_text(rows[index]):
                good.append(index)
        if not drafts:
            self._next = rows
        return rows[good], [index - 1 for index in good[1:]]

    def accept(self, tokens: Sequence[int], until: float = math.inf) -> bool:
        """Follow these tokens in order, none of them a stop token. Also replays an answer.

        Returns whether there was time for all; there always is for one. `num_tokens` says where to continue. Raises
        GrammarMismatchError at the first token that the grammar refuses.
        """
        for index, token in enumerate(tokens):
            started = thread_time()
            if index and started >= until:
                return False
            if token in self._stops or not self._state.accept_token(token, False):
                raise GrammarMismatchError(f"token {token} does not fit the grammar")
            self.num_tokens += 1
            self._next, self._last = None, token
            _check_time(started)
        return True

    def begin_with(self, text: str) -> bool:
        """In a trial: the sequence begins with a text. Whether the grammar takes it."""
        self._next = None
        return bool(self._state.accept_string(text, False))

    @property
    def is_over(self) -> bool:
        """The match is complete, and only a stop token may follow."""
        return self._state.is_completed() and not self._has_text(self.fill(())[0])

    def _has_text(self, row: NDArray[np.int32]) -> bool:
        return bool((row & self._text).any())


@cache
def _chain(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A tree of nodes that follow each other: each one's child and sibling, -1 for none."""
    return np.array([*range(1, count), -1]), np.full(count, -1)


def _link(parents: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As `_chain`, of any tree."""
    children, siblings = np.full(len(parents) + 1, -1), np.full(len(parents) + 1, -1)
    for index in range(len(parents), 0, -1):
        siblings[index], children[parents[index - 1]] = children[parents[index - 1]], index
    return children, siblings


def _check_time(started: float, more_s: float = 0.0) -> None:
    taken = thread_time() - started
    if taken > MAX_TOKEN_CPU_S + more_s:
        raise GrammarMismatchError(f"the grammar took {taken:.1f} s for one token: it is too ambiguous")


def _bits(tokens: Collection[int], num_words: int) -> NDArray[np.int32]:
    """[num_words]: a mask of these tokens."""
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)
