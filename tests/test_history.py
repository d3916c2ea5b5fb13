"""Counts kept for penalties equal counting anew, through everything that can happen to a session."""

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_worker.batching import Planned, plan_step
from decode_worker.loop import build_choices
from decode_worker.session import Guessed, Reservation, Session
from decode_worker.session_table import SessionTable
from engine.choice import Choice
from engine.history import History, TokenCounts
from engine.kvcache.allocator import PageAllocator
from engine.logits import adjust_logits_
from engine.runner import choose_tokens
from engine.sampling import SamplingParams, sample

VOCABULARY = 40
SAMPLINGS = (
    SamplingParams(repetition_penalty=1.3, seed=1),
    SamplingParams(0.0, frequency_penalty=0.7),
    SamplingParams(0.8, presence_penalty=-1.5, seed=2),
    SamplingParams(top_k=7, repetition_penalty=0.6, frequency_penalty=0.3, presence_penalty=0.2, seed=3),
    SamplingParams(seed=4),
)


def adjust_slowly_(row: Tensor, seen: list[int], num_prompt: int, sampling: SamplingParams) -> None:
    """[V] in place: the penalties, from all that the row has seen. The slow twin of what a history tells."""
    if sampling.repetition_penalty != 1:
        ids = torch.tensor(seen)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        ids, counts = torch.unique(torch.tensor(seen[num_prompt:], dtype=torch.int64), return_counts=True)
        row[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty


# --- counting

tokens_lists = st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=9)


def as_counter(counts: TokenCounts, more: list[int]) -> Counter[int]:
    ids, numbers = counts.after(more)
    assert counts.ids_after(more).tolist() == ids.tolist()
    return Counter(dict(zip(ids.tolist(), numbers.tolist(), strict=True)))


@given(tokens_lists, st.lists(st.integers(0, 14), max_size=9))
def test_counts_equal_counting_anew(parts: list[list[int]], guesses: list[int]) -> None:
    counts, seen = TokenCounts(), list[int]()
    for part in parts:
        told = counts.ids, counts.counts
        before = [array.copy() for array in told]
        counts.add(part)
        seen += part
        assert as_counter(counts, []) == Counter(seen)
        assert as_counter(counts, guesses) == Counter(seen + guesses)
        assert as_counter(counts, []) == Counter(seen), "guesses leave nothing behind"
        assert all((now == then).all() for now, then in zip(told, before, strict=True)), "what was told stays"


@given(tokens_lists, st.integers(0, 40))
def test_a_history_follows_its_sequence(parts: list[list[int]], num_prompt: int) -> None:
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    history, tokens = History(sampling, num_prompt), list[int]()
    for part in parts:
        tokens += part
        for _ in range(2):  # the second time nothing is new
            history.follow(tokens)
            assert history.length == len(tokens)
            assert as_counter(history.seen, []) == Counter(tokens)
            assert as_counter(history.answer, []) == Counter(tokens[num_prompt:])


def test_what_no_penalty_asks_for_is_not_counted() -> None:
    for sampling, num_seen, num_answer in ((SAMPLINGS[0], 3, 0), (SAMPLINGS[1], 0, 2), (SAMPLINGS[4], 0, 0)):
        history = History(sampling, 1)
        history.follow([5, 6, 7])
        assert (len(history.seen.ids), len(history.answer.ids)) == (num_seen, num_answer)
    assert not SAMPLINGS[4].has_penalties and all(sampling.has_penalties for sampling in SAMPLINGS[:4])


def test_a_sequence_that_shrinks_is_an_error() -> None:
    history = History(SAMPLINGS[0], 1)
    history.follow([5, 6, 7])
    with pytest.raises(ValueError, match="3 tokens were counted, now there are 2"):
        history.follow([5, 6])


def test_a_history_of_other_tokens_is_refused_before_anything_changes() -> None:
    history = History(SAMPLINGS[0], 1)
    history.follow([5, 6, 7])
    good = Choice(SAMPLINGS[0], 5, [5, 6, 7], 1, guesses=(8, 9), history=history)
    logits = torch.ones(2, VOCABULARY)
    with pytest.raises(ValueError, match="counts 3 tokens, the row has seen 4"):
        adjust_logits_(logits, [good, replace(good, position=6)])
    assert torch.equal(logits, torch.ones(2, VOCABULARY))


# --- the lives of sessions


@dataclass
class Worker:
    """A session table whose steps choose at random, checked against the slow twin."""

    table: SessionTable
    chance: random.Random

    def step(self) -> None:
        planned = [self._guess(step) for step in plan_step(self.table, 16)]
        choices = [build_choices(step) for step in planned]  # of all before the first answer, as the loop does it
        for step, wanted in zip(planned, choices, strict=True):
            self._check(step, wanted)
            self._finish(step)
        self.table.check()

    def _guess(self, step: Planned) -> Planned:
        if not step.wants_token or step.count > 1:
            return step
        room = self.table.make_room_for_guesses(step.session, self.chance.randrange(5))
        return replace(step, guesses=tuple(self.chance.randrange(VOCABULARY) for _ in range(room)))

    def _check(self, step: Planned, choices: list[Choice]) -> None:
        session = step.session
        assert len(choices) == (1 + len(step.guesses) if step.wants_token else 0)
        assert session.sampling.has_penalties or all(choice.history is None for choice in choices)
        generator = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        logits = torch.randn(len(choices), VOCABULARY, generator=generator)
        slow = logits.clone()
        for num_guessed, row in enumerate(slow):
            seen = [*session.tokens, *step.guesses[:num_guessed]]
            adjust_slowly_(row, seen, session.answer_begin, session.sampling)
        fast = logits.clone()
        adjust_logits_(fast, choices)
        assert torch.equal(fast, slow)
        positions = [len(session.tokens) + num_guessed for num_guessed in range(len(choices))]
        tokens = sample(slow, [session.sampling] * len(choices), positions).tolist()
        assert [one.token for one in choose_tokens(logits, choices)] == tokens

    def _finish(self, step: Planned) -> None:
        accepted = step.guesses[: self.chance.randint(0, len(step.guesses))]
        tokens = [*accepted, self.chance.randrange(VOCABULARY)] if step.wants_token else []
        guessed = Guessed(len(step.guesses), len(step.guesses), None)
        self.table.finish_step(step.session, step.count + len(step.guesses), tokens, 0.0, guessed=guessed)


def build_worker(chance: random.Random, num_pages: int = 14) -> Worker:
    return Worker(SessionTable(PageAllocator(num_pages, [0] * num_pages), 4, 8, 60.0), chance)


def reservation(handle: int, tokens: list[int], num_emitted: int, share_with: int = 0) -> Reservation:
    return Reservation(
        request_id=str(handle), attempt=1, gateway="g", handle=handle, prompt_ids=tokens,
        max_tokens=max(24 - num_emitted, 1), sampling=SAMPLINGS[handle % len(SAMPLINGS)], stop_token_ids=frozenset(),
        local_prefill_max_tokens=1 << 20, num_emitted=num_emitted, share_with=share_with,
    )  # fmt: skip


def begin_again(session: Session) -> Reservation:
    """What a gateway asks another worker for."""
    return reservation(session.handle, list(session.tokens), len(session.tokens) - session.answer_begin)


@given(st.integers(0, 1 << 30), st.integers(1, 30))
@settings(max_examples=60)
def test_penalties_equal_the_slow_twin_all_through_a_session(seed: int, num_steps: int) -> None:
    chance = random.Random(seed)
    prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9))]
    worker = build_worker(chance)
    for handle in range(1, 5):
        tokens = prompt if handle > 2 else [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9))]
        worker.table.reserve(reservation(handle, tokens, 0, share_with=3 if handle == 4 else 0), 0.0)
    for _ in range(num_steps):
        worker.step()
    other = build_worker(chance, 60)
    for session in worker.table:
        other.table.reserve(begin_again(session), 0.0)
    while len(other.table):
        other.step()


def test_lives_as_tried_above_are_full_of_trouble() -> None:
    worker = build_worker(random.Random(5))
    for handle in range(1, 5):
        worker.table.reserve(reservation(handle, [1, 2, 3, 4, 5, 6], 0, share_with=1 if handle == 2 else 0), 0.0)
    while len(worker.table):
        worker.step()
    assert worker.table.num_preemptions > 0
