"""Trees of drafts change no token, at any temperature, and what is right of them is accepted."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.speculation.drafters import Draft, Drafter, Wanted
from engine.engine import Engine
from engine.trees import DraftTree
from gateway.text.tokenizer import Tokenizer
from tests.decode_worker.test_speculation_equality import build, build_params, build_requests
from tests.support.decoding import Answers, build_eager_speculator, decode
from tests.support.grammars import compile_here, vocabulary
from wire.sampling import SamplingParams


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build("", 600)


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer(engine.folder)


class TreeDrafter(Drafter):
    """Trees of random shapes in which the right path is anywhere, or ends early."""

    def __init__(self, truth: Mapping[int, Seq[int]], vocab_size: int, right: float = 1.0, seed: int = 0) -> None:
        """truth: handle |-> answer. right: the chance that a draft on the right path has a right child."""
        self._truth, self._vocab_size, self._right = truth, vocab_size, right
        self._random = random.Random(seed)
        self.num_forked = self.num_right = 0

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        return [self._draft(one) for one in wanted]

    def _draft(self, one: Wanted) -> Draft:
        params = one.sequence.params
        rest = self._truth[params.handle][len(one.sequence.tokens) - params.num_prompt :]
        tokens, parents, children = list[int](), list[int](), dict[int, set[int]]()

        def add(parent: int, token: int) -> None:
            if token not in children.setdefault(parent, set()):
                children[parent].add(token)
                tokens.append(token)
                parents.append(parent)

        tip, depth = 0, 0  # of the right path
        while len(tokens) < one.count:
            before = len(tokens)
            if self._random.random() < 0.5 and tip >= 0 and depth < len(rest):
                if self._random.random() < self._right:
                    add(tip, rest[depth])
                    tip, depth = tokens.index(rest[depth], before) + 1 if len(tokens) > before else tip, depth + 1
                else:
                    tip = -1
            else:
                right = rest[depth] if depth < len(rest) else -1
                token = self._random.randrange(self._vocab_size)
                add(self._random.randrange(len(tokens) + 1), token if token != right else (token + 1) % 256)
        self.num_forked += len(set(parents)) < len(parents)
        self.num_right += depth
        return Draft(tokens, parents)


def check_equal(found: Answers, plain: Answers) -> None:
    assert found.tokens == plain.tokens
    for handle, end in plain.ends.items():
        assert found.ends[handle].finish_reason == end.finish_reason
        told, expected = found.logprobs[handle], plain.logprobs[handle]
        assert [one.top_ids for one in told] == [one.top_ids for one in expected]
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in expected], abs=1e-4)


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_answers_with_trees_are_those_without(engine: Engine, tokenizer: Tokenizer, right: float) -> None:
    """Of all samplings, some with log-probabilities, minimum lengths, and end tokens."""
    requests = [replace(one, max_draft_tokens=2 + at) for at, one in enumerate(build_requests(tokenizer, "tree"))]
    plain = decode(engine, [replace(one, drafter="off") for one in requests])
    drafter = TreeDrafter(plain.tokens, 1024, right)
    drafted = decode(engine, requests, build_eager_speculator({"tree": drafter}), is_checked=True)
    check_equal(drafted, plain)
    assert drafter.num_forked > 30 and drafted.num_accepted == drafter.num_right > 50


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_pages", [600, 32], ids=["", "preemption"])
def test_trees_with_grammars_penalties_and_choices_of_a_prompt(
    engine: Engine, tokenizer: Tokenizer, temperature: float, num_pages: int
) -> None:
    """Choices share the pages of their prompt; grammars allow few tokens, and refuse most of what is drafted."""
    words, digits = (compile_here("regex", text, vocabulary()) for text in ("([a-z]{2,9} )+", "[0-9 ]{40,}"))
    kinds: list[dict[str, Any]] = [
        {}, {"grammar": words}, {"grammar": digits, "num_logprobs": 2},
        {"sampling": SamplingParams(temperature, seed=5, repetition_penalty=1.4, frequency_penalty=0.5)},
        {"grammar": words, "sampling": SamplingParams(temperature, seed=6, presence_penalty=1.0)},
        {"min_tokens": 20, "stop_token_ids": tokenizer.eos_token_ids},
    ]  # fmt: skip
    requests = [
        build_params(
            tokenizer, "Tell me a story about a fox.", 10 * at + choice, 50, drafter="tree", max_draft_tokens=12,
            **{"sampling": SamplingParams(temperature, seed=choice), **kind},
        )
        for at, kind in enumerate(kinds)
        for choice in (1, 2)
    ]  # fmt: skip
    plain = decode(engine, [replace(one, drafter="off") for one in requests])
    for ahead in (0, 1):
        drafter = TreeDrafter(plain.tokens, 256, 0.9, seed=ahead)
        speculator = build_eager_speculator({"tree": drafter}, ahead > 0)
        drafted = decode(engine, requests, speculator, steps_ahead=ahead, num_pages=num_pages, is_checked=True)
        check_equal(drafted, plain)
        assert drafter.num_forked > 50 and drafted.num_accepted > 100
        assert bool(drafted.scheduler.num_preemptions) == (num_pages == 32)


@pytest.mark.parametrize("broken", ["a path's KV is not moved", "a sibling's KV is kept", "a sibling is seen"])
def test_what_trees_must_not_do_is_noticed(
    engine: Engine, tokenizer: Tokenizer, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [replace(one, max_draft_tokens=8) for one in build_requests(tokenizer, "tree")]
    plain = decode(engine, [replace(one, drafter="off") for one in requests])
    if broken == "a path's KV is not moved":
        monkeypatch.setattr(DraftTree, "_move", lambda *_: None)
    elif broken == "a sibling's KV is kept":
        move = DraftTree._move
        monkeypatch.setattr(DraftTree, "_move", lambda self, pages, at, to: move(self, pages, at.flip(0), to))
    else:
        monkeypatch.setattr(DraftTree, "add_to", lambda self, batch: batch)
    drafter = TreeDrafter(plain.tokens, 1024)
    assert decode(engine, requests, build_eager_speculator({"tree": drafter})).tokens != plain.tokens
