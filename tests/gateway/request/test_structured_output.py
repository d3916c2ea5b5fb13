"""Output constraints as grammars."""

import pytest

from gateway.request.rules import check_form
from gateway.request.types import AnswerForm


def test_choices_are_written_so_that_only_they_match() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    accepts = pytest.importorskip("xgrammar.testing")._is_grammar_accept_string
    texts = ['a "b" \\ c', "x\ny\t\x01\x7f", "é日本🙂", "[]-^$.*", "it's", "\x00z", "\\x41", '\x01f00"f', " lead"]
    grammar = check_form(AnswerForm("choice", texts, "choice"))
    assert grammar is not None
    compiled = xgrammar.Grammar.from_ebnf(grammar.text)
    assert all(accepts(compiled, text) for text in texts)
    assert not any(accepts(compiled, text) for text in ("A", "", "it", "lead", "a "))
