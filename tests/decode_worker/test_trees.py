"""Trees of drafts change no token, at any temperature, and what is right of them is accepted."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.speculation.drafters import (
    Draft,
    HeadDrafter,
    NgramDrafter,
    Wanted,
    build_drafter,
)
from decode_worker.speculation.lengths import Candidate, CostCurve, CostMeter, Costs, choose_lengths
from decode_worker.speculation.repeats import LONGEST_MATCH, SHORTEST_MATCH, find_repeats
from decode_worker.speculation.trees import MOST_BRANCHES, Branches, find_depth, grow, plant
from engine.compose import find_why_chains
from engine.engine import Engine
from engine.trees import DraftTree
from gateway.text.tokenizer import Tokenizer
from tests.decode_worker.test_draft_heads import ask
from tests.decode_worker.test_draft_heads import build as build_small
from tests.decode_worker.test_speculation_equality import build, build_params, build_requests
from tests.support.combinations import combination
from tests.support.decoding import Answers, TreeDrafter, build_eager_speculator, build_forking_speculator, decode
from tests.support.draft_heads import Head, write_eagle3, write_medusa, write_medusa_oracle, write_oracle, write_target
from tests.support.grammars import compile_here, vocabulary
from tests.support.tiny_models import VOCAB
from wire.sampling import SamplingParams


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build("", 600)


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer(engine.folder)


def check_equal(found: Answers, plain: Answers) -> None:
    assert found.tokens == plain.tokens
    for handle, end in plain.ends.items():
        assert found.ends[handle].finish_reason == end.finish_reason
        told, expected = found.logprobs[handle], plain.logprobs[handle]
        assert [one.top_ids for one in told] == [one.top_ids for one in expected]
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in expected], abs=1e-4)


def test_backends_and_stages_that_read_no_ancestors_have_chains(engine: Engine) -> None:
    """Their tokens would be wrong, as in stages that nobody tells of a tree."""
    reasons = [find_why_chains(engine.config, *place) for place in (("cpu_paged", 1), ("cpu_paged", 2), ("triton", 1))]
    assert reasons == [None, "stages", "triton"]


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_answers_with_trees_are_those_without(engine: Engine, tokenizer: Tokenizer, right: float) -> None:
    """All samplings, some with log-probabilities, minimum lengths, and end tokens."""
    requests = [replace(one, max_draft_tokens=2 + at) for at, one in enumerate(build_requests(tokenizer, "tree"))]
    plain = decode(engine, [replace(one, drafter="off") for one in requests])
    drafter = TreeDrafter(plain.tokens, 1024, right)
    drafted = decode(engine, requests, build_eager_speculator({"tree": drafter}), is_checked=True)
    check_equal(drafted, plain)
    assert drafter.num_forked > 30 and drafted.num_accepted == drafter.num_right > 50


@pytest.mark.parametrize(
    ("temperature", "num_pages"),
    [(0.0, 600), combination(0.5, 600), combination(1.0, 600), combination(0.0, 32), combination(0.5, 32), (1.0, 32)],
)
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


# -- drafters whose drafts are trees -----------------------------------------------------------------------------------


def test_repeats_that_go_on_in_several_ways_are_a_tree(engine: Engine, tokenizer: Tokenizer) -> None:
    texts = ("a cat sat. a cat ran. a cat hid. a dog ran. a", "1 2 3 1 2 4 1 2 5 1 2", "abc abd abe abc abd ab")
    requests = [
        build_params(
            tokenizer, texts[at % 3], 1 + at, 60, drafter="ngram", max_draft_tokens=8,
            sampling=SamplingParams((0.0, 0.5, 1.0)[at % 3], seed=at, repetition_penalty=1.0 + 0.1 * (at % 2)),
        )
        for at in range(6)
    ]  # fmt: skip
    plain = decode(engine, [replace(one, drafter="off") for one in requests])
    speculator = build_forking_speculator({"ngram": NgramDrafter()})
    answers = decode(engine, requests, speculator, is_checked=True)
    check_equal(answers, plain)
    assert speculator.num_forked > 10 and answers.num_accepted > 20
    chains = decode(engine, requests, build_eager_speculator({"ngram": NgramDrafter()}))
    assert chains.tokens == plain.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("write", [write_medusa, write_eagle3])
def test_random_heads_give_trees(tmp_path: Path, write: Callable[[Path, Any], Head], temperature: float) -> None:
    """A tree has what the heads find likeliest, with the sequence's noise, and no token twice."""
    target = write_target(tmp_path / "model")
    engine = build_small(tmp_path / "model", write(tmp_path / "head", target).draft_model, 60)
    assert engine.draft_runner is not None and engine.why_chains is None
    requests = [
        ask(
            at, [*range(3, 40 + at)], 40, sampling=SamplingParams(temperature, seed=at), max_draft_tokens=12,
            min_tokens=20 * (at % 2), stop_token_ids=frozenset(range(0, VOCAB, 9)), num_logprobs=2,
        )
        for at in range(1, 5)
    ]  # fmt: skip
    plain = decode(engine, [replace(one, drafter="off") for one in requests])
    drafter = build_drafter(engine.draft_runner, CostMeter(), 64, engine.has_draft_kv)
    assert isinstance(drafter, HeadDrafter)
    speculator = build_forking_speculator({"draft": drafter})
    trees = list[Draft]()
    propose = drafter.propose

    def propose_noting(wanted: Seq[Wanted]) -> list[Draft]:
        trees.extend(found := propose(wanted))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", propose_noting)
        answers = decode(engine, requests, speculator, is_checked=True)
    check_equal(answers, plain)
    forked = [one for one in trees if one.parents]
    assert speculator.num_forked > 10 and len(forked) > 10 and max(len(one.token_ids) for one in forked) > 6
    for one in forked:
        pairs = list(zip(one.parents, one.token_ids, strict=True))
        assert len(set(pairs)) == len(pairs) and all(parent <= at for at, parent in enumerate(one.parents))


@pytest.mark.parametrize("write", [write_medusa_oracle, write_oracle])
def test_a_head_that_is_sometimes_second_best_has_its_second_choices_accepted(
    tmp_path: Path, write: Callable[[Path], tuple[Any, Head]]
) -> None:
    """The model's own lm_head as heads, over rows that are all the same: right at any temperature, as chains and trees;
    and a head with KV of its own, which guesses right only where it has followed what was right of each tree.

    Without the first choices only siblings are right: each step gives two tokens, or as many as the tree is deep.
    """
    _, head = write(tmp_path)
    engine = build_small(tmp_path / "model", head.draft_model, 60)
    assert engine.draft_runner is not None
    requests = [ask(at, [5, 6, 7, at], 30, sampling=SamplingParams(1.0, seed=at), max_draft_tokens=9) for at in (1, 2)]
    plain = decode(engine, [replace(one, drafter="off") for one in requests])

    class Second(HeadDrafter):
        """Swaps each head's first two choices."""

        def _plant(self, one: Wanted, tokens: list[int], likeliest: list[list[int]]) -> Draft:
            return super()._plant(one, tokens, [[second, first, *rest] for first, second, *rest in likeliest])

    for kind in (HeadDrafter, Second):
        drafter = kind(engine.draft_runner, CostMeter(), 64, engine.has_draft_kv)
        speculator = build_forking_speculator({"draft": drafter})
        answers = decode(engine, requests, speculator)
        assert answers.tokens == plain.tokens
        steps = sum(end.timing.steps for end in answers.ends.values() if end.timing)
        assert steps < (24 if kind is HeadDrafter else 45), (kind, steps)


# -- which tree --------------------------------------------------------------------------------------------------------


def test_nodes_come_by_their_chances_each_behind_its_parent() -> None:
    branches = Branches()
    for _ in range(300):
        branches.note(0, 1)
        branches.note(1, None)
        branches.note(2, 2)
    found = list(islice(grow(0.5, branches), 16))
    chances, paths = [one for one, _ in found], [path for _, path in found]
    assert chances == sorted(chances, reverse=True) and len(set(paths)) == 16
    assert all(path[:-1] in paths or len(path) == 1 for path in paths)
    assert paths[:2] == [(0,), (1,)], "at the first depth the second choice is nearly always right if the first is not"
    assert not any(len(path) == 2 and path[1] for path in paths), "at the second no other is"
    assert chances[0] == 0.5 and 0.4 < chances[1] < 0.5


@given(st.floats(0.01, 0.99), st.integers(1, 16), st.integers(1, 5))
def test_the_nodes_that_are_planned_are_those_that_are_drafted(acceptance: float, count: int, depth: int) -> None:
    branches = Branches()
    nodes = branches.list_nodes(count, acceptance, depth)
    options = [[10 * at + branch for branch in range(MOST_BRANCHES)] for at in range(depth)]
    drafts, parents = plant(
        count, acceptance, branches, lambda drafted: options[len(drafted)] if len(drafted) < depth else ()
    )
    assert len(drafts) == len(nodes) and find_depth(count, acceptance, branches, depth) <= depth
    depths = [0]
    for parent in parents or range(len(drafts)):
        depths.append(depths[parent] + 1)
    assert max(depths) == sum(is_first for _, is_first in nodes)
    assert [token // 10 for token in drafts] == [depth - 1 for depth in depths[1:]]
    pairs = list(zip(parents or range(len(drafts)), drafts, strict=True))
    first = 0
    while (first, 10 * depths[first]) in pairs:
        assert pairs.index((first, 10 * depths[first])) == first, "the first choices lie as a chain does"
        first += 1


def test_a_tree_shrinks_to_a_chain_and_then_to_nothing() -> None:
    """As rows cost more, and as there are more answers."""

    def count(slope: float, num_answers: int) -> int:
        rows = CostCurve(((1, 1.0), (16, 1.0 + 15 * slope), (256, 1.0 + 255 * slope)))
        nodes = Branches().list_nodes(12, 0.6, 4)
        candidates = [Candidate(0.6, 12, nodes=nodes)] * num_answers
        return sum(choose_lengths(candidates, 0, Costs(rows, None))) // num_answers

    by_price = [count(slope, 1) for slope in (0.001, 0.05, 0.2, 0.5, 2.0)]
    assert by_price == sorted(by_price, reverse=True) and by_price[0] == 12 and by_price[-1] == 0
    assert any(0 < found <= 3 for found in by_price)
    by_load = [count(0.05, number) for number in (1, 4, 16, 64)]
    assert by_load == sorted(by_load, reverse=True) and by_load[0] > by_load[-1]


def test_forwards_of_the_drafter_are_counted_by_depth() -> None:
    """Siblings need none: where its forwards are dear, a tree is wide and not deep."""
    flat, dear = CostCurve(((1, 1.0), (256, 1.001))), CostCurve(((1, 0.35), (256, 0.36)))
    nodes = [(0.5, True), (0.4, False), (0.3, False), (0.2, True), (0.1, True)]
    (wide,) = choose_lengths([Candidate(0.5, 5, nodes=nodes)], 0, Costs(flat, dear))
    (deep,) = choose_lengths([Candidate(0.5, 5)], 0, Costs(flat, dear))
    assert wide == 3 and deep == 1


@given(st.lists(st.sampled_from([0, 1, 2, 256]), min_size=2, max_size=30))
def test_every_repeat_is_found_once(tokens: list[int]) -> None:
    found = list(find_repeats(array("i", tokens), 4))
    places = {
        begin + size
        for size in range(SHORTEST_MATCH, LONGEST_MATCH + 1)
        for begin in range(len(tokens) - size)
        if tokens[begin : begin + size] == tokens[-size:]
    }
    assert len(found) == len(places)
    for place in places:
        read = list(tokens)
        for at in range(4):
            read.append(read[place + at])
        assert read[len(tokens) :] in found
