"""Grammars for tests, compiled in the test's own process: no limits, no wait for a compiler process."""

import random
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from decode_worker.grammar.bindings import CompiledGrammar, compile_text
from decode_worker.grammar.matcher import LoadedGrammar
from decode_worker.grammar.vocabulary import Vocabulary, read_vocabulary
from demo.paths import TARGET_DIR
from gateway.text.tokenizer import Tokenizer

DEMO_SIZE = 1024


@cache
def vocabulary(size: int = DEMO_SIZE) -> Vocabulary:
    """The demo model's vocabulary, padded to `size` tokens."""
    return read_vocabulary(TARGET_DIR, size)


def encode(text: str) -> list[int]:
    return Tokenizer(TARGET_DIR).encode(text, add_special_tokens=False)


def text_of(tokens: list[int]) -> str:
    """The text of an answer's tokens."""
    return Tokenizer(TARGET_DIR).decode(tokens)


def compile_here(kind: str, text: str, words: Vocabulary) -> LoadedGrammar:
    return LoadedGrammar(_compile(kind, text, words), words, words.text_mask(kind, text))


@lru_cache(256)  # tests walk a grammar many times, and to compile one takes 10 ms or more
def _compile(kind: str, text: str, words: Vocabulary) -> CompiledGrammar:
    return compile_text(kind, text, words.info)


def allowed_in(row: NDArray[np.int32]) -> list[int]:
    """The tokens that a mask allows."""
    allowed: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return allowed


def walk(grammar: LoadedGrammar, stops: tuple[int, ...], draw: random.Random, most: int) -> list[int] | None:
    """Random allowed tokens to the end, without stop token; None if that takes more than `most` tokens."""
    state, tokens = grammar.new_matcher(stops), list[int]()
    while not state.is_over and len(tokens) < most:
        token = draw.choice(allowed_in(state.fill(())[0]))
        if token in stops:
            return tokens
        tokens.append(token)
        state.accept([token])
    return tokens if state.is_over else None
