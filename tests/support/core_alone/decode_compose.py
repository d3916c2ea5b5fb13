"""What decode_worker/compose.py is where there are no satellites."""

from typing import Any

from decode_worker.interfaces import Drafts, GrammarSource, Masks


def build_drafts(*_parts: Any) -> Drafts:
    return Drafts()


def build_masks() -> Masks:
    return Masks()


def build_grammars(*_parts: Any) -> GrammarSource:
    return GrammarSource()
